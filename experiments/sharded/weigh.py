"""Bytes of a training step on each of many absent devices, from shapes alone."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

import jax
import jax.numpy as jnp

import xform
from models.nets.presets import TRAINED
from models.train.config import OptimConfig
from models.train.fit import largest_batch
from models.train.mesh import abstract_mesh, batch_sharding, shares, sizes
from models.train.state import TrainState, abstract_state, device_bytes
from models.train.step import make_step
from xform.errors import BudgetInfeasible
from xform.memory.capacity import LargestBatch
from xform.memory.report import MemoryReport
from xform.policies.budgets import bounds_peak

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, its batch, and the devices that share it.

    Attributes:
      preset: of `models.nets.presets`.
      batch: sequences of a step, over all devices.
      context: tokens of a sequence.
      mesh: of the devices, in the form of `--mesh`.
      target: the target that compiles the step.
      budgets: bytes of each device.
      offload: whether the optimizer's state is in the memory of the hosts.
      update: "" for the trainer's default. "separate" and "fused" have no norm over all gradients:
        they neither clip by it nor skip a step by it. "fused" updates in the backward pass.
    """

    preset: str
    batch: int
    context: int
    mesh: str
    target: str
    budgets: tuple[str, ...] = ()
    offload: bool = False
    update: str = ""

    @property
    def policies(self) -> tuple[str, ...]:
        """The possible values of `--policy`."""
        if self.update:
            return "min_cut", "save_nothing"
        return ("min_cut", "save_nothing", "auto", *(f"budget:{size}" for size in self.budgets))

    @property
    def name(self) -> str:
        """The key of its results."""
        return f"{self.preset}@{self.target}" + (self.update and f":{self.update}")

    @property
    def optim(self) -> OptimConfig:
        """The settings of AdamW."""
        config = OptimConfig(offload_optimizer=self.offload, fused_update=self.update == "fused")
        if not self.update:
            return config
        return dataclasses.replace(config, clip_norm=math.inf, spike_factor=math.inf)


@dataclasses.dataclass(frozen=True)
class Weighed:
    """What a compiler reports for a step on each device.

    Attributes:
      bytes: at its peak; None if no plan fits.
      fits: whether the device has that many.
      again: recomputed FLOPs, relative to the forward pass; None without a plan.
      seconds: to plan and to compile.
      floor: the lowest peak that was found, if no plan fits.
      collective: bytes of the results of collectives on each device, in a step.
      step: seconds of a step by the roofline, without communication.
      host: bytes in the memory of the host, for each device.
      gradient: bytes of gradients at the peak; None if the step does not fit.
      largest_gradient: bytes of the largest of these.
    """

    bytes: int | None
    fits: bool
    again: float | None
    seconds: float
    floor: int | None = None
    collective: int | None = None
    step: float | None = None
    host: int | None = None
    gradient: int | None = None
    largest_gradient: int | None = None


def step_of(case: Case) -> tuple[Any, TrainState, jax.ShapeDtypeStruct]:
    """Return the bfloat16 step with AdamW and a `policy` argument, and types of state and batch."""
    devices, optim = abstract_mesh(case.mesh), case.optim
    config: Any = dataclasses.replace(TRAINED[case.preset], context=case.context, dtype="bfloat16")
    if hasattr(config, "dropout"):
        config = dataclasses.replace(config, dropout=0.0)
    tokens = jax.ShapeDtypeStruct((1, case.batch, case.context + 1), jnp.int32)
    tokens = tokens.update(sharding=batch_sharding(devices, case.batch, axis=1))

    def step(state: TrainState, tokens: jax.Array, policy: Any = None) -> Any:
        return make_step(config, optim, policy, mesh=devices)(state, tokens)

    return step, abstract_state(config, optim, devices), tokens


def waiting(case: Case) -> int:
    """Return the bytes of the state on the host of each device, from their shapes."""
    _, state, _ = step_of(case)
    return device_bytes(state, offloaded=True)


def compiled(case: Case, policy: Any) -> MemoryReport:
    """Return the report of the target's compiler for the step under a policy."""
    step, state, tokens = step_of(case)
    return xform.fits(step, state, tokens, policy=policy, target=case.target, donate_argnums=0)


def weigh(case: Case, policy: Any) -> Weighed:
    """Compile the step; if the policy is a budget, plan the whole step first."""
    start, again = time.perf_counter(), None
    if bounds_peak(policy):
        step, state, tokens = step_of(case)
        try:
            jitted = xform.jit(step, policy, target=case.target, donate_argnums=0)
            (policy,) = xform.plan(jitted, state, tokens)
        except BudgetInfeasible as error:
            seconds = time.perf_counter() - start
            return Weighed(None, False, None, seconds, error.floor_bytes)
        again = policy.recompute_flops / policy.forward_flops
    one = compiled(case, policy)
    sent = sum(c.bytes for c in one.collectives) if one.fits else None
    seconds = time.perf_counter() - start
    gradients = [row.bytes for row in one.peak if row.category == "gradient" and row.counted]
    at_peak = (sum(gradients), max(gradients, default=0)) if one.fits else (None, None)
    return Weighed(one.total_bytes, bool(one.fits), again, seconds, None, sent, one.seconds,
                   one.host_bytes, *at_peak)  # fmt: skip


def most_of(case: Case, policy: Any) -> tuple[LargestBatch, Any] | None:
    """Return the largest batch whose step fits each device, and the policy of its step; or None.

    The batch is a multiple of the devices that share it. For a budget the policy is a plan.
    """

    def inputs(batch: int) -> Any:
        _, *types = step_of(dataclasses.replace(case, batch=batch))
        return types

    step, *_ = step_of(case)
    is_budget = isinstance(policy, xform.policies.Budget) and bounds_peak(policy)
    capacity = policy.bytes if is_budget else None
    groups = shares(sizes(case.mesh))
    return largest_batch(step, inputs, policy, case.target, capacity, groups)
