"""Simulate how XLA's heap places values, to find the unused gaps between them.

The heap knows all lifetimes in advance. It tries two orders: by decreasing size and by decreasing
lifetime. In each it places one buffer after the other, at the start of the smallest gap that is
free during the buffer's lifetime, or else above all others. It keeps the placement that takes
fewer bytes. Time is counted in events, which are the allocations and frees of values. Values that
take over one another's memory lie in one buffer.
Source: XLA's `heap_simulator.cc` (`GlobalDecreasingSizeBestFitHeap`) and `buffer_assignment.cc`.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

# Buffers start at multiples of this number of bytes.
_ALIGNED = 64
# Buffers below this share of the peak are assumed to fit into gaps.
_SMALL = 1 / 2048


class HeapValue(NamedTuple):
    """A value in a buffer.

    Attributes:
      buffer: number of the buffer.
      born: number of the step that makes it.
      dies: number of the last step that reads it.
      place: when XLA visits the step that makes it; it breaks ties.
    """

    buffer: int
    born: int
    dies: int
    place: int


class _HeapBuffer(NamedTuple):
    """A buffer.

    Attributes:
      bytes: its size.
      starts, ends: the first and the last event of its lifetime.
      first_ends: the last event of its first value.
      place: the `place` of its first value.
    """

    bytes: int
    starts: int
    ends: int
    first_ends: int
    place: int


def heap_bytes(sizes: Sequence[int], values: Sequence[HeapValue], peak: int) -> int:
    """Return the bytes of a heap, including the gaps between its buffers.

    Args:
      sizes: bytes of each buffer.
      values: the values in the buffers, in the order of the steps that make them.
      peak: the most bytes that are live at once.

    Cost: near linear in values, because small buffers are not placed.
    """
    large = [s for s in _buffers(sizes, values) if s.bytes > peak * _SMALL]
    least = _most_live(large)
    by_size = _best_fit_bytes(
        sorted(large, key=lambda s: (-s.bytes, s.starts - s.first_ends, s.place))
    )
    if by_size <= least:
        return peak
    by_lifetime = _best_fit_bytes(
        sorted(large, key=lambda s: (s.starts - s.ends, -s.bytes, s.place))
    )
    return peak + min(by_size, by_lifetime) - least


def _buffers(sizes: Sequence[int], values: Sequence[HeapValue]) -> list[_HeapBuffer]:
    """The buffers of values, with their events."""
    last = dict[int, int]()  # for each buffer, the last of its values
    allocated = [(v.born, 0, v.place, 1, i) for i, v in enumerate(values)]
    freed = [(v.dies, 1, v.place, 0, i) for i, v in enumerate(values)]
    first = dict[int, int]()
    for i, v in enumerate(values):
        if (before := last.get(v.buffer)) is not None:
            # A value whose buffer is taken over is freed just before the next one is allocated.
            freed[before] = v.born, 0, v.place, 0, before
        first.setdefault(v.buffer, i)
        last[v.buffer] = i
    starts, ends = [0] * len(values), [0] * len(values)
    for event, (_, _, _, allocates, i) in enumerate(sorted(itertools.chain(allocated, freed))):
        (starts if allocates else ends)[i] = event
    return [
        _HeapBuffer(sizes[k], starts[i], ends[last[k]], ends[i], values[i].place)
        for k, i in first.items()
    ]


def _most_live(buffers: Sequence[_HeapBuffer]) -> int:
    """The most bytes that are live at once."""
    changes = sorted(c for s in buffers for c in ((s.starts, s.bytes), (s.ends, -s.bytes)))
    return max(itertools.accumulate(n for _, n in changes), default=0)


def _best_fit_bytes(buffers: Iterable[_HeapBuffer]) -> int:
    """The bytes of a heap into which buffers are placed in this order."""
    placed = list[tuple[int, int, int, int]]()  # offset, end, first event, last event; sorted
    top = 0
    for s in buffers:
        starts, ends, size = s.starts, s.ends, s.bytes
        above, at, gap = 0, -1, -1
        for offset, end, a, b in placed:
            if a < ends and starts < b:
                free = offset - above
                if free >= size and (at < 0 or free < gap):
                    at, gap = above, free
                if end > above:
                    above = end
        at = above if at < 0 else at
        end = at - -size // _ALIGNED * _ALIGNED
        bisect.insort(placed, (at, end, starts, ends))
        top = max(top, at + size)
    return top
