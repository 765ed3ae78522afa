"""XLA:CPU's execution order: breadth first, each operation when its operands are available.

The units that run are fusion groups: operations that XLA fused into one (`fusion.py`). When a value
is computed, the groups that read it become ready in the order of XLA's list of users of that value.
XLA fills this list in its order of visiting operations. Fusion then changes the list, going
from the last operation to the first: a fusion that absorbs a user is appended, and when a user is
removed, the last entry takes its place. The order of equations in the traced program has no
influence.
Source: XLA's `hlo_memory_scheduler.cc` (`BFScheduler`), `instruction_fusion.cc` and
`hlo_instruction.cc` (`Users`).
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence

from xform.planner.simulate.fusion import Fusion, FusionGroup
from xform.planner.simulate.steps import FlatStep, FlatValue


def breadth_first_order(fusion: Fusion, inputs: Sequence[FlatValue]) -> list[FusionGroup]:
    """Return the groups of a program in their execution order.

    XLA runs them from a queue. A group is appended to the queue when its last operand is available.
    The queue also contains some values: the inputs of the program, and the results of a step with
    several results. When the queue reaches a value, that value is available.
    """
    groups_reading: dict[FlatValue, list[FusionGroup]] = {}
    n_missing_operands: dict[FusionGroup, int] = {}
    for group in fusion.groups:
        n_missing_operands[group] = len(group.reads)
        for value in group.reads:
            groups_reading.setdefault(value, []).append(group)
    queue: list[FusionGroup | FlatValue] = [*dict.fromkeys(inputs)]
    queue += [g for g in fusion.groups if not n_missing_operands[g]]
    order: list[FusionGroup] = []
    for item in queue:  # the loop appends to the queue
        if isinstance(item, FusionGroup):
            order.append(item)
            if len(item.root.results) > 1:
                queue += item.root.results
                continue
            item = item.root.results[0]
        for group in _sort_users(item, groups_reading.get(item, ()), fusion.visit_index):
            n_missing_operands[group] -= 1
            if not n_missing_operands[group]:
                queue.append(group)
    return order


def _sort_users(
    value: FlatValue, groups: Sequence[FusionGroup], visit_index: Mapping[FlatStep, int]
) -> Sequence[FusionGroup]:
    """Return the groups that read a value, in the order of XLA's list of users after fusion."""
    if len(groups) < 2:
        return groups
    # For each step that reads the value: in how many groups the loop below has yet to fuse it.
    n_unfused = collections.Counter(s for g in groups for s in g.reads[value])
    users = _UserList(sorted(n_unfused, key=visit_index.__getitem__))
    for group in sorted(groups, key=lambda g: visit_index[g.root], reverse=True):
        users.append(group)
        for step in group.reads[value]:
            n_unfused[step] -= 1
            if not n_unfused[step]:
                users.remove(step)
    return [g for g in users.items if isinstance(g, FusionGroup)]


class _UserList:
    """XLA's list of users of a value. The last item takes the place of a removed item."""

    def __init__(self, items: Sequence[FusionGroup | FlatStep]):
        self.items = [*items]
        self._index: dict[FusionGroup | FlatStep, int] = {x: i for i, x in enumerate(items)}

    def append(self, item: FusionGroup) -> None:
        """Add an item at the end."""
        self._index[item] = len(self.items)
        self.items.append(item)

    def remove(self, item: FlatStep) -> None:
        """Remove an item, and move the last item to its place."""
        index, last = self._index.pop(item), self.items.pop()
        if last is not item:
            self.items[index], self._index[last] = last, index
