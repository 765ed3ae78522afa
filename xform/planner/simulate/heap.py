"""Simulate how XLA places temporary buffers in its heap, to find the unused gaps between them.

A heap with gaps is larger than the peak of the live bytes. XLA knows the lifetime of each buffer in
advance. It tries two orders: by decreasing size and by decreasing lifetime. In each order it places
one buffer after the other. A buffer goes to the start of the smallest gap that is large enough and
unused during its lifetime. If there is no such gap, it goes above all other buffers. XLA keeps the
placement that takes fewer bytes.

A buffer can hold several values one after the other, such as the states of a loop. The operations
of the program are called steps (`steps.py`). Time is counted in events: each allocation of a value
is an event, and so is each free.
Source: XLA's `heap_simulator.cc` (`GlobalDecreasingSizeBestFitHeap`) and `buffer_assignment.cc`.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

# Buffers start at multiples of this number of bytes.
_ALIGNMENT = 64
# Buffers of less than this share of the peak are not placed. They are assumed to fit into gaps.
_SMALL_SHARE = 1 / 2048


class HeapValue(NamedTuple):
    """A value in a buffer.

    Attributes:
      buffer: number of the buffer.
      born: number of the step that computes it.
      dies: number of the last step that reads it.
      visit_index: position of step `born` in XLA's order of visiting operations. XLA breaks ties
        by this position.
    """

    buffer: int
    born: int
    dies: int
    visit_index: int


class _HeapBuffer(NamedTuple):
    """A buffer and its lifetime.

    Attributes:
      bytes: its size.
      start, end: number of the first and of the last event of its lifetime.
      first_value_end: number of the event that frees its first value.
      visit_index: the `visit_index` of its first value.
    """

    bytes: int
    start: int
    end: int
    first_value_end: int
    visit_index: int


def heap_bytes(sizes: Sequence[int], values: Sequence[HeapValue], peak: int) -> int:
    """Return the bytes of the heap that holds these buffers, including the gaps between them.

    Args:
      sizes: bytes of each buffer.
      values: the values in the buffers, in the order of the steps that compute them.
      peak: the most bytes that are live at once.

    Cost: near linear in the number of values, because small buffers are not placed.
    """
    large = [b for b in _find_buffers(sizes, values) if b.bytes > peak * _SMALL_SHARE]
    bytes_without_gaps = _most_live_bytes(large)
    by_size = sorted(large, key=lambda b: (-b.bytes, b.start - b.first_value_end, b.visit_index))
    bytes_by_size = _best_fit_bytes(by_size)
    if bytes_by_size <= bytes_without_gaps:
        return peak
    by_lifetime = sorted(large, key=lambda b: (b.start - b.end, -b.bytes, b.visit_index))
    return peak + min(bytes_by_size, _best_fit_bytes(by_lifetime)) - bytes_without_gaps


def _find_buffers(sizes: Sequence[int], values: Sequence[HeapValue]) -> list[_HeapBuffer]:
    """Number the events in order of time, and return each buffer with its lifetime in events."""
    # For each buffer, the index of its first and of its last value.
    first, last = dict[int, int](), dict[int, int]()
    # Each event is a tuple, and the tuples sort by time: step, 0 at its start or 1 at its end,
    # visit index, 0 for a free or 1 for an allocation, number of the value.
    allocations = [(v.born, 0, v.visit_index, 1, i) for i, v in enumerate(values)]
    frees = [(v.dies, 1, v.visit_index, 0, i) for i, v in enumerate(values)]
    for i, v in enumerate(values):
        if (previous := last.get(v.buffer)) is not None:
            # The previous value of a buffer is freed just before the next one is allocated.
            frees[previous] = v.born, 0, v.visit_index, 0, previous
        first.setdefault(v.buffer, i)
        last[v.buffer] = i
    starts, ends = [0] * len(values), [0] * len(values)
    for event, (_, _, _, allocates, i) in enumerate(sorted(itertools.chain(allocations, frees))):
        (starts if allocates else ends)[i] = event
    return [
        _HeapBuffer(sizes[k], starts[i], ends[last[k]], ends[i], values[i].visit_index)
        for k, i in first.items()
    ]


def _most_live_bytes(buffers: Sequence[_HeapBuffer]) -> int:
    """Return the most bytes that are live at once: the size of a heap without gaps."""
    changes = sorted(c for b in buffers for c in ((b.start, b.bytes), (b.end, -b.bytes)))
    return max(itertools.accumulate(n for _, n in changes), default=0)


def _best_fit_bytes(buffers: Iterable[_HeapBuffer]) -> int:
    """Place buffers in this order, each in the smallest gap; return the bytes of the heap."""
    # For each placed buffer: offset, end of its memory, first event, last event. Sorted by offset.
    placed = list[tuple[int, int, int, int]]()
    top = 0
    for buffer in buffers:
        start, end, size = buffer.start, buffer.end, buffer.bytes
        # `used_to`: where the memory ends that buffers at lower offsets use during this lifetime.
        used_to, best_offset, best_gap = 0, -1, -1
        for other_offset, other_memory_end, other_start, other_end in placed:
            if other_start < end and start < other_end:
                gap = other_offset - used_to
                if gap >= size and (best_offset < 0 or gap < best_gap):
                    best_offset, best_gap = used_to, gap
                if other_memory_end > used_to:
                    used_to = other_memory_end
        offset = used_to if best_offset < 0 else best_offset
        aligned_size = -(-size // _ALIGNMENT) * _ALIGNMENT
        bisect.insort(placed, (offset, offset + aligned_size, start, end))
        top = max(top, offset + size)
    return top
