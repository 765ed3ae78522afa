"""Orders in which operations run that take little memory, as XLA looks for one.

Three are tried, and that with the lowest peak is taken: one by one what frees most; from the
results backwards, first what makes most on the way; and likewise in the order of the operands.
Source: XLA's `hlo_memory_scheduler.cc`.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Mapping, Sequence

from xform.planner.simulate.fusion import Group
from xform.planner.simulate.steps import Cell


def least_memory(groups: Sequence[Group], base: Mapping[Cell, Cell], outputs: Sequence[Cell],
                 inside: Callable[[Group], int]) -> list[Group]:  # fmt: skip
    """The groups of a program, those that are views included, in the order in which they run.

    `base` is the value that a view is of; `inside` are bytes that a group needs while it runs.
    """
    work = _Orders(groups, base, outputs, inside)
    orders = (work.by_freed(), work.backwards(weighed=True), work.backwards(weighed=False))
    return [groups[i] for i in min(orders, key=work.peak)]


class _Orders:
    """Groups by number: what each reads and makes, in values by number, and the bytes of those."""

    def __init__(self, groups: Sequence[Group], base: Mapping[Cell, Cell],
                 outputs: Sequence[Cell], inside: Callable[[Group], int]):  # fmt: skip
        self.n = len(groups)
        maker = {c: i for i, g in enumerate(groups) for c in g.root.makes}
        self.operands = [list(dict.fromkeys(maker[c] for c in g.reads if c in maker))
                         for g in groups]  # fmt: skip
        values = [[c for c in g.root.makes if c not in base] for g in groups]
        number = {c: k for k, c in enumerate(c for cells in values for c in cells)}
        self.sizes = [c.bytes for c in number]
        self.values = [[number[c] for c in cells] for cells in values]
        self.used = [list({number[b]: None for c in g.reads if (b := base.get(c, c)) in number})
                     for g in groups]  # fmt: skip
        self.roots = list(dict.fromkeys(maker[c] for c in outputs if c in maker))
        self.stay = {number[b] for c in outputs if (b := base.get(c, c)) in number}
        self.inside = [inside(g) for g in groups]
        self.users: list[list[int]] = [[] for _ in groups]
        for i, operands in enumerate(self.operands):
            for j in operands:
                self.users[j].append(i)
        self.roots += [i for i in range(self.n) if not self.users[i]]

    def peak(self, order: Sequence[int]) -> int:
        """The most bytes that are live in an order."""
        last = {k: i for i in order for k in self.used[i]}
        live = most = 0
        for i in order:
            live += sum(self.sizes[k] for k in self.values[i])
            most = max(most, live + self.inside[i])
            ended = (k for k in (*self.used[i], *self.values[i]) if last.get(k, i) == i)
            live -= sum(self.sizes[k] for k in ended if k not in self.stay)
        return most

    def by_freed(self) -> list[int]:
        """Of what could run, each time what frees most, beyond what it makes; the newest first."""
        left = [0] * len(self.sizes)
        for k in itertools.chain(self.stay, *self.used):
            left[k] += 1
        missing = [len(operands) for operands in self.operands]
        sizes = [sum(self.sizes[k] for k in self.values[i]) + self.inside[i] for i in range(self.n)]
        readers: list[list[int]] = [[] for _ in self.sizes]
        for i, used in enumerate(self.used):
            for k in used:
                readers[k].append(i)
        newest = itertools.count(0, -1)
        queue: list[tuple[int, int, int, int]] = []
        now: dict[int, tuple[int, int, int, int]] = {}

        def ready(i: int) -> None:
            freed = sum(self.sizes[k] for k in self.used[i] if left[k] == 1)
            now[i] = sizes[i] - freed, -len(self.users[i]), next(newest), i
            heapq.heappush(queue, now[i])

        for i in range(self.n):
            if not missing[i]:
                ready(i)
        order: list[int] = []
        while queue:
            entry = heapq.heappop(queue)
            i = entry[-1]
            if now.get(i) != entry:
                continue
            del now[i]
            order.append(i)
            for user in self.users[i]:
                missing[user] -= 1
            for k in self.used[i]:
                left[k] -= 1
            for user in self.users[i]:
                if not missing[user]:
                    ready(user)
            for k in self.used[i]:
                if left[k] == 1:
                    for j in readers[k]:
                        if j in now:
                            ready(j)
        return order

    def backwards(self, weighed: bool) -> list[int]:
        """From the results, operands first: those with most behind them, or in their order."""
        rank = self._weights() if weighed else None
        done = dict[int, None]()
        todo = self.roots[::-1] if rank is None else sorted(self.roots, key=rank.__getitem__)
        while todo:
            i = todo[-1]
            late = [j for j in self.operands[i] if j not in done]
            if i in done or not late:
                done[todo.pop()] = None
                continue
            todo += late[::-1] if rank is None else sorted(late, key=rank.__getitem__)
        return list(done)

    def _weights(self) -> list[tuple[int, int]]:
        """Of each group, how many readers more than one are behind it, and how many bytes."""
        weights: list[tuple[int, int]] = [(0, 0)] * self.n
        total = 0
        for i in self.backwards(weighed=False):
            size = sum(self.sizes[k] for k in self.values[i])
            total += size
            extra = max(0, len(self.users[i]) - 1)
            for j in self.operands[i]:
                extra += weights[j][0]
                size += weights[j][1]
            weights[i] = min(extra, self.n), min(size, total)
        return weights
