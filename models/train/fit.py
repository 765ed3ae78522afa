"""Find the largest batches that fit in a device's memory, by compiling. Nothing is allocated."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

import xform
from models.train.config import RunConfig
from models.train.device import memory_bytes
from models.train.mesh import mesh_or_none, shares, sizes
from models.train.planned import mebibytes, one_line, whole_step
from xform.errors import BudgetInfeasible
from xform.policies.budgets import bounds_peak

# `inputs(batch=n)` returns the types of the arguments for a batch of n.
Inputs = Callable[..., Sequence[Any]]


@dataclasses.dataclass(frozen=True)
class Largest:
    """The largest batch of examples of one length.

    Attributes:
      length: number of units per example.
      length_name: the setting of that length; "" if an example is one unit.
      unit: the unit, such as "tokens".
      batch: number of examples; 0 if not even the smallest batch fits.
      total_bytes: memory of the step on each device; with a budget, its lowest peak.
      proven: whether the next larger batch was compiled and did not fit.
      recomputed: recomputed FLOPs as a fraction of the forward pass's FLOPs; None without a budget.
    """

    length: int
    length_name: str
    unit: str
    batch: int
    total_bytes: int
    proven: bool
    recomputed: float | None = None

    @property
    def units(self) -> int:
        """Number of units in a batch."""
        return self.batch * self.length

    @property
    def flags(self) -> str:
        """The flags that choose this batch."""
        return f"--batch {self.batch}" + (
            f" --{self.length_name} {self.length}" if self.length_name else ""
        )

    def __str__(self) -> str:
        or_more = "" if self.proven else " or more"
        size = f", {mebibytes(self.total_bytes)}" if self.batch else ""
        work = ""
        if self.recomputed is not None:
            work = f", {self.recomputed:.2f} of the forward pass recomputed"
        counts = f"batch {self.batch}{or_more}, {self.units:,} {self.unit}"
        length = f"{self.length_name} {self.length}: " if self.length_name else ""
        return f"{length}{counts}{size}{work}"


def largest(
    run: RunConfig, policy: Any, target: str | None, memory: str | None
) -> Iterator[Largest]:
    """Find the largest batch for the run's example length, then for a half and a quarter of it.

    Args:
      run: the run; its batch is ignored.
      policy: what the backward pass saves. A batch whose step cannot keep a budget is too large.
      target: a device as for `xform.memory_analysis`; None for the device of this process.
      memory: the memory to assume, such as "14GiB"; None for that of the device.

    Yields:
      The results, each as soon as it is found.

    Raises:
      InputError: there is no such device, or its memory is not known.
    """
    lengths = [max(1, run.length // n) for n in (1, 2, 4)]
    for length in dict.fromkeys(lengths):
        one = run if length == run.length else run.with_length(length)
        yield _largest(one, policy, target, memory)


def largest_batch(
    step: Callable[..., Any],
    inputs: Inputs,
    policy: Any,
    target: str,
    capacity: int | None = None,
    multiple_of: int = 1,
) -> tuple[Any, Any] | None:
    """Find the largest batch whose whole step fits in the memory of each device.

    A step that follows a budget takes nearly the bytes of the budget, whatever its batch. For such
    a policy the step's lowest possible peak, which grows with the batch, is compared instead.

    Args:
      step: a function of a state, a batch and `policy`. The state is donated.
      inputs: `inputs(batch=n)` returns the types of state and batch.
      policy: what the backward pass saves. `capacity` is the bound for a budget of the peak and
        for "auto".
      target: a device as for `xform.memory_analysis`.
      capacity: bytes of the device; None for its known memory.
      multiple_of: the batch must be a multiple of this.

    Returns:
      The result of `xform.memory.max_batch`, and the policy of the step with that batch. For
      a budget, the policy is the plan with the lowest peak, which may recompute much. None if no
      batch fits.

    Raises:
      WrongArgument: there is no such device, or its memory is not known.
    """
    options: dict[str, Any] = {"target": target, "capacity": capacity, "donate_argnums": 0}
    if isinstance(policy, xform.policies.Fit):
        policy = policy.within(0, "")

    def fits(given: Inputs, batch: int) -> bool:
        try:
            return bool(xform.fits(step, *given(batch=batch), **options).fits)
        except BudgetInfeasible:
            return False

    def search(given: Inputs) -> tuple[Any, Any] | None:
        if not fits(given, multiple_of):
            return None
        found = xform.memory.max_batch(step, inputs=given, multiple_of=multiple_of, **options)
        return found, given(batch=found.size)[-1]

    def lowest(verify: bool) -> Inputs:
        @functools.cache
        def given(batch: int) -> Sequence[Any]:
            types = inputs(batch=batch)
            return *types, _lowest(step, types, policy, target, verify)

        return given

    if not bounds_peak(policy):
        return search(lambda batch: (*inputs(batch=batch), policy))
    # Search with simulated plans first: verifying a plan with the compiler takes several
    # compilations.
    found, verified = search(lowest(verify=False)), lowest(verify=True)
    size, over = (found[0].size, found[0].over) if found else (0, True)
    if over is not None and fits(verified, size + multiple_of):
        return search(verified)
    return found


def _lowest(step: Callable[..., Any], types: Sequence[Any], budget: xform.policies.Budget,
            target: str, verify: bool) -> xform.Plan:  # fmt: skip
    """Plan a step for the lowest peak, as simulated, or with `verify` as the compiler measures."""

    jitted = xform.jit(step, donate_argnums=0)

    def within(size: int) -> xform.Plan:
        policy = dataclasses.replace(budget, bytes=size)
        (plan,) = xform.plan(jitted, *types, policy=policy, target=target, verify=verify)
        return plan

    try:
        return within(0)
    except BudgetInfeasible as error:
        return within(error.floor_bytes)


def _largest(run: RunConfig, policy: Any, target: str | None, memory: str | None) -> Largest:
    """Find the largest batch of examples of the run's length."""
    mesh = mesh_or_none(run.mesh, run.optim.offload_optimizer)

    def inputs(batch: int) -> Sequence[Any]:
        _, *types = whole_step(dataclasses.replace(run, batch=batch), mesh)
        return types

    with one_line():
        capacity = memory_bytes(target, memory)
        if isinstance(policy, xform.policies.Budget) and bounds_peak(policy):
            capacity = min(capacity, policy.bytes)
        step, *_ = whole_step(run, mesh)
        found = largest_batch(step, inputs, policy, target or jax.default_backend(), capacity,
                              shares(sizes(run.mesh)))  # fmt: skip
    length = run.length, run.length_name, run.unit
    if found is None:
        return Largest(*length, 0, 0, True)
    batch, plan = found
    recomputed = plan.recompute_flops / plan.forward_flops if isinstance(plan, xform.Plan) else None
    total_bytes = batch.fits.total_bytes or 0
    return Largest(*length, batch.size, total_bytes, batch.over is not None, recomputed)
