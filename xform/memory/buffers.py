"""The buffer assignment of a compiled program, and its heap, replayed.

XLA lays every value out before anything runs. Arguments, outputs and constants have an allocation
each; what lives in between shares one block for each memory, in which a simulated heap gave each
*storage* an offset. The dump holds that heap's events in program order: ALLOC and FREE of a
buffer, and SHARE_WITH, by which a buffer takes the place of another (an operation in place, the
state of a loop). A storage is free when all that share it are. Adding up gives the live bytes at
each step, their peak, and who is there.
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
from xform.memory.hlo import Index, Module
from xform.memory.proto import Corrupt, Message

# Memory spaces ("colors"): 0 is the device's main memory (HBM), 5 the host's; others are on chip.
DEVICE, HOST = 0, 5
# Those on the chip that hold arrays: the vector memory of a TPU, and the larger one of a v4.
ON_CHIP = {1: "VMEM", 3: "CMEM"}
# Kinds of allocations that the headline counts.
COUNTED = ("argument", "output", "temp")
_ALLOC, _FREE, _SHARE = range(3)


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A logical buffer: the bytes of one value, or of one element of a tuple.

    Attributes:
      instruction, index: the value that it is made for; views of it have no buffer.
      bytes: with what the layout pads.
    """

    id: int
    instruction: int
    index: Index
    bytes: int


@dataclasses.dataclass(frozen=True)
class Allocation:
    """A block of memory, given before the program runs.

    Attributes:
      kind: `argument`, `output`, `constant`, `temp`, or `local` to a thread and not counted.
      parameter: of an argument, its parameter number and index in that.
      out: an output lies in it: an argument with that is donated and used.
      space: the memory that it is in.
      buffers: the offset of each buffer in it, by id.
    """

    index: int
    bytes: int
    kind: str
    parameter: tuple[int, Index] | None
    out: bool
    space: int
    buffers: dict[int, int]


@dataclasses.dataclass(frozen=True)
class Storage:
    """A place in an allocation from the step at which it is taken to the last that needs it.

    Attributes:
      buffers: the buffers that lie in it, one after the other or at once, and the step of each.
      born, dies: the first and the last step at which it is taken.
    """

    allocation: Allocation
    bytes: int
    buffers: tuple[tuple[Buffer, int], ...]
    born: int
    dies: int


@dataclasses.dataclass(frozen=True)
class Assignment:
    """A module with its memory; bytes are of the device's main memory, and of one device.

    Attributes:
      module: the program.
      allocations: every block.
      storages: every place in them that takes bytes, those of arguments and outputs included.
    """

    module: Module
    allocations: tuple[Allocation, ...]
    storages: tuple[Storage, ...]

    @property
    def argument_bytes(self) -> int:
        """Of the arguments, donated ones included."""
        return self._bytes("argument")

    @property
    def alias_bytes(self) -> int:
        """Of outputs that lie in donated arguments."""
        return sum(a.bytes for a in self._device("argument") if a.out)

    @property
    def output_bytes(self) -> int:
        """Of the outputs, those in donated arguments included."""
        return self._bytes("output") + self.alias_bytes

    @property
    def temp_bytes(self) -> int:
        """Of the blocks for all that lives in between: what the compiler calls temp."""
        return self._bytes("temp")

    @property
    def constant_bytes(self) -> int:
        """Of arrays that are part of the program, which the headline does not count."""
        return self._bytes("constant")

    @property
    def total_bytes(self) -> int:
        """The headline: argument + output + temp - alias."""
        return self.argument_bytes + self.output_bytes + self.temp_bytes - self.alias_bytes

    @property
    def fragmentation_bytes(self) -> int:
        """Of the temp blocks, what no buffer takes at the peak: gaps, and alignment."""
        return self.total_bytes - self.live[self.peak_step]

    @cached_property
    def live(self) -> list[int]:
        """Bytes in use at each step, arguments and outputs included."""
        change = [0] * (len(self.module.order) + 2)
        for s in self.storages:
            if s.allocation.space == DEVICE and s.allocation.kind in COUNTED:
                change[s.born] += s.bytes
                change[s.dies + 1] -= s.bytes
        return list(accumulate(change))[:-2] or [0]

    @cached_property
    def peak_step(self) -> int:
        """The first step at which the most bytes are live."""
        return self.live.index(max(self.live))

    def _bytes(self, kind: str) -> int:
        return sum(a.bytes for a in self._device(kind))

    def _device(self, kind: str) -> Iterable[Allocation]:
        return (a for a in self.allocations if a.kind == kind and a.space == DEVICE)


def read(source: str | Path | bytes) -> Assignment:
    """The memory of a compiled program, from an HloProto.

    Args:
      source: the path of a dump (`*after_optimizations.hlo.pb`, written with XLA's
        `xla_dump_to` and `xla_dump_hlo_as_proto`), or its bytes.

    Raises:
      WrongArgument: it is not an HloProto, is cut short, or holds no buffer assignment.

    Cost: plain Python; a few seconds for 10 MB. The last few are remembered.
    """
    name = "an HloProto" if isinstance(source, bytes) else str(source)
    data = source if isinstance(source, bytes) else Path(source).read_bytes()
    try:
        return _read(data)
    except (Corrupt, LookupError) as error:
        blocked = f"{len(data)} bytes: {error}"
        if not isinstance(error, Corrupt):
            blocked = f"{len(data)} bytes that name what is not there ({error!r}): not a whole dump"
        raise WrongArgument(
            f"memory of a compiled program, read from {name}", blocked, "",
            "dump it again with compiler_options={'xla_dump_to': folder, "
            "'xla_dump_hlo_as_proto': True}, and read *after_optimizations.hlo.pb",
        ) from error  # fmt: skip


@functools.lru_cache(maxsize=4)
def _read(data: bytes) -> Assignment:
    proto = Message(data)
    module, assignment = Module(proto.message(1)), proto.message(3)
    whole = module.entry in module.computations  # an id may be 0
    if not whole or 3 not in assignment:
        raise Corrupt("it holds no buffer assignment" if whole else "it holds no HLO module")
    return _assignment(module, assignment)


def _assignment(module: Module, data: Message) -> Assignment:
    buffers: dict[int, Buffer] = {}
    for m in data.messages(1):
        number, at = m.number(1), m.message(3)
        buffers[number] = Buffer(number, at.number(4), tuple(at.numbers(3)), m.number(2))
    allocations = tuple(map(_allocation, data.messages(3)))
    home = {b: a for a in allocations for b in a.buffers}
    traces = [_replay(module, buffers, home, m.messages(1)) for m in data.messages(4)]
    storages = [s for trace in traces for s in trace]
    traced = {b.id for s in storages for b, _ in s.buffers}
    end = len(module.order) - 1
    for a in allocations:
        # One that no buffer lies in, as libtpu has for a memory that is not used, is no storage.
        if a.buffers and traced.isdisjoint(a.buffers) and a.kind != "local":
            for size, mine in _places(a, buffers):
                steps = [(b, module.order.get(b.instruction, 0)) for b in mine]
                storages.append(Storage(a, size, tuple(steps), 0, end))
    return Assignment(module, allocations, tuple(storages))


def _places(a: Allocation, buffers: dict[int, Buffer]) -> list[tuple[int, list[Buffer]]]:
    """The places of an allocation without a heap, each with what pads it up to the next."""
    if a.kind != "temp":
        return [(a.bytes, [buffers[b] for b in a.buffers])]
    starts: list[int] = []
    groups: list[list[Buffer]] = []
    end = 0
    for number, offset in sorted(a.buffers.items(), key=lambda item: item[1]):
        if not groups or offset >= end:
            starts.append(offset if groups else 0)
            groups.append([])
        groups[-1].append(buffers[number])
        end = max(end, offset + buffers[number].bytes)
    ends = [*starts[1:], a.bytes]
    return [(e - s, mine) for s, e, mine in zip(starts, ends, groups, strict=True)]


def _allocation(m: Message) -> Allocation:
    out, parameter = bool(m.number(7)), None
    if m.number(5):
        kind, parameter = "argument", (m.number(6), tuple(m.numbers(10)))
    else:
        kind = "constant" if m.number(12) else "local" if m.number(3) else "temp"
    if kind == "temp" and out:
        kind = "output"
    assigned = {a.number(1): a.number(2) for a in m.messages(9)}
    return Allocation(m.number(1), m.number(2), kind, parameter, out, m.number(8), assigned)


def _replay(module: Module, buffers: dict[int, Buffer], home: dict[int, Allocation],
            events: Iterable[Message]) -> Sequence[Storage]:  # fmt: skip
    """The storages of one heap.

    An event of a value names the instruction that makes it, also when it frees it: what is freed
    lives until the step of the last event before that makes something. Where an operation has more
    results, and one takes the place of what is read and was freed meanwhile, that storage goes on.
    """
    by_first: dict[int, list[Storage]] = {}
    canonical: dict[int, int] = {}
    members: dict[int, list[tuple[Buffer, int]]] = {}
    users: dict[int, int] = {}
    now = 0

    def free(first: int) -> None:
        mine = members.pop(first)
        size = max(b.bytes for b, _ in mine)
        storage = Storage(home[first], size, tuple(mine), mine[0][1], now)
        by_first.setdefault(first, []).append(storage)
        del users[first]

    for event in events:
        kind, number = event.number(1), event.number(2)
        buffer = buffers[number]
        if kind == _FREE:
            first = canonical[number]
            users[first] -= 1
            if not users[first]:
                free(first)
            continue
        now = max(now, module.order[buffer.instruction])
        first = number
        if kind == _SHARE:
            other = event.number(5)
            first = canonical.get(other, other)
            if first not in members and first in by_first and by_first[first][-1].dies == now:
                members[first] = list(by_first[first].pop().buffers)
        canonical[number] = first
        users[first] = users.get(first, 0) + 1
        members.setdefault(first, []).append((buffer, now))
    now = len(module.order) - 1
    for first in tuple(members):
        free(first)
    return [s for storages in by_first.values() for s in storages]
