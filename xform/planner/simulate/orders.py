"""Find an execution order of low peak memory, as XLA does on GPUs and TPUs.

The units that run are fusion groups: operations that XLA fused into one (`fusion.py`). XLA tries
three orders and uses the one with the lowest peak:

- a list schedule: of the groups whose operands are available, it always runs the one that frees the
  most bytes;
- a depth-first order from the outputs, which visits the operand with the largest weight first
  (`_weights`);
- a depth-first order from the outputs, which visits the operands in their own order.

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
    base_of: Mapping[FlatValue, FlatValue],
    outputs: Sequence[FlatValue],
    inner_bytes: Callable[[FusionGroup], int],
) -> list[FusionGroup]:
    """Return the groups of a program in the best of the three orders.

    Groups that make only a view are included. A view is a value that lies in the memory of another
    value, such as a reshape.

    Args:
      groups: the groups in program order.
      base_of: for each value that is a view, the value that it is a view of.
      outputs: the outputs of the program, which stay in memory to the end.
      inner_bytes: returns the bytes that a group needs while it runs, in addition to its operands
        and results; for example the peak of a loop's body.
    """
    orders = _Orders(groups, base_of, outputs, inner_bytes)
    tried = (
        orders.list_schedule(),
        orders.depth_first(weighted=True),
        orders.depth_first(weighted=False),
    )
    return [groups[i] for i in min(tried, key=orders.peak)]


class _Orders:
    """The three orders. Groups and values are numbered, and an order is a list of group numbers.

    Attributes:
      operand_groups: for each group, the groups whose results it reads.
      user_groups: for each group, the groups that read its results.
      made_values: for each group, the values that it makes, without views.
      read_values: for each group, the values that it reads. A view counts as the viewed value.
      value_bytes: the bytes of each value.
      output_values: the values that are outputs.
      last_groups: the groups that make outputs, or whose results no group reads.
      inner_bytes: for each group, the bytes that it needs in addition while it runs.
    """

    def __init__(self, groups: Sequence[FusionGroup], base_of: Mapping[FlatValue, FlatValue],
                 outputs: Sequence[FlatValue],
                 inner_bytes: Callable[[FusionGroup], int]):  # fmt: skip
        self.n = len(groups)
        maker = {x: i for i, g in enumerate(groups) for x in g.root.results}
        self.operand_groups = [list(dict.fromkeys(maker[x] for x in g.reads if x in maker))
                               for g in groups]  # fmt: skip
        made = [[x for x in g.root.results if x not in base_of] for g in groups]
        number = {x: k for k, x in enumerate(x for values in made for x in values)}
        self.value_bytes = [x.bytes for x in number]
        self.made_values = [[number[x] for x in values] for values in made]
        self.read_values = [
            list({number[b]: None for x in g.reads if (b := base_of.get(x, x)) in number})
            for g in groups
        ]
        self.last_groups = list(dict.fromkeys(maker[x] for x in outputs if x in maker))
        self.output_values = {number[b] for x in outputs if (b := base_of.get(x, x)) in number}
        self.inner_bytes = [inner_bytes(g) for g in groups]
        self.user_groups: list[list[int]] = [[] for _ in groups]
        for i, operands in enumerate(self.operand_groups):
            for j in operands:
                self.user_groups[j].append(i)
        self.last_groups += [i for i in range(self.n) if not self.user_groups[i]]

    def peak(self, order: Sequence[int]) -> int:
        """Return the peak of live bytes in an order."""
        last_user = {k: i for i in order for k in self.read_values[i]}
        live = peak = 0
        for i in order:
            live += sum(self.value_bytes[k] for k in self.made_values[i])
            peak = max(peak, live + self.inner_bytes[i])
            values = (*self.read_values[i], *self.made_values[i])
            ended = (k for k in values if last_user.get(k, i) == i)
            live -= sum(self.value_bytes[k] for k in ended if k not in self.output_values)
        return peak

    def list_schedule(self) -> list[int]:
        """Return the list schedule: of the ready groups, run the one that frees most.

        The bytes that a group makes are subtracted from the bytes that it frees. Ties go to the
        group with more users, then to the one that was queued last.
        """
        n_uses_left = [0] * len(self.value_bytes)
        for k in itertools.chain(self.output_values, *self.read_values):
            n_uses_left[k] += 1
        n_missing_operands = [len(operands) for operands in self.operand_groups]
        needed_bytes = [
            sum(self.value_bytes[k] for k in self.made_values[i]) + self.inner_bytes[i]
            for i in range(self.n)
        ]
        groups_reading: list[list[int]] = [[] for _ in self.value_bytes]
        for i, values in enumerate(self.read_values):
            for k in values:
                groups_reading[k].append(i)
        newest_first = itertools.count(0, -1)
        # A queue of (bytes made minus bytes freed, ties, group). An entry is outdated unless it is
        # the `latest_entry` of its group.
        queue: list[tuple[int, int, int, int]] = []
        latest_entry: dict[int, tuple[int, int, int, int]] = {}

        def add_to_queue(i: int) -> None:
            """Put a ready group into the queue, with the bytes that it would free now."""
            freed = sum(self.value_bytes[k] for k in self.read_values[i] if n_uses_left[k] == 1)
            n_users = len(self.user_groups[i])
            latest_entry[i] = needed_bytes[i] - freed, -n_users, next(newest_first), i
            heapq.heappush(queue, latest_entry[i])

        for i in range(self.n):
            if not n_missing_operands[i]:
                add_to_queue(i)
        order: list[int] = []
        while queue:
            entry = heapq.heappop(queue)
            i = entry[-1]
            if latest_entry.get(i) != entry:
                continue
            del latest_entry[i]
            order.append(i)
            for user in self.user_groups[i]:
                n_missing_operands[user] -= 1
            for k in self.read_values[i]:
                n_uses_left[k] -= 1
            for user in self.user_groups[i]:
                if not n_missing_operands[user]:
                    add_to_queue(user)
            for k in self.read_values[i]:
                if n_uses_left[k] == 1:
                    for j in groups_reading[k]:
                        if j in latest_entry:
                            add_to_queue(j)
        return order

    def depth_first(self, weighted: bool) -> list[int]:
        """Return a depth-first order from the outputs: each group after its operands.

        If `weighted`, the operand with the largest weight is visited first. Otherwise the operands
        are visited in their own order.
        """
        weights = self._weights() if weighted else None
        done = dict[int, None]()
        stack = (
            self.last_groups[::-1]
            if weights is None
            else sorted(self.last_groups, key=weights.__getitem__)
        )
        while stack:
            i = stack[-1]
            missing = [j for j in self.operand_groups[i] if j not in done]
            if i in done or not missing:
                done[stack.pop()] = None
                continue
            stack += missing[::-1] if weights is None else sorted(missing, key=weights.__getitem__)
        return list(done)

    def _weights(self) -> list[tuple[int, int]]:
        """Return the weight of each group: a number of extra readers, and a number of bytes.

        Both are sums over the group and all groups that it depends on. A group that is reached on
        several paths counts several times. The first sum is at most the number of groups, the
        second at most the bytes of the groups visited so far. A group with n readers has n - 1
        extra readers.
        """
        weights: list[tuple[int, int]] = [(0, 0)] * self.n
        total_bytes = 0
        for i in self.depth_first(weighted=False):
            size = sum(self.value_bytes[k] for k in self.made_values[i])
            total_bytes += size
            extra_readers = max(0, len(self.user_groups[i]) - 1)
            for j in self.operand_groups[i]:
                extra_readers += weights[j][0]
                size += weights[j][1]
            weights[i] = min(extra_readers, self.n), min(size, total_bytes)
        return weights
