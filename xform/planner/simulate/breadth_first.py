"""The order in which XLA:CPU runs what it fused: breadth first, as soon as operands are there.

What one value makes possible runs in the order of XLA's list of that value's users. Those are
listed as XLA comes to them, and changed by fusion, which goes from the last operation to the first:
a loop that takes in a user is put at the end, and in the place of a user that is gone stands what
was last. How the program was written down makes no difference.
Source: XLA's `hlo_memory_scheduler.cc` (`BFScheduler`), `instruction_fusion.cc` and
`hlo_instruction.cc` (`Users`).
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence

from xform.planner.simulate.fusion import Fusion, Group
from xform.planner.simulate.steps import Cell, Step


def breadth_first(fusion: Fusion, inputs: Sequence[Cell]) -> list[Group]:
    """Groups as a queue runs them: each is put at its end when its last operand is there.

    Inputs, views and each of several results of a step pass through the queue too.
    """
    readers: dict[Cell, list[Group]] = {}
    missing: dict[Group, int] = {}
    for group in fusion.groups:
        missing[group] = len(group.reads)
        for c in group.reads:
            readers.setdefault(c, []).append(group)
    todo: list[Group | Cell] = [*dict.fromkeys(inputs)]
    todo += [g for g in fusion.groups if not missing[g]]
    done: list[Group] = []
    for item in todo:
        if isinstance(item, Group):
            done.append(item)
            if len(item.root.makes) > 1:
                todo += item.root.makes
                continue
            item = item.root.makes[0]
        for group in _users(item, readers.get(item, ()), fusion.place):
            missing[group] -= 1
            if not missing[group]:
                todo.append(group)
    return done


def _users(cell: Cell, groups: Sequence[Group], place: Mapping[Step, int]) -> Sequence[Group]:
    """The groups that read a value, as XLA lists its users in the end."""
    if len(groups) < 2:
        return groups
    left = collections.Counter(s for g in groups for s in g.reads[cell])
    users = _Users(sorted(left, key=place.__getitem__))
    for group in sorted(groups, key=lambda g: place[g.root], reverse=True):
        users.add(group)
        for step in group.reads[cell]:
            left[step] -= 1
            if not left[step]:
                users.remove(step)
    return [g for g in users.items if isinstance(g, Group)]


class _Users:
    """A list from which an item is removed by putting the last in its place."""

    def __init__(self, items: Sequence[Group | Step]):
        self.items = [*items]
        self._at: dict[Group | Step, int] = {x: i for i, x in enumerate(items)}

    def add(self, item: Group) -> None:
        self._at[item] = len(self.items)
        self.items.append(item)

    def remove(self, item: Step) -> None:
        at, last = self._at.pop(item), self.items.pop()
        if last is not item:
            self.items[at], self._at[last] = last, at
