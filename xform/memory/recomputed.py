"""The operations that XLA recomputes by itself, because a program takes too much memory.

If a program exceeds the memory that XLA may use on a GPU or TPU, XLA's pass HloRematerialization
clones operations, so that their results need not stay in memory. XLA does not report this; the
names of the clones contain ".remat". If nothing reads the original any more, XLA removes it, and
the clone costs nothing. XLA:CPU has no such pass.
Source: https://github.com/openxla/xla/blob/main/xla/hlo/transforms/simplifiers/hlo_rematerialization.cc
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence

from xform.memory.hlo import Instruction, Module
from xform.memory.traffic import run_counts, shape_bytes
from xform.terminal.text import human_bytes, human_flops

# The name of a clone. XLA also stores values in a layout with less padding, which it calls
# remat_compressed and remat_uncompressed: nothing is computed again.
_CLONE = re.compile(r"\.remat(?!_)")
# Instructions that compute nothing.
_VIEWS = ("bitcast", "get-tuple-element", "tuple", "parameter", "constant")


@dataclasses.dataclass(frozen=True)
class Recomputed:
    """Operations of one kind, of one line, that the compiler recomputes by itself.

    Attributes:
      operation: the JAX primitive.
      where: the user's line, `file:line (function)`; "" if it is unknown.
      count: how often they run in one run of the program, on each device.
      flops: FLOPs of the matrix products and convolutions among them, in these runs.
      bytes: bytes of their results, of one run of each.
    """

    operation: str
    where: str
    count: int
    flops: int
    bytes: int


def recomputed(module: Module) -> tuple[Recomputed, ...]:
    """Return the operations that the compiler recomputes, by falling FLOPs and bytes."""
    totals: dict[tuple[str, str], list[int]] = {}
    originals: set[str] = set()
    for i, times in run_counts(module):
        original = _CLONE.split(i.name)[0]
        if original not in originals:
            originals.add(original)
        elif original != i.name and i.opcode not in _VIEWS:
            operation = module.named(i).rpartition("/")[2]
            total = totals.setdefault((operation, module.where(i)), [0, 0, 0])
            amounts = times, times * product_flops(module, i), shape_bytes(i.shape)
            total[:] = [a + b for a, b in zip(total, amounts, strict=True)]
    rows = (Recomputed(*key, *total) for key, total in totals.items())
    return tuple(sorted(rows, key=lambda row: (-row.flops, -row.bytes, row.where)))


def product_flops(module: Module, i: Instruction) -> int:
    """Return the FLOPs of the matrix products and convolutions in one run of an instruction."""
    if i.opcode == "fusion":
        inner = (j for c in i.called for j in module.computations[c].instructions)
        return sum(product_flops(module, j) for j in inner)
    if not i.summed:
        return 0
    result = i.shape.elements[0] if i.shape.elements else i.shape
    first, second = (module.instructions[o].shape for o in i.operands[:2])
    if i.opcode == "convolution":  # each output reads the kernel of its feature
        terms = math.prod(second.dims) // max(1, second.dims[i.summed[0]])
    else:
        terms = math.prod(first.dims[axis] for axis in i.summed)
    return 2 * math.prod(result.dims) * terms


def summary(rows: Sequence[Recomputed]) -> str:
    """Return how many operations are recomputed, and their FLOPs and bytes, as text."""
    count, flops = sum(row.count for row in rows), sum(row.flops for row in rows)
    products = f", {human_flops(flops)} of matrix products and convolutions" if flops else ""
    size = human_bytes(sum(row.bytes for row in rows))
    return f"{count} operation{'s' * (count != 1)}{products}, {size} of results"
