"""Choose regions and numbers of slices, such that a program keeps to a number of bytes.

The compiler decides: each proposal is compiled. The search tries the regions in the order of
`slices/candidates.py`, each with the most slices first. If that fits, bisection finds the fewest
slices that fit. If no region alone is enough, the best one stays in slices, and the search goes on
in the rewritten program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from xform.planner.sliced.loss import run_loss_in_slices
from xform.program.ir import Program
from xform.slices.candidates import choices, fewest_slices
from xform.slices.opened import opened
from xform.slices.region import Region
from xform.slices.rewrite import with_loop

# How many regions are tried in each round, and how many regions are sliced.
_TRIED = 5
_ROUNDS = 4
# A region must lower the bytes at least by this factor to stay in slices.
_GAIN = 0.97


@dataclasses.dataclass(frozen=True)
class SlicedProgram:
    """A program with some regions in slices.

    Attributes:
      program: the program.
      bytes: its compiled bytes.
      regions: its regions in slices, in the order of the choices.
    """

    program: Program
    bytes: float
    regions: tuple[Region, ...] = ()


def program_within(prog: Program, limit: float, bytes_of: Callable[[Program], float]
                   ) -> SlicedProgram:  # fmt: skip
    """Return a program that takes at most `limit` bytes, or else the smallest one found.

    Args:
      prog: the program.
      limit: the number of bytes.
      bytes_of: compiles a program and returns its bytes; infinite if the compiler refuses it.

    Cost: up to about 30 compilations, most often fewer than ten.
    """
    best = SlicedProgram(prog, bytes_of(prog))
    while best.bytes > limit and len(best.regions) < _ROUNDS:
        found = _slice_one(best, limit, bytes_of)
        if found is None:
            break
        best = found
    return best


def _slice_one(base: SlicedProgram, limit: float, bytes_of: Callable[[Program], float]
               ) -> SlicedProgram | None:  # fmt: skip
    """Slice one more region; return the first program that fits, or else the smallest.

    None if no region makes the program clearly smaller.
    """

    def with_slices(region: Region) -> SlicedProgram:
        prog = with_loop(region, run_loss_in_slices)
        return SlicedProgram(prog, bytes_of(prog), (*base.regions, region))

    best: SlicedProgram | None = None
    for choice in choices(opened(base.program))[:_TRIED]:
        most = with_slices(choice.regions[-1])
        if most.bytes <= limit:
            return fewest_slices(choice, most, with_slices, lambda made: made.bytes <= limit)
        if most.bytes < _GAIN * base.bytes and (best is None or most.bytes < best.bytes):
            best = most
    return best
