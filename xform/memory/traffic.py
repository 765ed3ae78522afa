"""Count the bytes that a compiled program moves to and from memory, and between devices.

Every instruction outside fusions reads its operands and writes its result, as often as the loops
around it run. If an array is sliced or updated in place, only the slice counts. The count assumes a
device without a cache, so it is an upper estimate for a roofline.
Source: Williams, Waterman, Patterson, "Roofline", CACM 52(4), 2009.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

from xform.interpret.cost import iterations_in
from xform.interpret.emit import pass_name
from xform.memory.hlo import Instruction, Module, Shape

# Instructions that count no bytes: they name values, contain other instructions, or make values
# that their readers compute for themselves.
_NO_BYTES = (
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional",
    "call", "async-start", "async-update", "after-all", "partition-id", "replica-id", "opt-barrier",
    "add-dependency", "iota",
)  # fmt: skip
# Instructions that run the computations that they call.
_RUNS_OTHERS = ("while", "conditional", "call", "async-start")
# Instructions that read only as many bytes of their first operand as they return.
_SLICES = ("dynamic-slice", "slice", "gather")
_COLLECTIVES = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all",
    "collective-permute", "collective-broadcast",
)  # fmt: skip
# Collectives whose results are parts of other devices, as they are.
_GATHERS = ("all-gather", "all-to-all", "ragged-all-to-all")
# The name of an operation that XLA merged from two.
_MERGED = re.compile(r"(^|/)\([^()]*:")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One kind of communication.

    Attributes:
      kind: its name in HLO, such as `all-reduce`.
      count: how often it runs in one run of the program, with trip counts.
      bytes: bytes of its results on each device, over all of these times.
      repeated: how many of these times it is for recomputed operations, by the name of the
        operation that it was made for. One that the forward pass shares does not count.
      repeated_bytes: bytes of these.
    """

    kind: str
    count: int
    bytes: int
    repeated: int = 0
    repeated_bytes: int = 0


def moved_bytes(module: Module) -> int:
    """Return the bytes that each device reads and writes in one run. Linear in instructions."""
    return sum(times * instruction_bytes(module, i) for i, times in run_counts(module))


def collectives(module: Module) -> tuple[Collective, ...]:
    """Return the communication between devices in one run, by kind."""
    totals: dict[str, list[int]] = {}  # runs and bytes, of all and of those that are repeated
    for i, times in run_counts(module):
        kind = i.opcode.removesuffix("-start")
        if kind in _COLLECTIVES:
            total = totals.setdefault(kind, [0, 0, 0, 0])
            amounts = times, times * shape_bytes(_exchanged(i))
            repeated = amounts if _is_repeated(module.named(i)) else ()
            for k, n in enumerate((*amounts, *repeated)):
                total[k] += n
    return tuple(Collective(kind, *totals[kind]) for kind in sorted(totals))


def _is_repeated(name: str) -> bool:
    """Return whether an operation with this `op_name` belongs to a recompute alone.

    XLA writes `scope/(a:b)` for an operation that it merged from `scope/a` and `scope/b`.
    """
    return pass_name(name) == "recompute" and not _MERGED.search(name)


def gathered_sizes(module: Module) -> set[tuple[int, ...]]:
    """Return the sizes of the arrays that are gathered from several devices, each in rising order.

    Axes of length 1 are left out.
    """
    found: set[tuple[int, ...]] = set()
    for i, _ in run_counts(module):
        if i.opcode.removesuffix("-start") in _GATHERS:
            result = _exchanged(i)
            arrays = result.elements or (result,)
            found |= {tuple(sorted(n for n in array.dims if n > 1)) for array in arrays}
    return found


def _exchanged(i: Instruction) -> Shape:
    """Return the type of the result of a collective.

    The start of an asynchronous collective returns its operands and its result.
    """
    is_start = i.opcode.endswith("-start") and i.shape.elements
    return i.shape.elements[-1] if is_start else i.shape


def run_counts(module: Module) -> Iterator[tuple[Instruction, int]]:
    """Yield every instruction outside fusions, and how often it runs.

    Every branch of a conditional counts as run.
    """
    stack = [(module.entry, 1)]
    while stack:
        computation, times = stack.pop()
        for i in module.computations[computation].instructions:
            yield i, times
            if i.opcode in _RUNS_OTHERS:
                inner_times = times * (_iterations(module, i) if i.opcode == "while" else 1)
                stack.extend((c, inner_times) for c in i.called)


def _iterations(module: Module, loop: Instruction) -> int:
    """Return how often the body of a loop runs for each run of the code around it.

    For a loop that restores states of another loop (`interpret/checkpoints.py`), the compiler does
    not know the number. The name of the loop tells it.
    """
    scopes, _, _ = loop.op_name.rpartition("/")
    return iterations_in(scopes) or module.trips(loop)


def instruction_bytes(module: Module, i: Instruction) -> int:
    """Return the bytes that an instruction reads and writes in one run."""
    if i.opcode in _NO_BYTES or i.opcode.endswith("-done") or i.target == "AllocateBuffer":
        return 0
    operands = [module.instructions[o] for o in i.operands]
    if i.opcode == "fusion":
        return _fusion_bytes(module, i, operands)
    if i.opcode in _SLICES:
        return 2 * shape_bytes(i.shape)
    if i.opcode in ("dynamic-update-slice", "scatter"):
        return 2 * shape_bytes(operands[-1 if i.opcode == "scatter" else 1].shape)
    return shape_bytes(i.shape) + sum(shape_bytes(o.shape) for o in operands)


def _fusion_bytes(module: Module, i: Instruction, operands: list[Instruction]) -> int:
    """Return the bytes that a fusion reads and writes.

    For a slice or an update in place, only the slice counts.
    """
    (body,) = i.called
    root = module.root(body)
    results = [module.instructions[o] for o in root.operands] if root.opcode == "tuple" else [root]
    read_of = _read_bytes(module, body)
    read = sum(min(shape_bytes(o.shape), read_of[k]) for k, o in enumerate(operands))
    return int(read) + sum(_written_bytes(module, result) for result in results)


def _read_bytes(module: Module, body: int) -> dict[int, float]:
    """Return the bytes that a fused computation reads of each parameter, by parameter number.

    They are infinite if it reads all of the parameter.
    """
    instructions = module.computations[body].instructions
    readers: dict[int, list[Instruction]] = {}
    for i in instructions:
        for operand in dict.fromkeys(i.operands):
            readers.setdefault(operand, []).append(i)

    def bytes_of(parameter: int) -> float:
        """Sum the slices of a parameter and of its views."""
        views, total = [parameter], 0.0
        for view in views:  # the loop appends to the list
            for reader in readers.get(view, ()):
                if reader.opcode == "bitcast":
                    views.append(reader.id)
                elif reader.opcode == "fusion":
                    inner = _read_bytes(module, reader.called[0])
                    total += sum(inner[k] for k, o in enumerate(reader.operands) if o == view)
                elif view in reader.operands[1:] or reader.opcode not in (
                    *_SLICES,
                    "dynamic-update-slice",
                ):
                    return math.inf
                elif reader.opcode in _SLICES:
                    total += shape_bytes(reader.shape)
        return math.inf if module.computations[body].root in views else total

    return {p.number: bytes_of(p.id) for p in instructions if p.opcode == "parameter"}


def _written_bytes(module: Module, result: Instruction) -> int:
    """Return the bytes that a fusion writes for one of its results."""
    while result.opcode in ("bitcast", "fusion") and not result.shape.elements:
        inner = module.root(result.called[0]) if result.called else None
        result = inner or module.instructions[result.operands[0]]
    if result.opcode == "dynamic-update-slice":
        return shape_bytes(module.instructions[result.operands[1]].shape)
    return shape_bytes(result.shape)


def shape_bytes(shape: Shape) -> int:
    """Return the bytes of a type, with all elements of a tuple."""
    if shape.elements:
        return sum(map(shape_bytes, shape.elements))
    return shape.bytes
