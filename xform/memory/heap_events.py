"""The events of XLA's heap: when each buffer takes its place in a block of memory, and leaves it.

XLA lists these events when it assigns memory. A dump of a program has the list. A program that XLA
has compiled to run may have lost it, and then has only the place of each buffer. `derive_events`
finds the events again: from the schedule of the program, and from the operations that read a value.

A value is live from the operation that makes it up to the last one that reads it. A value that is a
result of a computation is live to the end of the computation. An operand of a loop that the loop
overwrites is live up to the start of the loop's body. An event is at the same step as in XLA.
Source: XLA's `hlo_live_range.cc` and `heap_simulator.cc`
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from xform.memory.dataflow import DataFlow, ValueId
from xform.memory.hlo import Index, Module

ALLOC, FREE, SHARE = range(3)


class Event(NamedTuple):
    """An event of a heap.

    Attributes:
      kind: ALLOC, FREE, or SHARE, if a buffer uses the memory of another buffer.
      buffer: the id of the buffer.
      other: for SHARE, the id of the other buffer.
    """

    kind: int
    buffer: int
    other: int = 0


class PlacedBuffer(NamedTuple):
    """A buffer in a block of memory.

    Attributes:
      id: the id of the buffer.
      value: the value that it holds.
      offset, bytes: its place in the block.
      group: the same number for all buffers that must share their memory, such as the states of a
        loop.
    """

    id: int
    value: ValueId
    offset: int
    bytes: int
    group: int

    def overlaps(self, other: PlacedBuffer) -> bool:
        """Return whether two buffers have bytes in common."""
        ends_after = self.offset + self.bytes > other.offset
        return ends_after and other.offset + other.bytes > self.offset


class Lifetimes:
    """The first and the last step in the life of each value of a module.

    Args:
      module: the module, which is scheduled.
      values: all values that have a buffer.
    """

    def __init__(self, module: Module, values: Iterable[ValueId]):
        self._module, self._flow = module, DataFlow(module)
        self._with_buffer = frozenset(values)
        # For each computation, its first step, and the step after its last one.
        self._spans: dict[int, tuple[int, int]] = {}
        for number, step in module.order.items():
            computation = module.instructions[number].computation
            first, end = self._spans.get(computation, (step, step))
            self._spans[computation] = min(first, step), max(end, step + 1)

    def of(self, value: ValueId) -> tuple[int, int]:
        """Return the first and the last step in the life of a value."""
        instruction = self._module.instructions[value[0]]
        is_parameter = instruction.opcode == "parameter"
        first, _ = self._spans[instruction.computation]
        start = first if is_parameter else self._module.order[value[0]]
        places, last = {value: None}, start
        queue = [value]
        for place in queue:
            last = max(last, self._last_read(*place))
            for _, view in self._flow.users_of(*place):
                # A copy has a buffer, and so has the state of a loop that the loop changes.
                if view is not None and view not in self._with_buffer and view not in places:
                    places[view] = None
                    queue.append(view)
        return start, last

    def _last_read(self, number: int, index: Index) -> int:
        """Return the last step that reads a value, as an element of one instruction."""
        computation = self._module.instructions[number].computation
        last = self._module.order[number]
        if self._module.computations[computation].root == number:
            _, last = self._spans[computation]
        for user in self._flow.users.get(number, ()):
            match user.opcode:
                case "tuple" | "call":
                    continue
                case "get-tuple-element" if index:
                    continue
                case "while":
                    step, _ = self._spans[user.called[0]]
                case _:
                    step = self._module.order[user.id]
            last = max(last, step)
        return last


def derive_events(lifetimes: Lifetimes, placed: Sequence[PlacedBuffer]) -> list[Event]:
    """Return the events of the heap that placed some buffers in one block of memory.

    A buffer of a group uses the memory of the first buffer of the group. A buffer of an operation
    in place takes over the memory of an operand: it is made while the operand is live in its place.
    """
    steps = _one_after_another(placed, {b.id: lifetimes.of(b.value) for b in placed})
    in_order = sorted(placed, key=lambda b: (*steps[b.id], b.id))
    ending: dict[int, list[int]] = {}  # the buffers that end at each step
    for b in in_order:
        ending.setdefault(steps[b.id][1], []).append(b.id)
    ends = sorted(ending, reverse=True)
    events: list[Event] = []
    live: dict[int, PlacedBuffer] = {}
    first_of_group: dict[int, int] = {}

    def free(numbers: Iterable[int]) -> None:
        for number in numbers:
            if live.pop(number, None):
                events.append(Event(FREE, number))

    for b in in_order:
        start, _ = steps[b.id]
        while ends and ends[-1] < start:
            free(ending[ends.pop()])
        other = first_of_group.get(b.group)
        if other is None:
            first_of_group[b.group] = b.id
            operands = [operand.id for operand in live.values() if operand.overlaps(b)]
            free(operands)
            other = next(iter(operands), None)
        events.append(Event(ALLOC, b.id) if other is None else Event(SHARE, b.id, other))
        live[b.id] = b
    for end in reversed(ends):
        free(ending[end])
    return events


def _one_after_another(
    placed: Sequence[PlacedBuffer], steps: Mapping[int, tuple[int, int]]
) -> dict[int, tuple[int, int]]:
    """Return the steps of all buffers, so that those of a group are live one after another."""
    groups: dict[int, list[int]] = {}
    for b in placed:
        groups.setdefault(b.group, []).append(b.id)
    result = dict(steps)
    for ids in groups.values():
        ids.sort(key=lambda number: (*steps[number], number))
        for this, following in pairwise(ids):
            (start, end), (next_start, next_end) = result[this], result[following]
            result[this] = start, min(end, next_start)
            result[following] = next_start, max(end, next_end)
    return result
