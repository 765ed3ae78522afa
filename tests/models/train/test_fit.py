"""The largest batch is one with which a run begins; with one more it does not."""

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
from models.train.planned import plan_step, policy_of
from tests.models.micro import MODEL, run
from xform.errors import BudgetInfeasible

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
    compiled = jax.jit(functools.partial(step, policy=policy), donate_argnums=0)
    memory: Any = compiled.lower(*inputs(batch)).compile().memory_analysis()
    total = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return total + memory.temp_size_in_bytes - memory.alias_size_in_bytes


@pytest.mark.parametrize("multiple", [1, 16])
def test_a_policy_without_a_bound(multiple: int) -> None:
    found, policy = largest_batch(step, inputs, None, "cpu", 400_000, multiple) or (None, None)
    assert policy is None
    assert found is not None
    assert found.size % multiple == 0
    assert found.over
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
    plan = functools.partial(xform.plan, step, policy=bound, target="cpu", donate_argnums=0)
    assert bytes_of(plan(*inputs(found.size)), found.size) <= 400_000
    assert found.over
    with pytest.raises(BudgetInfeasible):
        plan(*inputs(found.size + 16))


@pytest.mark.parametrize("policy", [None, xform.policies.budget(10_000), xform.policies.fit()])
def test_none_has_room(policy: Any) -> None:
    assert largest_batch(step, inputs, policy, "cpu", 10_000) is None


def narrow(folder: Path, **changes: object) -> RunConfig:
    """A run of so short windows that it has no others."""
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
    if not one.proven:  # eight compilations were too few to know the next
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
    (one,) = largest(config, policy_of("default"), "cpu:8", "1MiB")
    assert one.batch % 8 == 0


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["default", "budget:20KiB", "auto"])
def test_no_room(tmp_path: Path, policy: str) -> None:
    assert found(narrow(tmp_path, policy=policy), "30KiB").batch == 0
