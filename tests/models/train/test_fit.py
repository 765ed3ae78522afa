"""A run starts with the largest batch, and does not start with one more."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import xform
from models.errors import InputError
from models.run.train import step_memory
from models.train.config import RunConfig
from models.train.fit import Largest, largest, largest_batch
from models.train.mesh import make_mesh, mesh_or_none
from models.train.optim import OptimConfig
from models.train.planned import plan_step, policy_of, whole_step
from tests.models import examples
from tests.models.micro import MODEL, run
from xform.errors import BudgetInfeasible
from xform.memory.targets import missing, parse_target

MIB = 2**20


def deep(w: jax.Array, x: jax.Array) -> jax.Array:
    for _ in range(8):
        x = jnp.tanh(x @ w)
    return jnp.sum(x**2)


def step(w: jax.Array, x: jax.Array, policy: Any = None) -> jax.Array:
    return w - 0.1 * xform.grad(deep, policy=policy)(w, x)


def inputs(batch: int) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((n, 64), jnp.float32) for n in (64, batch)]


def bytes_of(policy: Any, batch: int) -> int:
    return total_bytes(functools.partial(step, policy=policy), *inputs(batch))


def total_bytes(step: Any, *types: Any) -> int:
    """Return the bytes of a compiled step with donated state, as JAX counts them."""
    compiled = jax.jit(step, donate_argnums=0).lower(*types).compile()
    memory: Any = compiled.memory_analysis()
    total = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return total + memory.temp_size_in_bytes - memory.alias_size_in_bytes


@pytest.mark.parametrize("multiple", [1, 16])
def test_a_policy_without_a_bound(multiple: int) -> None:
    found, policy = largest_batch(step, inputs, None, "cpu", 400_000, multiple) or (None, None)
    assert policy is None
    assert found is not None
    assert found.size % multiple == 0
    assert found.over is not None
    assert bytes_of(None, found.size) <= 400_000 < bytes_of(None, found.size + multiple)


@pytest.mark.parametrize("policy", [xform.policies.budget(400_000), xform.policies.fit()])
def test_a_bound_is_of_the_lowest_peak(policy: Any) -> None:
    bounded = largest_batch(step, inputs, policy, "cpu", 400_000, 16)
    usual = largest_batch(step, inputs, None, "cpu", 400_000, 16)
    assert bounded
    assert usual
    found, lowest = bounded
    assert found.size > usual[0].size
    assert lowest.recompute_flops > 0
    assert bytes_of(lowest, found.size) <= 400_000
    bound = xform.policies.budget(400_000)
    jitted = xform.jit(step, donate_argnums=0)
    plan = functools.partial(xform.plan, jitted, policy=bound, target="cpu")
    assert plan(*inputs(found.size)).compiled_bytes <= 400_000
    assert found.over is not None
    with pytest.raises(BudgetInfeasible):
        plan(*inputs(found.size + 16))


@pytest.mark.parametrize("policy", [None, xform.policies.budget(10_000), xform.policies.fit()])
def test_none_has_room(policy: Any) -> None:
    assert largest_batch(step, inputs, policy, "cpu", 10_000) is None


def narrow(folder: Path, **changes: object) -> RunConfig:
    """Return a run with windows so short that it has no others."""
    return run(folder, model=dataclasses.replace(MODEL, context=1), **changes)


def found(config: RunConfig, memory: str | None = None) -> Largest:
    (one,) = largest(config, policy_of(config.policy), "cpu", memory)
    return one


@pytest.mark.slow
def test_a_run_begins_by_the_compiler_alone(tmp_path: Path) -> None:
    config = narrow(tmp_path)
    one = found(config, "2MiB")
    assert one.proven
    for batch, fits in ((one.batch, True), (one.batch + 1, False)):
        report = step_memory(dataclasses.replace(config, batch=batch), "cpu", "2MiB")
        assert report.fits is fits
        assert not fits or report.total_bytes == one.total_bytes


OFFLOAD = dataclasses.replace(examples.OPTIM, offload_optimizer=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "memory", "mesh", "optim"),
    [
        ("resnet", MIB, "", examples.OPTIM),
        ("gru", 200 * 2**10, "", examples.OPTIM),
        ("gru", 200 * 2**10, "", OFFLOAD),
        ("resnet", MIB // 2, "fsdp=2", OFFLOAD),
    ],
)
def test_one_more_has_no_room(
    tmp_path: Path, kind: str, memory: int, mesh: str, optim: OptimConfig
) -> None:
    """JAX's count for the compiled step of a run agrees with xform's."""
    short = {"window": 1} if kind == "gru" else {}
    config = examples.run(tmp_path, examples.MODELS[kind], mesh=mesh, optim=optim, **short)
    devices = make_mesh(mesh, optim.offload_optimizer)
    target = f"cpu:{1 if devices is None else devices.size}"
    (one,) = largest(config, policy_of("min_cut"), target, str(memory))
    assert one.proven
    assert one.flags == f"--batch {one.batch}" + (" --window 1" if short else "")
    more = 1 if devices is None else devices.size
    for batch, has_room in ((one.batch, True), (one.batch + more, False)):
        step, *types = whole_step(dataclasses.replace(config, batch=batch), devices)
        assert (total_bytes(step, *types) <= memory) is has_room
        abstract = whole_step(
            dataclasses.replace(config, batch=batch), mesh_or_none(mesh, optim.offload_optimizer)
        )
        report = xform.fits(*abstract, target=target, capacity=memory, donate_argnums=0)
        assert report.fits is has_room


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_offloaded_optimizer_state_does_not_count_against_gpu_memory(tmp_path: Path) -> None:
    """Tested for a GPU, whose compiler counts host memory separately, unlike a CPU's."""
    target = "gpu:h100"
    if absent := missing(parse_target(target)):
        pytest.skip(f"needs {', '.join(absent)}")
    model = dataclasses.replace(examples.MODELS["gru"], width=128, depth=8)
    plain = examples.run(tmp_path, model, window=1, batch=1)
    waits = dataclasses.replace(plain, optim=OFFLOAD)
    of_one = [step_memory(config, target, None).total_bytes for config in (plain, waits)]
    assert of_one[1] < of_one[0]
    memory = str(of_one[0] - 1)
    (none,) = largest(plain, policy_of("min_cut"), target, memory)
    (some,) = largest(waits, policy_of("min_cut"), target, memory)
    assert none.batch == 0
    assert some.batch >= 1
    assert some.total_bytes < of_one[0]


@pytest.mark.slow
def test_a_budget_is_of_the_whole_step(tmp_path: Path) -> None:
    config = narrow(tmp_path, policy="budget:1MiB")
    one = found(config, "1GiB")
    assert one.batch > found(narrow(tmp_path), "1MiB").batch  # that of the default
    assert one.total_bytes <= MIB
    begun = dataclasses.replace(config, batch=one.batch)
    assert plan_step(begun, policy_of(config.policy)).total_bytes <= MIB
    report = step_memory(begun, "cpu", None)
    assert report.total_bytes <= MIB
    if not one.proven:  # eight compilations were too few to prove that the next does not fit
        return
    more = dataclasses.replace(config, batch=one.batch + 1)
    for refused in (lambda: plan_step(more, policy_of(config.policy)),
                    lambda: step_memory(more, "cpu", None)):  # fmt: skip
        with pytest.raises(InputError, match="--policy budget:1MiB: the lowest peak"):
            refused()


@pytest.mark.slow
def test_auto_is_a_budget_of_all_memory(tmp_path: Path) -> None:
    given = found(narrow(tmp_path, policy="budget:1MiB"), "1GiB")
    whole = found(narrow(tmp_path, policy="auto"), "1MiB")
    assert dataclasses.astuple(whole) == dataclasses.astuple(given)


@pytest.mark.slow
def test_devices_share_it(tmp_path: Path) -> None:
    config = narrow(tmp_path, mesh="data=4,fsdp=2")
    (one,) = largest(config, policy_of("min_cut"), "cpu:8", "1MiB")
    assert one.batch % 8 == 0


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["min_cut", "budget:20KiB", "auto"])
def test_no_room(tmp_path: Path, policy: str) -> None:
    assert found(narrow(tmp_path, policy=policy), "30KiB").batch == 0
