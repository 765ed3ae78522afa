"""Find gradients that must all be live at once before any of them is applied, and what that costs.

The update of a parameter reads its gradient, so it could run as soon as the gradient is computed.
It must wait if it also reads a number that is computed from all gradients, such as their norm.
"""

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
    """Return the gradients in a `MemoryReport` that wait for one number, or None.

    Such a number is the norm of all gradients, or whether they are finite. Gradients that a loop
    stacks are complete only at the end of the loop and are left out.

    Cost: linear in instructions.
    """
    rows = [r for r in report.peak if r.category == "gradient" and not r.output]
    if len(rows) < 2:
        return None
    module: Module = report.assignment.module
    number, waiting = _most_dependent_scalar(module, rows)
    if number is None:
        return None
    peak_reduction = report.live[report.peak_step] - _peak_without(report.live, waiting)
    return WaitingGradients(waiting, module.where(number), peak_reduction)


def _most_dependent_scalar(
    module: Module, rows: Sequence[BufferRow]
) -> tuple[Instruction | None, list[BufferRow]]:
    """Return the first scalar that depends on the most bytes of gradients, and these gradients.

    The gradients are `rows`. A set of them is an integer with a bit for each.
    """
    gradients_named: dict[str, int] = {}
    for i, row in enumerate(rows):
        gradients_named[row.name] = gradients_named.get(row.name, 0) | 1 << i
    depends_on: dict[int, int] = {}
    most_bytes, most_bits, scalar = 0, 0, None
    for instruction in module.computations[module.entry].instructions:
        operands = instruction.operands
        bits = functools.reduce(operator.or_, (depends_on.get(i, 0) for i in operands), 0)
        if instruction.opcode == "get-tuple-element":
            element = f"{module.instructions[operands[0]].name}{{{instruction.number}}}"
            bits |= gradients_named.get(element, 0)
        depends_on[instruction.id] = bits | gradients_named.get(instruction.name, 0)
        is_scalar = not instruction.shape.dims and not instruction.shape.elements
        if is_scalar and bits.bit_count() > 1:
            size = sum(r.bytes for i, r in enumerate(rows) if bits >> i & 1)
            if size > most_bytes:
                most_bytes, most_bits, scalar = size, bits, instruction
    return scalar, [r for i, r in enumerate(rows) if most_bits >> i & 1]


def _peak_without(live: Sequence[int], rows: Sequence[BufferRow]) -> int:
    """Return the peak if each of these rows were freed right after the step that makes it."""
    change = [0] * (len(live) + 1)
    for row in rows:
        change[row.born + 1] += row.bytes
        change[row.dies + 1] -= row.bytes
    freed = itertools.accumulate(change)
    return max(size - fewer for size, fewer in zip(live, freed, strict=False))
