"""With the optimizer's state on the host a run is the same, bit for bit; compilers say where."""

import dataclasses
import io
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from models.errors import InputError
from models.run.train import step_memory
from models.train.host import HOST, check_host, on_host
from models.train.loop import train
from models.train.mesh import abstract_mesh, make_mesh, on_devices, types_on
from models.train.optim import OPTIMIZERS, OptimConfig
from models.train.planned import plan_step, policy_of, whole_step
from models.train.start import Resume
from models.train.state import abstract_state, device_bytes, init_state
from models.train.step import compile_step
from models.train.update import updated, updated_in_turn
from tests.models import examples
from tests.models.micro import MODEL, OPTIM, losses, run
from xform.memory.targets import missing, parse_target

OFFLOAD = dataclasses.replace(OPTIM, offload_optimizer=True)
MOMENTS = 2  # of AdamW, for each parameter


def trained(folder: Path, optim: OptimConfig, wish: Resume | None = None, **changes: Any) -> Any:
    folder.mkdir(exist_ok=True)
    config = run(folder, optim=optim, batch=8, **changes)
    state = train(config, Console(file=io.StringIO()), wish).state
    return losses(config.out), state


@pytest.mark.parametrize(
    ("mesh", "accumulate", "ema"),
    [
        ("fsdp=2", 2, 0.9),
        pytest.param("data=2,fsdp=2,tensor=2", 1, 0.0, marks=pytest.mark.slow),
    ],
)
def test_a_run_is_the_same_bit_for_bit(
    tmp_path: Path, mesh: str, accumulate: int, ema: float
) -> None:
    given = {"mesh": mesh, "accumulate": accumulate}
    plain, expected = trained(
        tmp_path / "plain", dataclasses.replace(OPTIM, ema_decay=ema), **given
    )
    found, state = trained(tmp_path / "host", dataclasses.replace(OFFLOAD, ema_decay=ema), **given)
    assert found == plain
    chex.assert_trees_all_equal(*jax.device_get((state, expected)))
    waits = jax.tree.leaves((state.opt_state, state.average))
    assert all(on_host(x) for x in waits if x.ndim)
    assert not any(map(on_host, jax.tree.leaves((state.params, state.statistics))))


@pytest.mark.parametrize(
    ("before", "after", "mesh"),
    [(OFFLOAD, OPTIM, "fsdp=2"), pytest.param(OPTIM, OFFLOAD, "", marks=pytest.mark.slow)],
)
def test_run_resumes_with_offloading_switched_on_or_off(
    tmp_path: Path, before: OptimConfig, after: OptimConfig, mesh: str
) -> None:
    whole, expected = trained(tmp_path / "whole", OPTIM, mesh="fsdp=2")
    trained(tmp_path / "run", before, mesh="fsdp=2", max_seconds=0.0, validate_every=100)
    found, state = trained(tmp_path / "run", after, Resume(), mesh=mesh, validate_every=100)
    of = lambda records: [loss for _, loss, _ in records if loss is not None]
    if mesh:
        assert of(found) == of(whole)
        chex.assert_trees_all_equal(*jax.device_get((state, expected)))
    else:  # one device adds in another order
        np.testing.assert_allclose(of(found), of(whole), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_in_turn_are_updated_as_at_once(name: str) -> None:
    optim = dataclasses.replace(OPTIM, optimizer=name, clip_norm=0.5)
    state, rng = init_state(MODEL, optim, 0), np.random.default_rng(0)
    grads = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), state.params)
    states = []
    for update in (updated, updated_in_turn):
        each = jax.jit(lambda state, grads, good, u=update: u(optim, state, grads, good))
        params, opt_state = each(state, grads, jnp.array(True))
        kept = each(dataclasses.replace(state, params=params, opt_state=opt_state),
                    grads, jnp.array(False))  # fmt: skip
        chex.assert_trees_all_equal(kept, (params, opt_state))
        states.append((params, opt_state))
    chex.assert_trees_all_close(*states, rtol=1e-6, atol=1e-7)
    changed = jax.tree.map(lambda a, b: not np.array_equal(a, b), states[1][0], state.params)
    assert all(jax.tree.leaves(changed))


def test_one_device_that_offloads() -> None:
    mesh, found = make_mesh("", offload=True), []
    rows = np.random.default_rng(0).integers(0, 256, (3, 1, 8, MODEL.context + 1), np.uint8)
    batches = [on_devices(batch, mesh, axis=1) for batch in rows]
    for optim in (OPTIM, OFFLOAD):
        step = compile_step(MODEL, optim, batches[0], mesh=mesh)
        state = init_state(MODEL, optim, 0, mesh)
        for batch in batches:
            state, metrics = step(state, batch)
        found.append(jax.device_get((state, metrics)))
    chex.assert_trees_all_equal(*found)


def test_skipped_step_leaves_the_offloaded_state_unchanged() -> None:
    mesh = make_mesh("", offload=True)
    batch = on_devices(np.zeros((1, 8, MODEL.context + 1), np.uint8), mesh, axis=1)
    step = compile_step(MODEL, OFFLOAD, batch, mesh=mesh)
    state, _ = step(init_state(MODEL, OFFLOAD, 0, mesh), batch)
    broken = jax.tree.map(lambda x: x.at[(0,) * x.ndim].set(jnp.nan), state.params)
    before = jax.device_get(state.opt_state)
    after, metrics = step(dataclasses.replace(state, params=broken), batch)
    assert metrics["skipped"] == 1.0
    chex.assert_trees_all_equal(jax.device_get(after.opt_state), before)


def test_offloaded_moments_are_sharded_as_their_parameters() -> None:
    mesh = abstract_mesh("fsdp=8")
    state, plain = (abstract_state(MODEL, optim, mesh) for optim in (OFFLOAD, OPTIM))
    params = device_bytes(plain.params)
    assert device_bytes(state, offloaded=True) == MOMENTS * params
    assert device_bytes(state) == device_bytes(plain) - MOMENTS * params
    assert device_bytes(plain, offloaded=True) == 0
    for waits, lies in zip(*map(jax.tree.leaves, (state, plain)), strict=True):
        assert waits.sharding.spec == lies.sharding.spec


@pytest.mark.parametrize("name", ["gru", "resnet", pytest.param("unet", marks=pytest.mark.slow)])
def test_step_outputs_keep_the_memory_kind_and_sharding_of_the_state(
    tmp_path: Path, name: str
) -> None:
    """Of batch norms too: the mean of their statistics waits whole, parameters parted."""
    model, mesh = examples.MODELS[name], make_mesh("fsdp=4,tensor=2")
    optim = dataclasses.replace(OFFLOAD, ema_decay=0.5)
    batch = types_on(examples.run(tmp_path, model).batch_type(), mesh, axis=1)
    after, _ = compile_step(model, optim, batch, mesh=mesh).output_shardings
    state = abstract_state(model, optim, mesh)
    for x, place in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
        assert place.memory_kind == x.sharding.memory_kind
        assert place.is_equivalent_to(x.sharding, x.ndim)


@pytest.mark.slow
def test_plans_count_only_device_bytes_of_an_offloaded_state(tmp_path: Path) -> None:
    usual = plan_step(run(tmp_path, batch=64), policy_of("min_cut"))
    policy = f"budget:{int(0.95 * usual.total_bytes)}"
    config = run(tmp_path, batch=64, optim=OFFLOAD, policy=policy)
    tight = plan_step(config, policy_of(policy), make_mesh("", offload=True))
    assert tight.plan.compiled_bytes == tight.total_bytes <= 0.95 * usual.total_bytes
    waits = device_bytes(abstract_state(MODEL, OFFLOAD, abstract_mesh("")), offloaded=True)
    assert f"and {waits / 2**20:.1f} MiB of optimizer state in host memory" in str(tight)
    assert step_memory(config, None, None).total_bytes == tight.total_bytes


def test_a_device_without_such_a_memory() -> None:
    class Memory:
        kind = "device"

    class Device:
        device_kind = "abacus"

        def addressable_memories(self) -> list[Memory]:
            return [Memory()]

    said = "--offload-optimizer: abacus has no host memory .pinned_host., only device"
    with pytest.raises(InputError, match=said):
        check_host(Device())
    check_host(jax.devices()[0])
    assert HOST in {memory.kind for memory in jax.devices()[0].addressable_memories()}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("target", "mesh"),
    [("gpu:h100", ""), ("gpu:h100:4", "fsdp=4"), ("tpu:v5e:1x1", ""), ("tpu:v5e:2x2", "fsdp=4")],
)
def test_compiled_steps_place_optimizer_state_in_host_memory(
    tmp_path: Path, target: str, mesh: str
) -> None:
    if absent := missing(parse_target(target)):
        pytest.skip(f"needs {', '.join(absent)}")
    model = dataclasses.replace(MODEL, context=256, width=1024, depth=4, heads=8)

    def weighed(optim: OptimConfig) -> tuple[int, Any]:
        config = run(tmp_path, model=model, optim=optim, batch=4, mesh=mesh)
        _, state, _ = whole_step(config, abstract_mesh(mesh))
        return device_bytes(state, offloaded=True), step_memory(config, target, None)

    waits, report = weighed(OFFLOAD)
    none, usual = weighed(OPTIM)
    assert (none, usual.host_bytes) == (0, 0)
    # A TPU's memory pads what is small.
    assert waits <= report.host_bytes <= 1.02 * waits
    argument = usual.argument_bytes - report.argument_bytes
    assert waits <= argument <= 1.02 * waits
    # Of what is fetched one parameter's is there at once; a TPU's compiler brings what has room.
    at_most = waits if target.startswith("tpu") else 0.5 * waits
    assert report.total_bytes <= usual.total_bytes - (waits - at_most)
