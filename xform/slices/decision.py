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
    """

    equation: int
    result: int
    axis: int
    n: int


Slices = tuple[SlicedValue, ...]


def decision_for(region: Region) -> SlicedValue:
    """Return the decision to run a region in slices."""
    made = producers(region.program).get(region.start)
    place = made or (-1, region.program.inputs.index(region.start))
    return SlicedValue(*place, region.axis, region.n)
