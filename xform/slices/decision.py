"""Decisions to run regions of a program in slices, as plain data."""

from __future__ import annotations

from typing import NamedTuple

from xform.slices.grow import producers
from xform.slices.region import Region


class SlicedValue(NamedTuple):
    """A decision: the region around a value runs in slices.

    Attributes:
      equation, result: which equation makes the value, and as which of its results. The equation is
        counted in the program with its calls opened, after the decisions before this one. For an
        input of the program, -1 and its position.
      axis: the axis of the value that is sliced.
      n: the number of slices.
      saved_bytes: the most bytes that a slice of a loss saves for its own backward pass; None: what
        a minimum cut saves.
    """

    equation: int
    result: int
    axis: int
    n: int
    saved_bytes: int | None = None


Slices = tuple[SlicedValue, ...]


def decision_for(region: Region, saved_bytes: int | None = None) -> SlicedValue:
    """Return the decision to run a region in slices. `saved_bytes` is as in `SlicedValue`."""
    made = producers(region.program).get(region.start)
    place = made or (-1, region.program.inputs.index(region.start))
    return SlicedValue(*place, region.axis, region.n, saved_bytes)
