"""XLA:CPU's execution order of fused operations: breadth first, when operands are available.

When a value is computed, its users become ready in the order of XLA's list of users of that value.
XLA fills this list in its visiting order. Fusion then changes it, from the last operation to the
first: a fusion that absorbs a user is appended, and the last entry takes the place of a removed
user. The order of equations in the traced program has no influence.
Source: XLA's `hlo_memory_scheduler.cc` (`BFScheduler`), `instruction_fusion.cc` and
`hlo_instruction.cc` (`Users`).
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence

from xform.planner.simulate.fusion import Fusion, FusionGroup
from xform.planner.simulate.steps import FlatStep, FlatValue


def breadth_first_order(fusion: Fusion, inputs: Sequence[FlatValue]) -> list[FusionGroup]:
    """Return the groups in the order of a queue that runs them.

    A group is appended to the queue when its last operand is available. Inputs, views, and each of
    the results of a step with several pass through the queue too.
    """
    readers: dict[FlatValue, list[FusionGroup]] = {}
    missing: dict[FusionGroup, int] = {}
    for group in fusion.groups:
        missing[group] = len(group.reads)
        for c in group.reads:
            readers.setdefault(c, []).append(group)
    todo: list[FusionGroup | FlatValue] = [*dict.fromkeys(inputs)]
    todo += [g for g in fusion.groups if not missing[g]]
    done: list[FusionGroup] = []
    for item in todo:
        if isinstance(item, FusionGroup):
            done.append(item)
            if len(item.root.results) > 1:
                todo += item.root.results
                continue
            item = item.root.results[0]
        for group in _users(item, readers.get(item, ()), fusion.place):
            missing[group] -= 1
            if not missing[group]:
                todo.append(group)
    return done


def _users(
    value: FlatValue, groups: Sequence[FusionGroup], place: Mapping[FlatStep, int]
) -> Sequence[FusionGroup]:
    """The groups that read a value, in the order of XLA's final list of users."""
    if len(groups) < 2:
        return groups
    left = collections.Counter(s for g in groups for s in g.reads[value])
    users = _Users(sorted(left, key=place.__getitem__))
    for group in sorted(groups, key=lambda g: place[g.root], reverse=True):
        users.add(group)
        for step in group.reads[value]:
            left[step] -= 1
            if not left[step]:
                users.remove(step)
    return [g for g in users.items if isinstance(g, FusionGroup)]


class _Users:
    """A list that puts its last item in the place of a removed one."""

    def __init__(self, items: Sequence[FusionGroup | FlatStep]):
        self.items = [*items]
        self._at: dict[FusionGroup | FlatStep, int] = {x: i for i, x in enumerate(items)}

    def add(self, item: FusionGroup) -> None:
        self._at[item] = len(self.items)
        self.items.append(item)

    def remove(self, item: FlatStep) -> None:
        at, last = self._at.pop(item), self.items.pop()
        if last is not item:
            self.items[at], self._at[last] = last, at
