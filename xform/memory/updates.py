"""Find gradients that must all be live at once before any is applied, and what that costs."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from xform.memory.attribute import BufferRow
from xform.memory.hlo import Instruction, Module


class WaitingGradients(NamedTuple):
    """Gradients that are live at the peak because a number is computed from all of them.

    Attributes:
      rows: their buffers.
      where: `file:line (function)` of the operation that computes the number, or empty.
      peak_reduction: by how many bytes the peak would fall if each gradient were applied as soon as
        it is computed.
    """

    rows: Sequence[BufferRow]
    where: str
    peak_reduction: int


def waiting_gradients(report: Any) -> WaitingGradients | None:
    """The gradients in a `MemoryReport` that wait for each other, or None.

    The update of a parameter reads its gradient, so it could run as soon as the gradient is
    computed. It cannot if it also reads a number that is computed from all gradients: their norm,
    or whether they are finite. Gradients that a loop stacks are complete only at the end of the
    loop and are left out. Linear in instructions.
    """
    rows = [r for r in report.peak if r.category == "gradient" and not r.output]
    if len(rows) < 2:
        return None
    module: Module = report.assignment.module
    number, read = _number_of_most(module, rows)
    if number is None:
        return None
    peak_reduction = report.live[report.peak_step] - _peak_without(report.live, read)
    return WaitingGradients(read, module.where(number), peak_reduction)


def _number_of_most(
    module: Module, rows: Sequence[BufferRow]
) -> tuple[Instruction | None, list[BufferRow]]:
    """The first scalar that depends on the most gradients, by bytes, and these gradients."""
    own: dict[str, int] = {}
    for i, row in enumerate(rows):
        own[row.name] = own.get(row.name, 0) | 1 << i
    depends: dict[int, int] = {}
    most, best, number = 0, 0, None
    for one in module.computations[module.entry].instructions:
        bits = functools.reduce(operator.or_, (depends.get(i, 0) for i in one.operands), 0)
        if one.opcode == "get-tuple-element":
            bits |= own.get(f"{module.instructions[one.operands[0]].name}{{{one.number}}}", 0)
        depends[one.id] = bits | own.get(one.name, 0)
        if not one.shape.dims and not one.shape.elements and bits.bit_count() > 1:
            size = sum(r.bytes for i, r in enumerate(rows) if bits >> i & 1)
            if size > most:
                most, best, number = size, bits, one
    return number, [r for i, r in enumerate(rows) if best >> i & 1]


def _peak_without(live: Sequence[int], rows: Sequence[BufferRow]) -> int:
    """The peak if each of these rows were freed right after the step that makes it."""
    gone = [0] * (len(live) + 1)
    for row in rows:
        gone[row.born + 1] += row.bytes
        gone[row.dies + 1] -= row.bytes
    return max(size - less for size, less in zip(live, itertools.accumulate(gone), strict=False))
