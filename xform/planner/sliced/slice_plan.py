"""The program of one slice of a region, and which values it saves for its own backward pass.

A minimum cut of the slice decides, or a number of bytes. With fewer bytes each slice recomputes
more of itself.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from xform.errors import BudgetInfeasible
from xform.interpret.joint import Schedule, analyze
from xform.planner.costs.outcome import recompute_flops, saved_bytes
from xform.planner.decide import schedule
from xform.planner.device import current_device
from xform.policies import Budget, min_cut
from xform.program.arithmetic import Value, differentiable
from xform.program.ir import Mask, Program, trace
from xform.slices.loop import run_slice
from xform.slices.region import Region
from xform.slices.resize import CurrentSlice, resized

# How many numbers of saved bytes are tried, and the lowest but one, relative to a minimum cut.
_NUMBERS, _LOWEST = 6, 1 / 64


def slice_program(region: Region) -> Program:
    """Return the program of one slice, with the number of the slice as its first input."""
    n = len(region.sliced)
    if "program" not in region.cache:
        number = jax.ShapeDtypeStruct((), np.int32)
        avals: list[tuple[Any, int]] = [(v.aval, axis) for v, axis in region.sliced]
        cut = [a.update(shape=resized(a.shape, axis, region.n), weak_type=False)
               for a, axis in avals]  # fmt: skip
        full = [v.aval for v in region.full]

        def run(number: Value, *inputs: Value) -> list[Value]:
            at = CurrentSlice(number, region.n, region.shards)
            return run_slice(region, inputs[:n], inputs[n:], at)

        region.cache["program"] = trace(run, number, *cut, *full)
    return region.cache["program"]


def plan_of_slice(prog: Program, active: Mask, wanted: Mask, most_saved: int | None) -> Schedule:
    """Return which values of a slice are saved for its own backward pass.

    Args:
      prog: the program of the slice.
      active: which of its inputs are differentiated.
      wanted: which of its outputs are differentiated.
      most_saved: the most bytes that are saved; None: what a minimum cut saves.

    Raises:
      BudgetInfeasible: the slice cannot save so few bytes.
    """
    policy = min_cut if most_saved is None else Budget(most_saved, of="saved")
    return schedule(analyze(prog, active, wanted), policy, current_device().backend)


def fewer_saved_bytes(region: Region, loss: int) -> list[int]:
    """Return numbers of bytes that a slice may save, fewer than a minimum cut saves.

    They fall. The last one is the fewest that a plan saves. `loss` is the position of the region's
    loss.
    """
    most = most_saved_bytes(region, loss)
    try:
        _plan_of_loss(region, loss, 0)
        least = 0
    except BudgetInfeasible as error:
        least = error.floor_bytes
    lowest = max(least / max(most, 1), _LOWEST)
    numbers = {int(most * lowest ** (k / _NUMBERS)) for k in range(1, _NUMBERS)}
    return sorted({n for n in numbers if least < n < most} | {least}, reverse=True)


def most_saved_bytes(region: Region, loss: int) -> int:
    """Return the bytes that a minimum cut of a slice saves. `loss` is as in `fewer_saved_bytes`."""
    return saved_bytes(_plan_of_loss(region, loss, None))


def recomputed_in_slices(region: Region, loss: int, most_saved: int | None) -> int:
    """Return the FLOPs that all slices of a region recompute. `loss` is as in `fewer_saved_bytes`.

    An input that the program does not differentiate counts as differentiated.
    """
    return region.n * recompute_flops(_plan_of_loss(region, loss, most_saved))


def _plan_of_loss(region: Region, loss: int, most_saved: int | None) -> Schedule:
    """Return the plan of a slice that differentiates its loss by all inputs."""
    prog = slice_program(region)
    active = (False, *map(differentiable, prog.in_avals[1:]))
    wanted = tuple(i == loss for i in range(len(region.outputs)))
    return plan_of_slice(prog, active, wanted, most_saved)
