"""The largest batches that a device has room for, by its compiler: nothing is allocated."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

import xform
from models.train.config import RunConfig
from models.train.device import room
from models.train.mesh import mesh_or_none, shares, sizes
from models.train.planned import bounds_peak, mebibytes, one_line, whole_step
from xform.errors import BudgetInfeasible

# Of a batch, as `inputs(batch=n)`.
Inputs = Callable[..., Sequence[Any]]


@dataclasses.dataclass(frozen=True)
class Largest:
    """The largest batch of examples of one length.

    Attributes:
      length: units in an example.
      named: what that is called; "" where an example is one.
      unit: what is counted, such as "tokens".
      batch: examples; 0 if there is room for none.
      total_bytes: of the step with them, on each device; of a budget, its lowest peak.
      proven: whether the next larger batch was seen not to fit.
      again: FLOPs run again with it, in parts of the forward pass's; None where no budget is kept.
    """

    length: int
    named: str
    unit: str
    batch: int
    total_bytes: int
    proven: bool
    again: float | None = None

    @property
    def units(self) -> int:
        """Units of a batch."""
        return self.batch * self.length

    @property
    def flags(self) -> str:
        """What asks for it."""
        return f"--batch {self.batch}" + (f" --{self.named} {self.length}" if self.named else "")

    def __str__(self) -> str:
        least = "" if self.proven else " or more"
        size = f", {mebibytes(self.total_bytes)}" if self.batch else ""
        again = "" if self.again is None else f", {self.again:.2f} of the forward pass again"
        counts = f"batch {self.batch}{least}, {self.units:,} {self.unit}"
        length = f"{self.named} {self.length}: " if self.named else ""
        return f"{length}{counts}{size}{again}"


def largest(
    run: RunConfig, policy: Any, target: str | None, memory: str | None
) -> Iterator[Largest]:
    """The largest batch of the run's length, then of its half and its quarter, as they are found.

    Args:
      run: all but its batch.
      policy: what the backward pass keeps; a budget that a batch cannot keep is a batch too large.
      target: a device as `xform.memory_analysis` takes it, or that of this process.
      memory: of the device, where it is not known or not all of it is to be taken.

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
    """The largest batch whose whole step has room on each device; None if there is none.

    Bytes of a step that follows a budget are nearly those of the budget, whatever its batch; so
    where the policy is one, those of its lowest peak, which rise with the batch, are compared.

    Args:
      step: a function of a state, a batch and a policy; the state is donated.
      inputs: the types of state and batch, as `inputs(batch=n)`.
      policy: of the backward pass; a budget of the peak, and "auto", are within `capacity`.
      target: a device as `xform.memory_analysis` takes it.
      capacity: bytes of the device; None for what is known of it.
      multiple_of: sizes that are asked for.

    Returns:
      What `xform.max_batch` does, and the policy of the step with that batch: where a bound is
      given, the plan of its lowest peak, which may run much again.

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
        found = xform.max_batch(step, inputs=given, multiple_of=multiple_of, **options)
        return found, given(batch=found.size)[-1]

    def lowest(verify: bool) -> Inputs:
        @functools.cache
        def given(batch: int) -> Sequence[Any]:
            types = inputs(batch=batch)
            return *types, _lowest(step, types, policy, target, verify)

        return given

    if not bounds_peak(policy):
        return search(lambda batch: (*inputs(batch=batch), policy))
    # A plan as the simulation says takes one compilation, one as the compiler says several.
    found, verified = search(lowest(verify=False)), lowest(verify=True)
    size, over = (found[0].size, found[0].over) if found else (0, True)
    if over and fits(verified, size + multiple_of):
        return search(verified)
    return found


def _lowest(step: Callable[..., Any], types: Sequence[Any], budget: xform.policies.Budget,
            target: str, verify: bool) -> xform.Plan:  # fmt: skip
    """The plan of a step with the lowest peak: as simulated, or of some as the compiler says."""

    def within(size: int) -> xform.Plan:
        return xform.plan(step, *types, policy=dataclasses.replace(budget, bytes=size),
                          target=target, donate_argnums=0, verify=verify)  # fmt: skip

    try:
        return within(0)
    except BudgetInfeasible as error:
        return within(error.floor_bytes)


def _largest(run: RunConfig, policy: Any, target: str | None, memory: str | None) -> Largest:
    mesh = mesh_or_none(run.mesh, run.optim.offload_optimizer)

    def inputs(batch: int) -> Sequence[Any]:
        _, *types = whole_step(dataclasses.replace(run, batch=batch), mesh)
        return types

    with one_line():
        most = room(target, memory)
        if bounds_peak(policy):
            most = min(most, policy.bytes)
        step, *_ = whole_step(run, mesh)
        found = largest_batch(step, inputs, policy, target or jax.default_backend(), most,
                              shares(sizes(run.mesh)))  # fmt: skip
    of = run.length, run.length_name, run.unit
    if found is None:
        return Largest(*of, 0, 0, True)
    batch, plan = found
    again = plan.recompute_flops / plan.forward_flops if isinstance(plan, xform.Plan) else None
    return Largest(*of, batch.size, batch.fits.total_bytes or 0, bool(batch.over), again)
