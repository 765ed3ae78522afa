"""The largest batches that a device has room for, by its compiler: nothing is allocated."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

import xform
from models.train.config import RunConfig
from models.train.device import capacity
from models.train.mesh import batch_sharding, mesh_or_none
from models.train.planned import mebibytes, one_line
from models.train.state import TrainState, abstract_state, device_bytes
from models.train.step import Metrics, make_step
from xform.errors import BudgetInfeasible, WrongArgument


@dataclasses.dataclass(frozen=True)
class Largest:
    """The largest batch of windows of one length.

    Attributes:
      context: tokens in a window.
      batch: sequences; 0 if there is room for none.
      total_bytes: of the step with them, on each device.
      proven: whether the next larger batch was seen not to fit.
    """

    context: int
    batch: int
    total_bytes: int
    proven: bool

    @property
    def tokens(self) -> int:
        """Tokens of a batch."""
        return self.batch * self.context

    def __str__(self) -> str:
        least = "" if self.proven else " or more"
        size = f", {mebibytes(self.total_bytes)}" if self.batch else ""
        return f"context {self.context}: batch {self.batch}{least}, {self.tokens:,} tokens{size}"


def largest(
    run: RunConfig, policy: Any, target: str | None, memory: str | None
) -> Iterator[Largest]:
    """The largest batch of the run's context, then of its half and its quarter, as they are found.

    Args:
      run: all but its batch.
      policy: what the backward pass keeps; a budget that a batch cannot keep is a batch too large.
      target: a device as `xform.memory_analysis` takes it, or that of this process.
      memory: of the device, where it is not known or not all of it is to be taken.

    Raises:
      InputError: there is no such device, or its memory is not known.
    """
    contexts = [max(1, run.model.context // n) for n in (1, 2, 4)]
    for context in dict.fromkeys(contexts):
        model = dataclasses.replace(run.model, context=context)
        yield _largest(dataclasses.replace(run, model=model), policy, target, memory)


def bytes_around(run: RunConfig, state: TrainState) -> int:
    """What a step holds on each device besides its gradient, and the parameters that this is of.

    The masters of rounded parameters, the optimizer, a sum of gradients.
    """
    params, masters = device_bytes(state.params), run.optim.weights != "float32"
    return device_bytes(state) + params * (int(run.accumulate > 1) - int(not masters))


def _largest(run: RunConfig, policy: Any, target: str | None, memory: str | None) -> Largest:
    mesh = mesh_or_none(run.mesh)
    state = abstract_state(run.model, run.optim, mesh)
    around = bytes_around(run, state)
    room: Any = memory or (None if target else capacity())
    if isinstance(policy, xform.policies.Budget) and policy.of == "peak":
        room, policy = (
            policy.bytes,
            dataclasses.replace(policy, bytes=max(0, policy.bytes - around)),
        )
    elif isinstance(policy, xform.policies.Fit):
        policy = dataclasses.replace(policy, reserve=around)

    def step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, Metrics]:
        try:
            return make_step(run.model, run.optim, policy, run.seed, mesh)(state, tokens)
        except BudgetInfeasible:
            # Larger than what has room: its bytes say in which direction to look.
            all_saved = xform.policies.save_everything
            return make_step(run.model, run.optim, all_saved, run.seed, mesh)(state, tokens)

    def inputs(batch: int) -> tuple[TrainState, jax.ShapeDtypeStruct]:
        tokens = dataclasses.replace(run, batch=batch).tokens_type()
        if mesh is not None:
            tokens = tokens.update(sharding=batch_sharding(mesh, batch, axis=1))
        return state, tokens

    options: dict[str, Any] = {"target": target or jax.default_backend(), "donate_argnums": 0}
    options |= {"capacity": room} if room else {}
    with one_line():
        try:
            found = xform.max_batch(step, inputs=inputs, **options)
        except WrongArgument:
            one = xform.fits(step, *inputs(1), **options)
            if one.fits:
                raise
            return Largest(run.model.context, 0, one.total_bytes or 0, True)
    return Largest(run.model.context, found.size, found.fits.total_bytes or 0, bool(found.over))
