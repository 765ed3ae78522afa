"""A moving average of the parameters: its value, its sharding, and that a run returns it."""

import dataclasses
import io
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

from models.nets.presets import build
from models.run.trained import load_run
from models.train.loop import Outcome, train
from models.train.mesh import make_mesh
from models.train.optim import averaged
from models.train.start import Origin, Resume, begin
from models.train.state import abstract_state, init_state
from models.train.step import make_step
from tests.models.micro import MODEL, OPTIM, losses, run

EMA = dataclasses.replace(OPTIM, ema_decay=0.5)
TOKENS = np.random.default_rng(0).integers(0, 256, (1, 4, MODEL.context + 1), dtype=np.uint8)


def quiet(config: Any, wish: Resume | None = None) -> Outcome:
    return train(config, Console(file=io.StringIO()), wish)


def test_average_follows_the_ema_formula_with_warmup() -> None:
    mean = {"x": jnp.float32(1.0)}
    first = averaged(EMA, mean, {"x": jnp.float32(2.0)}, jnp.int32(0))
    assert float(first["x"]) == np.float32(0.1 * 1 + 0.9 * 2)
    later = averaged(EMA, mean, {"x": jnp.float32(2.0)}, jnp.int32(100))
    assert float(later["x"]) == 1.5


def test_step_updates_the_average_unless_skipped() -> None:
    state = init_state(MODEL, EMA, 0)
    chex.assert_trees_all_equal(state.average, state.params)
    step = jax.jit(make_step(MODEL, EMA))
    after, _ = step(state, TOKENS)
    chex.assert_trees_all_close(
        after.average, averaged(EMA, state.average, after.params, jnp.int32(0))
    )
    spike = dataclasses.replace(after, usual_norm=jnp.float32(1e-6))
    kept, metrics = step(spike, TOKENS)
    assert metrics["skipped"] == 1
    chex.assert_trees_all_equal(kept.average, after.average)


def test_average_has_the_sharding_of_the_parameters() -> None:
    mesh = make_mesh("fsdp=4,tensor=2")
    types = abstract_state(MODEL, EMA, mesh)
    same = jax.tree.map(lambda a, b: a.sharding == b.sharding, types.params, types.average)
    assert all(jax.tree.leaves(same))
    assert abstract_state(MODEL, OPTIM).average is None


def test_average_is_checkpointed_validated_and_returned_by_load_run(tmp_path: Path) -> None:
    for name in ("one", "two", "plain"):
        (tmp_path / name).mkdir()
    whole = quiet(run(tmp_path / "one", optim=EMA))
    quiet(run(tmp_path / "two", optim=EMA, max_seconds=0))
    quiet(run(tmp_path / "two", optim=EMA), Resume())
    quiet(run(tmp_path / "plain"))
    expected, found, plain = (losses(tmp_path / n / "run") for n in ("one", "two", "plain"))
    assert found.pop(2)[2] is not None  # the validation at the step where it stopped
    assert found == expected
    # Two programs round their sums in different orders.
    trained_on, beside = ([a[1] for a in x if a[1] is not None] for x in (expected, plain))
    assert trained_on == pytest.approx(beside, rel=1e-5)
    assert expected[-1][2] != plain[-1][2]
    out = nnx.state(load_run(tmp_path / "one" / "run")[1], nnx.Param)
    chex.assert_trees_all_equal(out, whole.state.average)


def test_average_starts_from_the_pretrained_parameters(tmp_path: Path) -> None:
    origin = Origin("there", nnx.state(build(MODEL, 7), nnx.Param))
    state = begin(run(tmp_path, optim=EMA), origin).state
    chex.assert_trees_all_equal(state.average, origin.params)
    # Both are donated to the first step.
    jax.jit(make_step(MODEL, EMA), donate_argnums=0)(state, TOKENS)
