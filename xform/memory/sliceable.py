"""Find the part of a program that holds the largest buffers and can run in slices.

The buffers of the largest computed type are compared with the traced program: a value with as many
elements may be in one of them. The regions around these values that can run in slices come from
`xform.slices`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from xform.memory.attribute import BufferRow
from xform.memory.changes import COMPUTED
from xform.program.dimensions import shape
from xform.program.ir import Program
from xform.slices.candidates import numbers_of_slices
from xform.slices.opened import opened
from xform.slices.region import Region, find_region
from xform.slices.shards import shard_length

# How many values of the largest type are looked at.
_VALUES = 4


class Sliceable(NamedTuple):
    """A region that can run in slices, and the rows of the peak that have its values."""

    region: Region
    rows: list[BufferRow]

    @property
    def bytes(self) -> int:
        """The bytes of the rows."""
        return sum(row.bytes for row in self.rows)


def largest_sliceable(report: Any) -> Sliceable | None:
    """Return the region with the largest part of the peak; None if no region is in the peak.

    The rows are values that exist only within the region, so a loop over slices holds one slice of
    each. Programs on several devices have no result: types do not tell the sizes of their buffers.

    Cost: about as long as finding ten regions, each linear in the number of equations.
    """
    prog = report.program
    computed = [row for row in report.peak if row.category in COMPUTED and not row.output]
    if prog is None or not computed or report.devices > 1:
        return None
    largest = max(computed, key=lambda row: row.bytes)
    found = (_with_rows(region, computed) for region in _regions(opened(prog), largest))
    return max(found, key=lambda each: each.bytes, default=None)


def _regions(prog: Program, row: BufferRow) -> Iterator[Region]:
    """Yield the regions around the values that may be in a buffer, with few slices."""
    size = math.prod(row.shape)
    values = [y for eqn in prog.equations for y in eqn.outvars if math.prod(shape(y)) == size]
    for v in values[:_VALUES]:
        for axis in range(len(shape(v))):
            for n in numbers_of_slices(shard_length(v, axis))[:1]:
                if region := find_region(prog, v, axis, n):
                    yield region


def _with_rows(region: Region, rows: list[BufferRow]) -> Sliceable:
    """Return a region and the rows that have values of it, which do not leave it.

    A row may have a value with as many elements, if no other value of the program has as many.
    """
    outputs = {y for y, _, _ in region.outputs}
    inside = {v for v in region.axes if v not in outputs}
    made = {y for eqn in region.program.equations for y in eqn.outvars}
    count = lambda values: {math.prod(shape(v)) for v in values}
    sizes = count(inside) - count(made - inside)
    return Sliceable(region, [row for row in rows if math.prod(row.shape) in sizes])
