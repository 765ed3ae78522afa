"""Which values a compiler writes to memory: the operations of a program in groups that run as one.

How operations are grouped is the compiler's: `loop_fusion.py` for a CPU, `gain.py` for others. Here
is what those have in common: groups, the order in which XLA comes to operations, and what is only a
view of another value.
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
    """Steps that run as one: what the last of them makes is written.

    Attributes:
      root: the last of its steps.
      reads: the written values that it reads, in order; for a CPU, by which of its steps.
      spoiled: those of `reads` that it does not read element by element.
      call: it is a call of a library, or one that is no loop over elements.
      alone: the root is all of it.
    """

    root: Step
    reads: dict[Cell, tuple[Step, ...]]
    spoiled: frozenset[Cell] = frozenset()
    call: bool = False
    alone: bool = True

    def replaceable(self) -> set[Cell]:
        """The values read whose place the result may take: they are used element by element."""
        if len(self.root.makes) != 1:
            return set()
        size = self.root.makes[0].bytes
        return {c for c in self.reads if c.bytes == size and c not in self.spoiled}

    def operands(self, place: Mapping[Step, int]) -> list[Cell]:
        """What the group reads, in XLA's order: its steps were taken in by falling `place`."""
        if self.call or self.alone:
            return [*self.reads]
        by = {c: max(steps, key=place.__getitem__) for c, steps in self.reads.items()}
        return sorted(self.reads, key=lambda c: (-place[by[c]], by[c].reads.index(c)))


class Fusion(abc.ABC):
    """What is written of a flat program.

    Attributes:
      groups: what runs as one, views included, in the order in which the program makes it.
      base: of each value that is only a view of another, that one.
      place: of each step, when XLA comes to it: from the outputs, operands first.
    """

    def __init__(self, flat: Flat, profile: Profile):
        self.outputs, self.profile = dict.fromkeys(flat.outputs), profile
        ends = [s for s in flat.steps if not any(c.readers for c in s.makes)]
        ends = [*(c.maker for c in flat.outputs if c.maker), *ends]
        steps = list(post_order(ends, lambda step: step.reads))
        self.place = {s: i for i, s in enumerate(steps)}
        # Groups by their root, and of each value those that read it, by their roots.
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
        """Let groups take in others: what is left `by_root` is written. `steps` are the roots."""

    def fused_place(self) -> dict[Step, int]:
        """Of the last step of each group, when XLA comes to it after fusion, if that is known."""
        return self.place

    def _views(self) -> dict[Cell, Cell]:
        """Of each value that is another in another shape, the one that is written."""
        base: dict[Cell, Cell] = {}
        for group in self.groups:
            # What reads nothing is made from constants alone.
            if group.reads and group.alone and group.root.does in (lax.reshape_p, wait_p):
                cell = next(iter(group.reads))
                base[group.root.makes[0]] = base.get(cell, cell)
        return base

    def _add(self, root: Step, members: list[Step], call: bool) -> None:
        """A group of its own: a step, or a call of a library, which may take in several."""
        makes = {s.makes[0] for s in members if s is not root}
        reads = dict.fromkeys((c for s in members for c in s.reads if c not in makes), (root,))
        call = call or not _fuses(root) or len(root.makes) != 1
        members.sort(key=self.place.__getitem__, reverse=True)
        self.by_root[root] = Group(root, reads, spoiled(members), call, len(members) == 1)
        for c in reads:
            self.users.setdefault(c, {})[root] = None


def spoiled(members: Sequence[Step]) -> frozenset[Cell]:
    """What some steps, the last first, do not read element by element for their result."""
    lost_cells: set[Cell] = set()
    for step in members:
        lost = step is not members[0] and step.makes[0] in lost_cells
        lost_cells.update(step.reads if lost else spoiled_operands(step, step is members[0]))
    return frozenset(lost_cells)


def spoiled_operands(step: Step, last: bool) -> Sequence[Cell]:
    """The operands of a step of which an element of the result needs others than its own.

    An update in place reads the first one element by element if it is the `last` of its group.
    """
    if step.does is barrier_p or (last and step.does is lax.dynamic_update_slice_p):
        return step.reads[1:]
    return () if pointwise(step) else step.reads


def pointwise(step: Step) -> bool:
    """Whether each element of a step's result needs one element of each operand."""
    others = (barrier_p, lax.convert_element_type_p, lax.copy_p)
    return step.of.fusion == "elementwise" or step.does in others


def _fuses(step: Step) -> bool:
    """Whether a step may be part of a loop over elements."""
    return bool(step.of.fusion) or step.does is repeat_p


def post_order(ends: Sequence[Step], reads: Callable[[Step], Sequence[Cell]]) -> Iterable[Step]:
    """Steps as XLA walks them: from the ends, the operands of each first, in their order."""
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
