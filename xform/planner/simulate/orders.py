"""Find an execution order of low peak memory, as XLA does.

Three orders are tried, and the one with the lowest peak is used:

- a list schedule that always runs the operation that frees the most bytes;
- depth first from the results, with the operand first that has the most extra readers behind it,
  and among equals the most bytes;
- depth first from the results, in the order of the operands.

Source: XLA's `hlo_memory_scheduler.cc`.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Mapping, Sequence

from xform.planner.simulate.fusion import FusionGroup
from xform.planner.simulate.steps import FlatValue


def least_memory_order(
    groups: Sequence[FusionGroup],
    base: Mapping[FlatValue, FlatValue],
    outputs: Sequence[FlatValue],
    inside: Callable[[FusionGroup], int],
) -> list[FusionGroup]:
    """Return the groups of a program, views included, in the best of the three orders.

    Args:
      groups: the groups in program order.
      base: for each value that is a view, the value that it is a view of.
      outputs: the outputs of the program, which stay in memory.
      inside: the bytes that a group needs while it runs, beside operands and results.
    """
    work = _Orders(groups, base, outputs, inside)
    orders = (work.by_freed(), work.backwards(weighed=True), work.backwards(weighed=False))
    return [groups[i] for i in min(orders, key=work.peak)]


class _Orders:
    """The three orders. Groups and values are numbered.

    Attributes:
      operands, users: for each group, the groups that it reads from, and that read from it.
      values, used: for each group, the values that it makes and reads; views are resolved.
      sizes: the bytes of each value.
      stay: the values that are outputs.
      roots: the groups that make outputs, or whose results are not read.
    """

    def __init__(self, groups: Sequence[FusionGroup], base: Mapping[FlatValue, FlatValue],
                 outputs: Sequence[FlatValue], inside: Callable[[FusionGroup], int]):  # fmt: skip
        self.n = len(groups)
        maker = {c: i for i, g in enumerate(groups) for c in g.root.results}
        self.operands = [list(dict.fromkeys(maker[c] for c in g.reads if c in maker))
                         for g in groups]  # fmt: skip
        values = [[c for c in g.root.results if c not in base] for g in groups]
        number = {c: k for k, c in enumerate(c for own in values for c in own)}
        self.sizes = [c.bytes for c in number]
        self.values = [[number[c] for c in own] for own in values]
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
        """Return the peak of live bytes in an order."""
        last = {k: i for i in order for k in self.used[i]}
        live = most = 0
        for i in order:
            live += sum(self.sizes[k] for k in self.values[i])
            most = max(most, live + self.inside[i])
            ended = (k for k in (*self.used[i], *self.values[i]) if last.get(k, i) == i)
            live -= sum(self.sizes[k] for k in ended if k not in self.stay)
        return most

    def by_freed(self) -> list[int]:
        """Return the list schedule: of the ready groups, run the one that frees most.

        The bytes that a group makes are subtracted from the bytes that it frees. Ties go to the
        group with more users, then to the one that became ready last.
        """
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
        """Return a depth-first order from the results.

        `weighed`: the operand with the largest weight first; else in the order of the operands.
        """
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
        """For each group, two sums over the groups behind it: extra readers, and bytes.

        A group with n readers counts n - 1 extra readers.
        """
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
