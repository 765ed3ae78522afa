"""Bytes of a training step on each of many devices that are not here, by shapes alone."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp

import xform
from models.nets.presets import TRAINED
from models.train.config import OptimConfig
from models.train.fit import largest_batch
from models.train.mesh import abstract_mesh, batch_sharding, shares, sizes
from models.train.planned import bounds_peak
from models.train.state import TrainState, abstract_state, device_bytes
from models.train.step import make_step
from xform.errors import BudgetInfeasible
from xform.memory.questions import Batch
from xform.memory.report import MemoryReport

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, its batch, and the devices that share it.

    Attributes:
      preset: of `models.nets.presets`.
      batch: sequences of a step, over all devices.
      context: tokens of a sequence.
      mesh: of the devices, as `--mesh` takes it.
      target: what compiles the step.
      budgets: of the bytes of each device.
      offload: whether the optimizer's state waits in the memory of the hosts.
    """

    preset: str
    batch: int
    context: int
    mesh: str
    target: str
    budgets: tuple[str, ...] = ()
    offload: bool = False

    @property
    def policies(self) -> tuple[str, ...]:
        """What `--policy` may be."""
        return ("default", "save_nothing", "auto", *(f"budget:{size}" for size in self.budgets))

    @property
    def name(self) -> str:
        """The key of its results."""
        return f"{self.preset}@{self.target}"


@dataclasses.dataclass(frozen=True)
class Weighed:
    """What a compiler says of a step on each device.

    Attributes:
      bytes: at its peak; None if no plan fits.
      fits: whether the device has so many.
      again: FLOPs run again, in parts of the forward pass's; None where no plan was made.
      seconds: to plan and to compile.
      floor: the lowest peak that was found, where no plan fits.
      collective: bytes of the results of collectives on each device, in a step.
      step: seconds of a step by the roofline, without communication.
      host: bytes that wait in the memory of the host, of each device.
    """

    bytes: int | None
    fits: bool
    again: float | None
    seconds: float
    floor: int | None = None
    collective: int | None = None
    step: float | None = None
    host: int | None = None


def step_of(case: Case) -> tuple[Any, TrainState, jax.ShapeDtypeStruct]:
    """The step in bfloat16, with AdamW, that takes its policy; and types of its state and batch."""
    devices, optim = abstract_mesh(case.mesh), OptimConfig(offload_optimizer=case.offload)
    config: Any = dataclasses.replace(TRAINED[case.preset], context=case.context, dtype="bfloat16")
    if hasattr(config, "dropout"):
        config = dataclasses.replace(config, dropout=0.0)
    tokens = jax.ShapeDtypeStruct((1, case.batch, case.context + 1), jnp.int32)
    tokens = tokens.update(sharding=batch_sharding(devices, case.batch, axis=1))

    def step(state: TrainState, tokens: jax.Array, policy: Any = None) -> Any:
        return make_step(config, optim, policy, mesh=devices)(state, tokens)

    return step, abstract_state(config, optim, devices), tokens


def waiting(case: Case) -> int:
    """Bytes of the state that wait on the host of each device, by their shapes."""
    _, state, _ = step_of(case)
    return device_bytes(state, waiting=True)


def compiled(case: Case, policy: Any) -> MemoryReport:
    """What the target's compiler says of the step under a policy."""
    step, state, tokens = step_of(case)
    return xform.fits(step, state, tokens, policy=policy, target=case.target, donate_argnums=0)


def weigh(case: Case, policy: Any) -> Weighed:
    """Plan the step as a whole where the policy is a budget, and compile it."""
    start, again = time.perf_counter(), None
    if bounds_peak(policy) or isinstance(policy, xform.policies.Fit):
        step, state, tokens = step_of(case)
        try:
            policy = xform.plan(
                step, state, tokens, policy=policy, target=case.target, donate_argnums=0
            )
        except BudgetInfeasible as error:
            seconds = time.perf_counter() - start
            return Weighed(None, False, None, seconds, error.floor_bytes)
        again = policy.recompute_flops / policy.forward_flops
    one = compiled(case, policy)
    sent = sum(c.bytes for c in one.collectives) if one.fits else None
    seconds = time.perf_counter() - start
    return Weighed(one.total_bytes, bool(one.fits), again, seconds, None, sent, one.seconds,
                   one.host_bytes)  # fmt: skip


def most_of(case: Case, policy: Any) -> tuple[Batch, Any] | None:
    """The largest batch whose step fits each device, a multiple of what shares it; or None.

    With it comes the policy of its step: a plan, where one is bound.
    """

    def inputs(batch: int) -> Any:
        _, *types = step_of(dataclasses.replace(case, batch=batch))
        return types

    step, *_ = step_of(case)
    capacity = policy.bytes if bounds_peak(policy) else None
    groups = shares(sizes(case.mesh))
    return largest_batch(step, inputs, policy, case.target, capacity, groups)
