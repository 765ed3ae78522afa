"""Which values a compiler writes to memory: the operations of a program as fused groups.

A group is a fusion, a library call or a single operation. Only the result of its last operation is
written. How operations are fused depends on the compiler: see `loop_fusion.py` for CPUs and
`gain.py` for other devices. This file has the common parts: groups, XLA's visiting order of
operations, and the values that are only views of others.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

from jax import lax

from xform._jax import broadcast_in_dim_p
from xform.interpret.barrier import barrier_p
from xform.planner.simulate.library import calls
from xform.planner.simulate.profiles import Profile
from xform.planner.simulate.steps import Cell, Flat, Step, repeat_p, wait_p

REPEATS = (broadcast_in_dim_p, repeat_p)


@dataclasses.dataclass(eq=False, slots=True)
class Group:
    """Steps that run as one operation. Only the result of the last step is written to memory.

    Attributes:
      root: the last step.
      reads: the values in memory that it reads, in order, each with the steps that read it (on a
        CPU only).
      spoiled: the values of `reads` that it does not read element by element.
      call: whether it is a library call, or another operation that is not a loop over elements.
      alone: whether it consists of the root only.
    """

    root: Step
    reads: dict[Cell, tuple[Step, ...]]
    spoiled: frozenset[Cell] = frozenset()
    call: bool = False
    alone: bool = True

    def replaceable(self) -> set[Cell]:
        """Return the operands whose memory the result may take.

        They have the size of the result, and the group reads them element by element.
        """
        if len(self.root.makes) != 1:
            return set()
        size = self.root.makes[0].bytes
        return {c for c in self.reads if c.bytes == size and c not in self.spoiled}

    def operands(self, place: Mapping[Step, int]) -> list[Cell]:
        """Return the operands in XLA's order: steps with a later `place` were fused first."""
        if self.call or self.alone:
            return [*self.reads]
        by = {c: max(steps, key=place.__getitem__) for c, steps in self.reads.items()}
        return sorted(self.reads, key=lambda c: (-place[by[c]], by[c].reads.index(c)))


class Fusion(abc.ABC):
    """The groups of a flat program, and so the values that are written to memory.

    Attributes:
      groups: the groups, views included, in program order.
      base: for each value that is only a view, the value that it is a view of.
      place: for each step, its number in XLA's visiting order: from the outputs, operands first.
    """

    def __init__(self, flat: Flat, profile: Profile):
        self.outputs, self.profile = dict.fromkeys(flat.outputs), profile
        ends = [s for s in flat.steps if not any(c.readers for c in s.makes)]
        ends = [*(c.maker for c in flat.outputs if c.maker), *ends]
        steps = list(post_order(ends, lambda step: step.reads))
        self.place = {s: i for i, s in enumerate(steps)}
        # The groups by their root; and for each value, the roots of the groups that read it.
        self.by_root: dict[Step, Group] = {}
        self.users: dict[Cell, dict[Step, None]] = {}
        called = calls(flat, steps, profile) if profile.library else {}
        inside = {s for members in called.values() for s in members[1:]}
        for step in steps:
            if step not in inside:
                self._add(step, called.get(step, [step]), step in called)
        self.fuse([s for s in steps if s not in inside])
        self.groups = [self.by_root[s] for s in flat.steps if s in self.by_root]
        self.base = self._views()

    @abc.abstractmethod
    def fuse(self, steps: Sequence[Step]) -> None:
        """Merge groups. The results of the groups that remain in `by_root` are written.

        `steps` are the roots of all groups.
        """

    def fused_place(self) -> dict[Step, int]:
        """Return the number of each root in XLA's order after fusion, if that is known."""
        return self.place

    def _views(self) -> dict[Cell, Cell]:
        """For each value that is a reshape of another, the value that is written."""
        base: dict[Cell, Cell] = {}
        for group in self.groups:
            # A group that reads nothing is computed from constants alone.
            if group.reads and group.alone and group.root.does in (lax.reshape_p, wait_p):
                cell = next(iter(group.reads))
                base[group.root.makes[0]] = base.get(cell, cell)
        return base

    def _add(self, root: Step, members: list[Step], call: bool) -> None:
        """Add a group of one step, or of a library call with several steps."""
        makes = {s.makes[0] for s in members if s is not root}
        reads = dict.fromkeys((c for s in members for c in s.reads if c not in makes), (root,))
        call = call or not _fuses(root) or len(root.makes) != 1
        members.sort(key=self.place.__getitem__, reverse=True)
        self.by_root[root] = Group(root, reads, spoiled(members), call, len(members) == 1)
        for c in reads:
            self.users.setdefault(c, {})[root] = None


def spoiled(members: Sequence[Step]) -> frozenset[Cell]:
    """Return the values that a group does not read element by element for its result.

    `members` are the steps of the group, the last first.
    """
    cells: set[Cell] = set()
    for step in members:
        result_spoiled = step is not members[0] and step.makes[0] in cells
        own = step.reads if result_spoiled else spoiled_operands(step, step is members[0])
        cells.update(own)
    return frozenset(cells)


def spoiled_operands(step: Step, last: bool) -> Sequence[Cell]:
    """Return the operands that a step does not read element by element.

    A `dynamic_update_slice` reads its first operand element by element if it is the `last` step of
    its group, because then it can update that operand in place.
    """
    if step.does is barrier_p or (last and step.does is lax.dynamic_update_slice_p):
        return step.reads[1:]
    return () if pointwise(step) else step.reads


def pointwise(step: Step) -> bool:
    """Whether each element of the result depends on one element of each operand only."""
    others = (barrier_p, lax.convert_element_type_p, lax.copy_p)
    return step.of.fusion == "elementwise" or step.does in others


def _fuses(step: Step) -> bool:
    """Whether a step can be part of a loop over elements."""
    return bool(step.of.fusion) or step.does is repeat_p


def post_order(ends: Sequence[Step], reads: Callable[[Step], Sequence[Cell]]) -> Iterable[Step]:
    """Return the steps in XLA's visiting order: from the ends, the operands of each first."""
    done: dict[Step, None] = {}
    todo = list(reversed(ends))
    while todo:
        step = todo[-1]
        if step in done:
            todo.pop()
            continue
        late = [c.maker for c in reads(step) if c.maker and c.maker not in done]
        if late:
            late.reverse()
            todo += late
        else:
            todo.pop()
            done[step] = None
    return done
