"""Count the bytes that a compiled program moves to and from memory, and between devices.

Every instruction outside fusions reads its operands and writes its result, times the trip counts of
the loops around it. If an array is sliced or updated in place, only the slice counts. The count is
for a device without a cache, so it is an upper estimate for a roofline.
Source: Williams, Waterman, Patterson, "Roofline", CACM 52(4), 2009.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from xform.memory.hlo import Instruction, Module, Shape

# Instructions that count no bytes: they name values, contain other instructions, or make values
# that their readers compute for themselves.
_FREE = (
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional",
    "call", "after-all", "partition-id", "replica-id", "opt-barrier", "add-dependency", "iota",
)  # fmt: skip
_HOLDS = ("while", "conditional", "call", "async-start")
# Instructions that read only as many bytes of their first operand as they return.
_CUTS = ("dynamic-slice", "slice", "gather")
_COLLECTIVES = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all",
    "collective-permute", "collective-broadcast",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Collective:
    """One kind of communication.

    Attributes:
      kind: its name in HLO, such as `all-reduce`.
      count: how often it runs in one run of the program, with trip counts.
      bytes: bytes of its results on each device, over all of these times.
    """

    kind: str
    count: int
    bytes: int


def moved_bytes(module: Module) -> int:
    """Bytes that each device reads and writes in one run. Linear in instructions."""
    return sum(times * _moved(module, i) for i, times in _runs(module))


def collectives(module: Module) -> tuple[Collective, ...]:
    """The communication between devices in one run, by kind."""
    counts: dict[str, list[int]] = {}
    for i, times in _runs(module):
        kind = i.opcode.removesuffix("-start")
        if kind in _COLLECTIVES:
            size = _size(i.shape.elements[-1] if i.opcode != kind and i.shape.elements else i.shape)
            row = counts.setdefault(kind, [0, 0])
            row[0], row[1] = row[0] + times, row[1] + times * size
    return tuple(Collective(kind, *counts[kind]) for kind in sorted(counts))


def _runs(module: Module) -> Iterator[tuple[Instruction, int]]:
    """Every instruction outside fusions, and how often it runs.

    Every branch of a conditional counts as run.
    """
    todo = [(module.entry, 1)]
    while todo:
        computation, times = todo.pop()
        for i in module.computations[computation].instructions:
            yield i, times
            if i.opcode in _HOLDS:
                inner = times * (module.trips(i) if i.opcode == "while" else 1)
                todo.extend((c, inner) for c in i.called)


def _moved(module: Module, i: Instruction) -> int:
    if i.opcode in _FREE or i.opcode.endswith("-done") or i.target == "AllocateBuffer":
        return 0
    operands = [module.instructions[o] for o in i.operands]
    if i.opcode == "fusion":
        return _fused(module, i, operands)
    if i.opcode in _CUTS:
        return 2 * _size(i.shape)
    if i.opcode in ("dynamic-update-slice", "scatter"):
        return 2 * _size(operands[-1 if i.opcode == "scatter" else 1].shape)
    return _size(i.shape) + sum(_size(o.shape) for o in operands)


def _fused(module: Module, i: Instruction, operands: list[Instruction]) -> int:
    """Bytes that a fusion moves; for a slice or an update in place, only the slice counts."""
    (body,) = i.called
    root = module.root(body)
    parts = [module.instructions[o] for o in root.operands] if root.opcode == "tuple" else [root]
    reads = _reads(module, body)
    read = sum(min(_size(o.shape), reads[k]) for k, o in enumerate(operands))
    return int(read) + sum(_written(module, part) for part in parts)


def _reads(module: Module, body: int) -> dict[int, float]:
    """Bytes that a fused computation reads of each parameter, by number; infinite if all of it."""
    inside = module.computations[body].instructions
    readers: dict[int, list[Instruction]] = {}
    for i in inside:
        for o in dict.fromkeys(i.operands):
            readers.setdefault(o, []).append(i)

    def read(start: int) -> float:
        views, total = [start], 0.0
        for v in views:
            for r in readers.get(v, ()):
                if r.opcode == "bitcast":
                    views.append(r.id)
                elif r.opcode == "fusion":
                    inner = _reads(module, r.called[0])
                    total += sum(inner[k] for k, o in enumerate(r.operands) if o == v)
                elif v in r.operands[1:] or r.opcode not in (*_CUTS, "dynamic-update-slice"):
                    return math.inf
                elif r.opcode in _CUTS:
                    total += _size(r.shape)
        return math.inf if module.computations[body].root in views else total

    return {p.number: read(p.id) for p in inside if p.opcode == "parameter"}


def _written(module: Module, part: Instruction) -> int:
    while part.opcode in ("bitcast", "fusion") and not part.shape.elements:
        inner = module.root(part.called[0]) if part.called else None
        part = inner or module.instructions[part.operands[0]]
    if part.opcode == "dynamic-update-slice":
        return _size(module.instructions[part.operands[1]].shape)
    return _size(part.shape)


def _size(shape: Shape) -> int:
    if shape.elements:
        return sum(map(_size, shape.elements))
    return shape.bytes
