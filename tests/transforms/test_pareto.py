"""The curve of bytes against work."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import xform

W = np.cos(np.arange(4 * 64 * 64.0)).reshape(4, 64, 64).astype(np.float32) / 8
X = np.sin(np.arange(64 * 64.0)).reshape(64, 64).astype(np.float32)


def loss(w, x):
    for i in range(4):
        x = jnp.sin(jnp.tanh(x @ w[i]) @ w[i])
    return jnp.sum(x)


@pytest.mark.slow
def test_less_bytes_are_more_work(tmp_path) -> None:
    curve = xform.pareto(loss, W, X, points=4)
    ours = [p for p in curve if not p.stock]
    assert ours[0].recompute_flops == 0
    for a, b in itertools.pairwise(ours):
        assert (b.peak_bytes, -b.recompute_flops) <= (a.peak_bytes, -a.recompute_flops)
    names = [p.name for p in curve if p.stock]
    assert names[0] == "save_everything"
    assert "save_dots" in names
    assert len(curve) == len(ours) + 4
    text = str(curve)
    assert all(name in text for name in names)
    curve.plot(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 5000
    assert len(curve.to_dict()["points"]) == len(curve)


def test_without_compiling_bytes_are_simulated() -> None:
    curve = xform.pareto(loss, W, X, points=2, verify=False)
    made = xform.plan(loss, W, X, verify=False)
    assert not curve.compiled
    assert next(iter(curve)).peak_bytes == made.predicted_bytes


def test_it_says_how_long_planning_took_and_how_little_could_be_run_again() -> None:
    curve = xform.pareto(loss, W, X, points=2, verify=False)
    assert all(p.seconds > 0 for p in curve)
    assert all(p.least_flops is None or p.least_flops <= p.recompute_flops for p in curve)
    assert next(iter(curve)).least_flops == 0
    head = str(curve).splitlines()[1].split("  ")
    assert {"lower bound", "planned in"} <= {word.strip() for word in head}
