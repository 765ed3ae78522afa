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


def test_curve_reports_planning_seconds_and_least_recompute_flops() -> None:
    curve = xform.pareto(loss, W, X, points=2, verify=False)
    assert all(p.seconds > 0 for p in curve)
    assert all(p.least_flops is None or p.least_flops <= p.recompute_flops for p in curve)
    assert next(iter(curve)).least_flops == 0
    head = str(curve).splitlines()[1].split("  ")
    assert {"lower bound", "planned in"} <= {word.strip() for word in head}


def cross_entropy(w, h, y):
    logits = jnp.tanh(h) @ w
    picked = jnp.take_along_axis(logits, y[:, None], 1)[:, 0]
    return jnp.mean(jnp.log(jnp.exp(logits).sum(-1)) - picked)


def test_plans_with_slices_are_a_second_curve(tmp_path) -> None:
    args = np.ones((32, 2048), np.float32), np.ones((512, 32), np.float32), np.zeros(512, np.int32)
    curve = xform.pareto(cross_entropy, *args, points=4, verify=False, slices=True)
    sliced = [p for p in curve if p.slices]
    least = min(p.peak_bytes for p in curve if not p.slices)
    assert len(sliced) == 2
    assert all(p.name.startswith("slices:budget:") and not p.stock for p in sliced)
    assert sliced[1].peak_bytes < sliced[0].peak_bytes < 0.6 * least
    assert sliced[0].slices < sliced[1].slices
    head, *rows = str(curve).splitlines()[1:]
    assert head.endswith("slices")
    counts = [row.split()[-1] for row in rows if row.startswith("slices:")]
    assert counts == [str(p.slices[0]) for p in sliced]
    curve.plot(tmp_path / "curve.svg")
    assert "in slices" in (tmp_path / "curve.svg").read_text()
    plain = xform.pareto(cross_entropy, *args, points=4, verify=False)
    assert [p.name for p in plain] == [p.name for p in curve if not p.slices]
    assert "slices" not in str(plain)


def test_the_curve_of_a_step_starts_at_the_default_whatever_its_own_policy_is() -> None:
    loss = lambda w: jnp.sum(jnp.sin(jnp.sin(w @ w) @ w))
    step = xform.jit(lambda w: w - xform.grad(loss)(w), "save_nothing")
    first = next(iter(xform.pareto(step, jnp.ones((64, 64)), points=1, verify=False)))
    assert first.name == "min_cut"
    assert first.recompute_flops == 0
