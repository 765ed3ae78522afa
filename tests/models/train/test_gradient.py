"""`--fused-update` gives the losses of the separate update in fewer bytes."""

import contextlib
import dataclasses
import io
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rich.console import Console

from experiments.resume.killed import arrays, records
from models.errors import InputError
from models.nets.presets import TRAINED
from models.run.train import main, step_memory
from models.train.checksum import leaves_by_path
from models.train.log import Log
from models.train.loop import Outcome, train
from models.train.mesh import make_mesh, on_devices
from models.train.optim import OPTIMIZERS, OptimConfig
from models.train.planned import plan_step, policy_of
from models.train.report import Reporter
from models.train.start import Resume
from models.train.state import init_state
from models.train.step import compile_step
from tests.models import examples
from tests.models.micro import FLAGS, MODEL, OPTIM, SIZES, run

# The norm clips each step but the first.
SEPARATE = dataclasses.replace(
    OPTIM, clip_norm=0.5, clip_by="previous_global_norm", spike_factor=math.inf
)
FUSED = dataclasses.replace(SEPARATE, fused_update=True)
DEEP: Any = dataclasses.replace(MODEL, depth=12)


def quiet(config: Any, wish: Resume | None = None) -> Outcome:
    return train(config, Console(file=io.StringIO()), wish)


def stepped(model: Any, optim: OptimConfig, mesh: str = "", policy: Any = None,
            batches: Any = None) -> tuple[list[dict[str, float]], Any, Any]:  # fmt: skip
    """Return the metrics of three steps, the state after them, and the compiled step."""
    devices = make_mesh(mesh)
    if batches is None:
        rng = np.random.default_rng(0)
        batches = rng.integers(0, 256, (3, 1, 8, model.context + 1), dtype=np.uint8)
    given = [on_devices(batch, devices, axis=1) for batch in batches]
    types = given[0] if devices else jax.tree.map(jax.typeof, given[0])
    step = compile_step(model, optim, types, policy, mesh=devices)
    state, found = init_state(model, optim, 0, devices), []
    for batch in given:
        state, metrics = step(state, batch)
        found.append({name: float(value) for name, value in metrics.items()})
    return found, state, step


def assert_alike(model: Any, optim: OptimConfig, **options: Any) -> None:
    """Check that the fused update has the losses, norms and state of the separate one."""
    fused = dataclasses.replace(optim, fused_update=True)
    (found, state, _), (expected, other, _) = (stepped(model, o, **options) for o in (fused, optim))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)
    chex.assert_trees_all_equal_structs(state, other)
    # Adam divides by the gradient's size, so that the smallest ones decide the tolerance.
    states = [_without_key_biases(jax.device_get(s)) for s in (state, other)]
    chex.assert_trees_all_close(*states, rtol=1e-3, atol=1e-4)


def _without_key_biases(state: Any) -> dict[str, Any]:
    """Return the arrays of a state by path, without those whose gradient is rounding alone."""
    return {k: v for k, v in leaves_by_path(state).items() if "key/bias" not in k}


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in OPTIMIZERS if name != "adamw"]


@pytest.mark.parametrize("name", ["adamw", *SLOW])
def test_each_optimizer(name: str) -> None:
    assert_alike(MODEL, dataclasses.replace(SEPARATE, optimizer=name))


@pytest.mark.slow
@pytest.mark.parametrize("text", ["data=8", "fsdp=8", "tensor=4", "data=2,fsdp=2,tensor=2"])
def test_meshes(text: str) -> None:
    assert_alike(MODEL, SEPARATE, mesh=text)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["expert=4,data=2", "fsdp=2,expert=2,tensor=2"])
def test_experts(text: str) -> None:
    mixtral = dataclasses.replace(TRAINED["tiny-mixtral"], **SIZES, experts=4, mlp_width=48)
    assert_alike(mixtral, SEPARATE, mesh=text)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["save_nothing", "save_dots", "save_everything"])
def test_policies(policy: str) -> None:
    assert_alike(MODEL, SEPARATE, policy=policy_of(policy))


@pytest.mark.slow
def test_no_clipping_and_an_average() -> None:
    optim = dataclasses.replace(SEPARATE, clip_norm=math.inf, clip_by="global_norm", ema_decay=0.5)
    assert_alike(MODEL, optim)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_bfloat16(weights: str) -> None:
    """Both updates use the same gradients in bfloat16, and the parameters stay float32."""
    model = dataclasses.replace(MODEL, dtype="bfloat16")
    optim = dataclasses.replace(SEPARATE, weight_dtype=weights)
    fused = dataclasses.replace(optim, fused_update=True)
    found, state, _ = stepped(model, fused)
    expected, *_ = stepped(model, optim)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(state.params))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-3)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("name", examples.MODELS)
def test_each_kind_of_model(tmp_path: Path, name: str) -> None:
    config = examples.run(tmp_path, examples.MODELS[name])
    batches = examples.batches(config, 3)
    assert_alike(config.model, SEPARATE, batches=batches)


@pytest.mark.parametrize("text", ["", pytest.param("fsdp=4,tensor=2", marks=pytest.mark.slow)])
def test_no_gradient_of_a_whole_stack_is_in_memory(text: str) -> None:
    """The bytes of a separate step are larger by the gradients of all layers but one, or more."""
    steps = [stepped(DEEP, optim, text, "save_nothing") for optim in (SEPARATE, FUSED)]
    separate, fused = (step.memory_analysis().temp_size_in_bytes for *_, step in steps)
    layers = jax.tree.leaves(steps[0][1].params["layers"])
    of_layers = sum(x.addressable_shards[0].data.nbytes for x in layers)
    assert separate - fused > 0.9 * of_layers


def test_a_loss_that_is_not_finite_skips_the_step() -> None:
    _, state, step = stepped(MODEL, FUSED)
    broken = jax.tree.map(lambda x: x.at[(0,) * x.ndim].set(jnp.nan), state.params)
    before = jax.tree.map(jnp.copy, dataclasses.replace(state, params=broken))
    batch = jnp.zeros((1, 8, MODEL.context + 1), jnp.uint8)
    after, metrics = step(dataclasses.replace(state, params=broken), batch)
    assert metrics["skipped"] == 1.0
    chex.assert_trees_all_equal((after.params, after.opt_state), (before.params, before.opt_state))
    assert (int(after.skipped), int(after.step)) == (1, 4)


def test_the_norm_of_the_step_before_clips() -> None:
    """With plain SGD the second update is the gradient, scaled by the norm of the first."""
    optim = dataclasses.replace(
        FUSED, optimizer="sgd", b1=0.0, weight_decay=0.0, warmup_steps=0, clip_norm=0.25
    )
    batch = np.zeros((1, 1, 8, MODEL.context + 1), np.uint8)
    start = init_state(MODEL, optim, 0)
    (first,), one, _ = stepped(MODEL, optim, batches=batch)
    (_, second), two, _ = stepped(MODEL, optim, batches=np.concatenate([batch, batch]))
    moved = lambda a, b: float(optax.tree.norm(jax.tree.map(jnp.subtract, a, b)))
    rates = first["learning_rate"], second["learning_rate"]
    assert moved(one.params, start.params) == pytest.approx(rates[0] * first["grad_norm"], rel=1e-3)
    clipped = second["grad_norm"] * 0.25 / first["grad_norm"]
    assert moved(two.params, one.params) == pytest.approx(rates[1] * clipped, rel=1e-3)


CONFLICTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "accumulate": ({"accumulate": 2}, {}, "adds the gradients of several.*give --accumulate 1"),
    "clip": ({}, {"clip_by": "global_norm"}, "give --clip-by previous_global_norm .* or"),
    "spike": ({}, {"spike_factor": 9.0}, "--spike-factor skips .*: give --spike-factor inf"),
    "half": ({"model": dataclasses.replace(MODEL, dtype="float16")}, {}, "give --dtype bfloat16"),
    "offload": ({}, {"offload_optimizer": True}, "--offload-optimizer fetches"),
    "several": (
        {"accumulate": 2},
        {"clip_by": "global_norm", "spike_factor": 9.0},
        "--accumulate .*, and --clip-norm .*, and --spike-factor .*: give --accumulate 1, and",
    ),
}


@pytest.mark.parametrize("name", CONFLICTS)
def test_settings_that_need_all_gradients_are_refused(tmp_path: Path, name: str) -> None:
    changes, of_optim, complaint = CONFLICTS[name]
    optim = dataclasses.replace(FUSED, **of_optim)
    config = run(tmp_path, optim=optim, **changes)
    with pytest.raises(InputError, match=f"--fused-update .*{complaint}") as caught:
        quiet(config)
    assert "\n" not in str(caught.value)
    assert not config.out.exists()
    with pytest.raises(InputError, match=complaint):
        step_memory(config, "cpu", None)


def test_the_command_takes_the_flag(tmp_path: Path) -> None:
    config = run(tmp_path)
    flags = [*FLAGS, "--data", *config.data, "--out", str(config.out), "--fused-update"]
    with pytest.raises(InputError, match=r"--clip-norm scales .*, and --spike-factor skips"):
        main(flags)
    assert main([*flags, "--clip-norm", "inf", "--spike-factor", "inf", "--dry-run"]) == 0


def test_applied_nonfinite_gradient_stops_the_run(tmp_path: Path) -> None:
    planned: Any = SimpleNamespace(plan=SimpleNamespace(forward_flops=1.0), total_bytes=1)
    display: Any = SimpleNamespace(update=lambda *_: None, say=lambda _: None)
    metrics = {"loss": 1.0, "grad_norm": math.inf, "learning_rate": 1.0}
    with contextlib.closing(Log(tmp_path / "log.jsonl", after=None)) as log:
        reporter = Reporter(run(tmp_path, optim=FUSED), planned, log, display)
        reporter.push(1, {**metrics, "skipped": 1.0})
        reporter.push(2, {**metrics, "skipped": 0.0})
        with pytest.raises(InputError, match="gradient of step 2 is not finite, and --fused-upd"):
            reporter.flush()


@pytest.mark.slow
def test_resuming_repeats_every_bit_and_another_update_must_be_named(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "part").mkdir()
    whole, part = (run(tmp_path / name, optim=FUSED) for name in ("whole", "part"))
    quiet(whole)
    shutil.copytree(whole.out, part.out)
    shutil.rmtree(part.out / "checkpoints" / "12")  # as after a kill between steps 8 and 12
    assert quiet(part, Resume()).step == 12
    assert records(part.out) == records(whole.out)
    assert arrays(part.out) == arrays(whole.out)

    separate = dataclasses.replace(part, optim=SEPARATE)
    with pytest.raises(InputError, match=r"fused_update was True.*--override fused_update"):
        quiet(separate, Resume(8))
    assert quiet(separate, Resume(8, ("fused_update",))).step == 12
    losses = [[r["loss"] for r in records(c.out) if "loss" in r] for c in (whole, separate)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    by_own_norm = dataclasses.replace(SEPARATE, clip_by="global_norm")
    with pytest.raises(InputError, match="clip_by and fused_update cannot change"):
        quiet(dataclasses.replace(part, optim=by_own_norm), Resume(8, ("clip_by", "fused_update")))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["", "fsdp=4,tensor=2"])
def test_a_plan_counts_the_fused_update(tmp_path: Path, mesh: str) -> None:
    """A budget bounds the whole step. The step within it has the same losses."""
    base = run(tmp_path, optim=FUSED, model=DEEP, batch=16)
    devices = make_mesh(mesh)
    separate = plan_step(
        dataclasses.replace(base, optim=SEPARATE), policy_of("save_nothing"), devices
    )
    usual = plan_step(base, policy_of("min_cut"), devices)
    bound = int(0.8 * usual.total_bytes)
    tight = plan_step(base, policy_of(f"budget:{bound}"), devices)
    assert tight.plan.compiled_bytes == tight.total_bytes <= bound
    assert plan_step(base, policy_of("save_nothing"), devices).total_bytes < separate.total_bytes
    assert step_memory(dataclasses.replace(base, mesh=mesh), "cpu", None).total_bytes == (
        usual.total_bytes
    )


@pytest.mark.slow
def test_a_run_within_a_budget_has_the_same_losses(tmp_path: Path) -> None:
    (tmp_path / "free").mkdir()
    (tmp_path / "tight").mkdir()
    free, tight = (run(tmp_path / name, optim=FUSED, batch=16) for name in ("free", "tight"))
    usual = plan_step(free, policy_of("min_cut"))
    tight = dataclasses.replace(tight, policy=f"budget:{int(0.9 * usual.total_bytes)}")
    losses = []
    for config in (free, tight):
        quiet(config)
        losses.append([r["loss"] for r in records(config.out) if "loss" in r])
    np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.slow
def test_a_step_with_a_health_report(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "health").mkdir()
    plain = run(tmp_path / "plain", optim=FUSED)
    health = run(tmp_path / "health", optim=FUSED, health_every=4)
    losses = []
    for config in (plain, health):
        quiet(config)
        losses.append([r["loss"] for r in records(config.out) if "loss" in r])
    np.testing.assert_allclose(*losses, rtol=1e-5)
