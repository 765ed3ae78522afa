"""Read where a compiled program keeps its values in memory, from XLA's buffer assignment.

XLA assigns memory to every value before the program runs. An *allocation* is a block of memory.
Each argument, output and constant has its own, and all temporary values share one in each memory
space. A *buffer* is the memory of one value. A *chunk* is a part of a block, and XLA finds its
offset by simulating a heap. Several buffers may use one chunk, in turn or at once.

The dump of a program holds the events of that heap in program order. They are ALLOC and FREE of a
buffer, and SHARE_WITH, if a buffer uses the chunk of another buffer (for an operation in place, or
the state of a loop). A chunk is free when all buffers in it are. Replaying the events gives the
live bytes at each step, their peak, and the buffers at the peak. A program that was compiled to run
has lost the events, and `heap_events.py` finds them again.
Source: https://github.com/openxla/xla/blob/main/xla/service/hlo.proto
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path

from xform.errors import WrongArgument
from xform.memory.heap_events import (
    FREE,
    SHARE,
    Event,
    Lifetimes,
    PlacedBuffer,
    derive_events,
)
from xform.memory.hlo import Index, Module
from xform.memory.proto import Corrupt, Message

# Memory spaces ("colors"): 0 is the device's main memory (HBM), 5 is host memory; others are on
# the chip.
DEVICE, HOST = 0, 5
# The memories on the chip that hold arrays: a TPU's vector memory, and the larger one of a TPU v4.
ON_CHIP = {1: "VMEM", 3: "CMEM"}
# Kinds of allocations that the total counts.
COUNTED = ("argument", "output", "temp")


@dataclasses.dataclass(frozen=True)
class Buffer:
    """The bytes of one value, or of one element of a tuple.

    Attributes:
      id: unique in the program.
      instruction, index: the value that it holds: the id of an instruction, and the index in its
        tuple. Views of that value have no buffer.
      bytes: size, with the padding of the layout.
    """

    id: int
    instruction: int
    index: Index
    bytes: int


@dataclasses.dataclass(frozen=True)
class Allocation:
    """A block of memory, allocated before the program runs.

    Attributes:
      index: its number.
      bytes: its size.
      kind: `argument`, `output`, `constant`, `temp`, or `local` (to a thread, and not counted).
      parameter: for an argument, its parameter number and the index in that parameter.
      out: whether it holds an output; such an argument is donated and its memory reused.
      space: its memory space, such as `DEVICE`.
      buffers: the offset of each buffer in it, by the buffer's id.
    """

    index: int
    bytes: int
    kind: str
    parameter: tuple[int, Index] | None
    out: bool
    space: int
    buffers: dict[int, int]


@dataclasses.dataclass(frozen=True)
class MemoryChunk:
    """A part of an allocation that is in use from one step to another.

    Attributes:
      allocation: the allocation.
      bytes: its size.
      buffers: the buffers that it holds, in turn or at once, each with its first step.
      born, dies: the first and the last step at which it is in use.
    """

    allocation: Allocation
    bytes: int
    buffers: tuple[tuple[Buffer, int], ...]
    born: int
    dies: int


@dataclasses.dataclass(frozen=True)
class Assignment:
    """A compiled program and its memory. The properties count bytes in one device's main memory.

    Attributes:
      module: the program.
      allocations: every block of memory.
      chunks: every chunk in them. An argument or output is one chunk.
    """

    module: Module
    allocations: tuple[Allocation, ...]
    chunks: tuple[MemoryChunk, ...]

    @property
    def argument_bytes(self) -> int:
        """Bytes of the arguments, including donated ones."""
        return self._bytes("argument")

    @property
    def alias_bytes(self) -> int:
        """Bytes of the outputs that are stored in donated arguments."""
        return sum(a.bytes for a in self._in_main_memory("argument") if a.out)

    @property
    def output_bytes(self) -> int:
        """Bytes of the outputs, including the ones in donated arguments."""
        return self._bytes("output") + self.alias_bytes

    @property
    def temp_bytes(self) -> int:
        """Bytes of the blocks for temporary values, which the compiler calls temp."""
        return self._bytes("temp")

    @property
    def constant_bytes(self) -> int:
        """Bytes of constant arrays in the program, which the total does not count."""
        return self._bytes("constant")

    @property
    def total_bytes(self) -> int:
        """Argument + output + temp - alias: the memory that the program takes."""
        return self.argument_bytes + self.output_bytes + self.temp_bytes - self.alias_bytes

    @property
    def fragmentation_bytes(self) -> int:
        """Bytes of the temp blocks that no buffer uses at the peak: gaps and alignment."""
        return self.total_bytes - self.live[self.peak_step]

    @cached_property
    def live(self) -> list[int]:
        """Bytes in use at each step, arguments and outputs included."""
        change = [0] * (len(self.module.order) + 2)
        for chunk in self.chunks:
            if chunk.allocation.space == DEVICE and chunk.allocation.kind in COUNTED:
                change[chunk.born] += chunk.bytes
                change[chunk.dies + 1] -= chunk.bytes
        return list(accumulate(change))[:-2] or [0]

    @cached_property
    def peak_step(self) -> int:
        """The first step at which the most bytes are live."""
        return self.live.index(max(self.live))

    def _bytes(self, kind: str) -> int:
        """Return the bytes of all allocations of a kind in main memory."""
        return sum(a.bytes for a in self._in_main_memory(kind))

    def _in_main_memory(self, kind: str) -> Iterable[Allocation]:
        """Return the allocations of a kind in the device's main memory."""
        return (a for a in self.allocations if a.kind == kind and a.space == DEVICE)


def read(source: str | Path | bytes) -> Assignment:
    """Read the memory of a compiled program from an HloProto, XLA's dump of it.

    Args:
      source: the path of a dump (`*after_optimizations.hlo.pb`, written with XLA's
        `xla_dump_to` and `xla_dump_hlo_as_proto`), or its bytes.

    Raises:
      WrongArgument: it is not an HloProto, is truncated, or has no buffer assignment.

    Cost: plain Python; a few seconds for 10 MB. The last few results are cached.
    """
    name = "an HloProto" if isinstance(source, bytes) else str(source)
    data = source if isinstance(source, bytes) else Path(source).read_bytes()
    try:
        return _read(data)
    except (Corrupt, LookupError) as error:
        problem = f"its {len(data)} bytes are not a complete HloProto: {error}"
        if not isinstance(error, Corrupt):
            problem = f"its {len(data)} bytes are not a complete HloProto: they refer to an entry"
            problem += f" that is missing ({error!r})"
        raise WrongArgument(
            f"memory of a compiled program, read from {name}", problem, "",
            "dump it again with compiler_options={'xla_dump_to': folder, "
            "'xla_dump_hlo_as_proto': True}, and read *after_optimizations.hlo.pb",
        ) from error  # fmt: skip


@functools.lru_cache(maxsize=4)
def _read(data: bytes) -> Assignment:
    """Return the memory of a compiled program from the bytes of an HloProto."""
    proto = Message(data)
    module, assignment = Module(proto.message(1)), proto.message(3)
    has_module = module.entry in module.computations  # an id may be 0
    if not has_module or 3 not in assignment:
        raise Corrupt("it holds no buffer assignment" if has_module else "it holds no HLO module")
    return _assignment(module, assignment)


def _assignment(module: Module, data: Message) -> Assignment:
    """Return the memory of a module from a BufferAssignmentProto."""
    buffers: dict[int, Buffer] = {}
    for m in data.messages(1):
        number, position = m.number(1), m.message(3)
        index = tuple(position.numbers(3))
        buffers[number] = Buffer(number, position.number(4), index, m.number(2))
    allocations = tuple(map(_allocation, data.messages(3)))
    allocation_of = {b: a for a in allocations for b in a.buffers}
    heaps = [
        [Event(e.number(1), e.number(2), e.number(5)) for e in m.messages(1)]
        for m in data.messages(4)
    ]
    in_heaps = {event.buffer for heap in heaps for event in heap}
    # libtpu has an allocation without buffers for an unused memory: skip it.
    rest = [
        a for a in allocations if a.buffers and in_heaps.isdisjoint(a.buffers) and a.kind != "local"
    ]
    if temporary := [a for a in rest if a.kind == "temp"]:
        lifetimes = Lifetimes(module, ((b.instruction, b.index) for b in buffers.values()))
        groups = _groups(data, buffers)
        heaps += [derive_events(lifetimes, _placed(module, a, buffers, groups)) for a in temporary]
    chunks = [chunk for heap in heaps for chunk in _replay(module, buffers, allocation_of, heap)]
    last_step = len(module.order) - 1
    for a in rest:
        if a.kind != "temp":
            steps = [(buffers[i], module.order.get(buffers[i].instruction, 0)) for i in a.buffers]
            chunks.append(MemoryChunk(a, a.bytes, tuple(steps), 0, last_step))
    return Assignment(module, allocations, tuple(chunks))


def _groups(data: Message, buffers: dict[int, Buffer]) -> dict[int, int]:
    """Return a number for each buffer: the least id of the buffers that must share its memory.

    The assignment lists, for each buffer, the values of all such buffers.
    """
    ids = {(b.instruction, b.index): b.id for b in buffers.values()}
    groups = {i: i for i in buffers}
    for m in data.messages(2):
        buffer, place = m.number(1), m.message(2)
        other = ids[place.number(4), tuple(place.numbers(3))]
        groups[buffer] = min(groups[buffer], other)
    return groups


def _placed(
    module: Module, a: Allocation, buffers: dict[int, Buffer], groups: dict[int, int]
) -> list[PlacedBuffer]:
    """Return the buffers of an allocation, with their places. XLA's heap has no tuples."""
    placed: list[PlacedBuffer] = []
    for number, offset in a.buffers.items():
        b = buffers[number]
        if module.instructions[b.instruction].shape.at(b.index).dtype != "tuple":
            value = b.instruction, b.index
            placed.append(PlacedBuffer(number, value, offset, b.bytes, groups[number]))
    return placed


def _allocation(m: Message) -> Allocation:
    """Return an allocation from a BufferAllocationProto."""
    out, parameter = bool(m.number(7)), None
    if m.number(5):
        kind, parameter = "argument", (m.number(6), tuple(m.numbers(10)))
    else:
        kind = "constant" if m.number(12) else "local" if m.number(3) else "temp"
    if kind == "temp" and out:
        kind = "output"
    assigned = {a.number(1): a.number(2) for a in m.messages(9)}
    return Allocation(m.number(1), m.number(2), kind, parameter, out, m.number(8), assigned)


def _replay(
    module: Module,
    buffers: dict[int, Buffer],
    allocation_of: dict[int, Allocation],
    events: Iterable[Event],
) -> Sequence[MemoryChunk]:
    """Replay the events of one heap and return its chunks.

    An event does not tell its step. It names the instruction that makes the buffer, even if it
    frees the buffer. So a freed buffer counts as live up to the step of the last ALLOC or
    SHARE_WITH before the FREE. An operation with several results may free an operand and then share
    its chunk with a later result. The chunk is then still in use.

    A chunk is identified by its first buffer.
    """
    finished: dict[int, list[MemoryChunk]] = {}
    first_of: dict[int, int] = {}  # for each buffer, the first buffer of its chunk
    members: dict[int, list[tuple[Buffer, int]]] = {}  # the buffers of a chunk in use
    n_in_use: dict[int, int] = {}  # how many of these buffers are not freed
    step = 0

    def free(first: int) -> None:
        """Add a chunk whose buffers are all freed to the finished ones."""
        inside = members.pop(first)
        size = max(b.bytes for b, _ in inside)
        chunk = MemoryChunk(allocation_of[first], size, tuple(inside), inside[0][1], step)
        finished.setdefault(first, []).append(chunk)
        del n_in_use[first]

    for kind, number, other in events:
        buffer = buffers[number]
        if kind == FREE:
            first = first_of[number]
            n_in_use[first] -= 1
            if not n_in_use[first]:
                free(first)
            continue
        step = max(step, module.order[buffer.instruction])
        first = number
        if kind == SHARE:
            first = first_of.get(other, other)
            if first not in members and first in finished and finished[first][-1].dies == step:
                members[first] = list(finished[first].pop().buffers)
        first_of[number] = first
        n_in_use[first] = n_in_use.get(first, 0) + 1
        members.setdefault(first, []).append((buffer, step))
    step = len(module.order) - 1
    for first in tuple(members):
        free(first)
    return [chunk for chunks in finished.values() for chunk in chunks]
