"""Where XLA's heap puts values, and so what lies unused between them.

The heap knows all lifetimes before it places anything. It goes through the storages twice, once by
falling size and once by falling lifetime, puts each at the start of the smallest gap that is free
for as long as it is taken, or else above all others, and keeps the placement that takes less. Time
is counted in events: each value that is made or freed is one. Values of which one takes the place
of another lie in one storage.
Source: XLA's `heap_simulator.cc` (`GlobalDecreasingSizeBestFitHeap`) and `buffer_assignment.cc`.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

# Storages start at multiples of this.
_ALIGNED = 64
# Those of less than this part of the peak find a gap.
_LEAST = 1 / 2048


class Value(NamedTuple):
    """A value in a storage: the steps that make it and that read it last, when XLA came to it."""

    storage: int
    born: int
    dies: int
    place: int


class _Storage(NamedTuple):
    """Bytes, and the events from which to which they are taken; the end and place of the first."""

    bytes: int
    starts: int
    ends: int
    first_ends: int
    place: int


def heap_bytes(sizes: Sequence[int], values: Sequence[Value], peak: int) -> int:
    """The bytes of a heap in which `peak` bytes are live at once.

    Args:
      sizes: bytes of each storage.
      values: what lies in the storages, by the steps that make them.
      peak: the most bytes that are live at once.

    Near linear in values: what is small is only counted.
    """
    large = [s for s in _storages(sizes, values) if s.bytes > peak * _LEAST]
    least = _most_live(large)
    by_size = _placed(sorted(large, key=lambda s: (-s.bytes, s.starts - s.first_ends, s.place)))
    if by_size <= least:
        return peak
    by_lifetime = _placed(sorted(large, key=lambda s: (s.starts - s.ends, -s.bytes, s.place)))
    return peak + min(by_size, by_lifetime) - least


def _storages(sizes: Sequence[int], values: Sequence[Value]) -> list[_Storage]:
    """The storages that values lie in, with their events."""
    last = dict[int, int]()  # of each storage, the last of its values
    made = [(v.born, 0, v.place, 1, i) for i, v in enumerate(values)]
    freed = [(v.dies, 1, v.place, 0, i) for i, v in enumerate(values)]
    first = dict[int, int]()
    for i, v in enumerate(values):
        if (before := last.get(v.storage)) is not None:
            # What another takes the place of is freed just before that is made.
            freed[before] = v.born, 0, v.place, 0, before
        first.setdefault(v.storage, i)
        last[v.storage] = i
    starts, ends = [0] * len(values), [0] * len(values)
    for at, (_, _, _, making, i) in enumerate(sorted(itertools.chain(made, freed))):
        (starts if making else ends)[i] = at
    return [
        _Storage(sizes[k], starts[i], ends[last[k]], ends[i], values[i].place)
        for k, i in first.items()
    ]


def _most_live(storages: Sequence[_Storage]) -> int:
    """The most bytes that are live at once."""
    changes = sorted(c for s in storages for c in ((s.starts, s.bytes), (s.ends, -s.bytes)))
    return max(itertools.accumulate(n for _, n in changes), default=0)


def _placed(storages: Iterable[_Storage]) -> int:
    """The bytes that storages take that are placed one after the other."""
    placed = list[tuple[int, int, int, int]]()  # offset, end, from when, to when: by offset
    top = 0
    for s in storages:
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
