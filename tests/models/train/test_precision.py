"""Steps in 16 bits: float32 master weights, a scaled loss, and losses near float32's."""

import dataclasses
import io
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from models.train.log import read_records
from models.train.loop import Outcome, train
from models.train.planned import plan_step, policy_of
from models.train.precision import LossScale, rounded
from models.train.start import Resume
from models.train.state import abstract_state, init_state
from models.train.step import make_step
from tests.models import examples
from tests.models.micro import MODEL, OPTIM, losses, run

HALF = dataclasses.replace(MODEL, dtype="float16")
TOKENS = np.random.default_rng(0).integers(0, 256, (2, 4, MODEL.context + 1), dtype=np.uint8)


def quiet(config: Any, wish: Resume | None = None) -> Outcome:
    return train(config, Console(file=io.StringIO()), wish)


def found(folder: Path, **changes: Any) -> list[float]:
    folder.mkdir()
    config = run(folder, **changes)
    quiet(config)
    return [loss for _, loss, _ in losses(config.out) if loss is not None]


@pytest.mark.parametrize("weights", ["bfloat16", "float16"])
def test_losses_are_near_those_of_float32(weights: str, tmp_path: Path) -> None:
    model = dataclasses.replace(MODEL, dtype=weights)
    optim = dataclasses.replace(OPTIM, weight_dtype=weights)
    expected = found(tmp_path / "one")
    np.testing.assert_allclose(
        found(tmp_path / "two", model=model, optim=optim), expected, atol=5e-2
    )


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", examples.MODELS)
def test_losses_of_each_kind_are_near_too(name: str, weights: str, tmp_path: Path) -> None:
    model, ends = examples.MODELS[name], list[Any]()
    for of in ("float32", weights):
        optim = dataclasses.replace(examples.OPTIM, weight_dtype=of, ema_decay=0.5)
        changed = dataclasses.replace(model, dtype=of)
        (tmp_path / of).mkdir()
        config = examples.run(tmp_path / of, changed, optim=optim, accumulate=2)
        state = examples.quiet(config).state
        records = read_records(config.out / "log.jsonl")
        ends.append([x for r in records for x in (r.get("loss"), r.get("validation_loss")) if x])
        kept = jax.tree.leaves((state.params, state.statistics, state.average, state.opt_state))
        floats = [x for x in kept if jnp.issubdtype(x.dtype, jnp.floating)]
        assert {x.dtype for x in floats} == {jnp.dtype("float32")}
        assert not any(r.get("skipped") for r in records)
    np.testing.assert_allclose(*ends, rtol=5e-2)


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "float16"])
def test_masters_and_sums_of_gradients_are_of_float32(weights: str) -> None:
    optim = dataclasses.replace(OPTIM, weight_dtype=weights)
    state = abstract_state(MODEL, optim)
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
    read = jax.eval_shape(lambda params: rounded(params, optim), state.params)
    assert {x.dtype for x in jax.tree.leaves(read)} == {jnp.dtype(weights)}
    program = str(jax.make_jaxpr(make_step(MODEL, optim))(state, TOKENS))
    short = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[weights]
    assert f"{short}[256,32]" in program  # the embedding, or its gradient
    after = jax.eval_shape(make_step(MODEL, optim), state, TOKENS)[0]
    assert jax.tree.map(lambda x: x.dtype, after) == jax.tree.map(lambda x: x.dtype, state)


def test_a_plan_is_of_the_rounded_parameters(tmp_path: Path) -> None:
    wide, config = (
        run(tmp_path, batch=1, optim=dataclasses.replace(OPTIM, weight_dtype=weights))
        for weights in ("float32", "bfloat16")
    )
    planned = plan_step(config, policy_of("min_cut"))
    embedding = "[256,32]"
    for step, dtype in ((planned, "bfloat16"), (plan_step(wide, policy_of("min_cut")), "float32")):
        inputs = [
            line
            for program in step.plan.record.programs
            for line in program
            if line.startswith("inputs ") and embedding in line
        ]
        assert inputs
        assert all(dtype + embedding in line for line in inputs)


def test_a_scale_halves_and_doubles() -> None:
    scale = LossScale(jnp.float32(8), jnp.int32(0))
    seen = []
    for finite in (True, True, False, False, False, False, True, True, True):
        scale = scale.after(jnp.bool(finite), steps=2)
        seen.append(float(scale.value))
    assert seen == [8, 16, 8, 4, 2, 1, 1, 2, 2]


def test_a_gradient_that_overflows_is_skipped_and_halves_the_scale() -> None:
    optim = dataclasses.replace(OPTIM, loss_scale=2.0**40, loss_scale_steps=2)
    step = jax.jit(make_step(HALF, optim))
    state, metrics = step(init_state(HALF, optim, 0), TOKENS)
    assert (float(metrics["skipped"]), float(metrics["loss_scale"])) == (1.0, 2.0**40)
    assert state.loss_scale is not None
    assert float(state.loss_scale.value) == 2.0**39
    assert float(metrics["loss"]) == pytest.approx(5.5, abs=0.5)  # the loss without the scale
    low = dataclasses.replace(state, loss_scale=LossScale(jnp.float32(1024), jnp.int32(1)))
    moved, metrics = step(low, TOKENS)
    assert metrics["skipped"] == 0
    assert float(moved.loss_scale.value) == 2048
    plain = dataclasses.replace(low, loss_scale=LossScale(jnp.float32(1), jnp.int32(1)))
    _, other = step(plain, TOKENS)
    np.testing.assert_allclose(metrics["grad_norm"], other["grad_norm"], rtol=1e-2)


def test_loss_scale_is_checkpointed_and_resumed_bit_for_bit(tmp_path: Path) -> None:
    optim = dataclasses.replace(OPTIM, loss_scale=2.0**26, loss_scale_steps=3)
    changes = {"model": HALF, "optim": optim}
    expected = found(tmp_path / "one", **changes)
    (tmp_path / "two").mkdir()
    quiet(run(tmp_path / "two", max_seconds=0, **changes))
    quiet(run(tmp_path / "two", **changes), Resume())
    logs = [
        [(r["loss"], r["loss_scale"], r["skipped"]) for r in read_records(out / "run/log.jsonl")
         if "loss" in r]
        for out in (tmp_path / "one", tmp_path / "two")
    ]  # fmt: skip
    assert logs[0] == logs[1]
    assert [loss for loss, *_ in logs[0]] == expected
    scales = [scale for _, scale, _ in logs[0]]
    assert min(scales) < max(scales)
