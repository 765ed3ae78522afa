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
from xform.planner.simulate.library import library_calls
from xform.planner.simulate.profiles import Profile
from xform.planner.simulate.steps import FlatProgram, FlatStep, FlatValue, repeat_p, wait_p

REPEATS = (broadcast_in_dim_p, repeat_p)


@dataclasses.dataclass(eq=False, slots=True)
class FusionGroup:
    """Steps that run as one operation. Only the result of the last step is written to memory.

    Attributes:
      root: the last step.
      reads: the values in memory that it reads, in order, each with the steps that read it (on a
        CPU only).
      not_elementwise: the values of `reads` that it does not read element by element.
      call: whether it is a library call, or another operation that is not a loop over elements.
      alone: whether it consists of the root only.
    """

    root: FlatStep
    reads: dict[FlatValue, tuple[FlatStep, ...]]
    not_elementwise: frozenset[FlatValue] = frozenset()
    call: bool = False
    alone: bool = True

    def replaceable(self) -> set[FlatValue]:
        """Return the operands whose memory the result may take.

        They have the size of the result, and the group reads them element by element.
        """
        if len(self.root.results) != 1:
            return set()
        size = self.root.results[0].bytes
        return {c for c in self.reads if c.bytes == size and c not in self.not_elementwise}

    def operands(self, place: Mapping[FlatStep, int]) -> list[FlatValue]:
        """Return the operands in XLA's order: steps with a later `place` were fused first."""
        if self.call or self.alone:
            return [*self.reads]
        by = {c: max(steps, key=place.__getitem__) for c, steps in self.reads.items()}
        return sorted(self.reads, key=lambda c: (-place[by[c]], by[c].operands.index(c)))


class Fusion(abc.ABC):
    """The groups of a flat program, and so the values that are written to memory.

    Attributes:
      groups: the groups, views included, in program order.
      base: for each value that is only a view, the value that it is a view of.
      place: for each step, its number in XLA's visiting order: from the outputs, operands first.
    """

    def __init__(self, flat: FlatProgram, profile: Profile):
        self.outputs, self.profile = dict.fromkeys(flat.outputs), profile
        ends = [s for s in flat.steps if not any(c.readers for c in s.results)]
        ends = [*(c.maker for c in flat.outputs if c.maker), *ends]
        steps = list(post_order(ends, lambda step: step.operands))
        self.place = {s: i for i, s in enumerate(steps)}
        # The groups by their root; and for each value, the roots of the groups that read it.
        self.by_root: dict[FlatStep, FusionGroup] = {}
        self.users: dict[FlatValue, dict[FlatStep, None]] = {}
        called = library_calls(flat, steps, profile) if profile.library_elements else {}
        inside = {s for members in called.values() for s in members[1:]}
        for step in steps:
            if step not in inside:
                self._add(step, called.get(step, [step]), step in called)
        self.fuse([s for s in steps if s not in inside])
        self.groups = [self.by_root[s] for s in flat.steps if s in self.by_root]
        self.base = self._views()

    @abc.abstractmethod
    def fuse(self, steps: Sequence[FlatStep]) -> None:
        """Merge groups. The results of the groups that remain in `by_root` are written.

        `steps` are the roots of all groups.
        """

    def fused_place(self) -> dict[FlatStep, int]:
        """Return the number of each root in XLA's order after fusion, if that is known."""
        return self.place

    def _views(self) -> dict[FlatValue, FlatValue]:
        """For each value that is a reshape of another, the value that is written."""
        base: dict[FlatValue, FlatValue] = {}
        for group in self.groups:
            # A group that reads nothing is computed from constants alone.
            if group.reads and group.alone and group.root.primitive in (lax.reshape_p, wait_p):
                value = next(iter(group.reads))
                base[group.root.results[0]] = base.get(value, value)
        return base

    def _add(self, root: FlatStep, members: list[FlatStep], call: bool) -> None:
        """Add a group of one step, or of a library call with several steps."""
        makes = {s.results[0] for s in members if s is not root}
        reads = dict.fromkeys((c for s in members for c in s.operands if c not in makes), (root,))
        call = call or not _fuses(root) or len(root.results) != 1
        members.sort(key=self.place.__getitem__, reverse=True)
        self.by_root[root] = FusionGroup(
            root, reads, reads_not_elementwise(members), call, len(members) == 1
        )
        for c in reads:
            self.users.setdefault(c, {})[root] = None


def reads_not_elementwise(members: Sequence[FlatStep]) -> frozenset[FlatValue]:
    """Return the values that a group does not read element by element for its result.

    `members` are the steps of the group, the last first.
    """
    values: set[FlatValue] = set()
    for step in members:
        result_not_elementwise = step is not members[0] and step.results[0] in values
        own = (
            step.operands
            if result_not_elementwise
            else operands_not_elementwise(step, step is members[0])
        )
        values.update(own)
    return frozenset(values)


def operands_not_elementwise(step: FlatStep, last: bool) -> Sequence[FlatValue]:
    """Return the operands that a step does not read element by element.

    A `dynamic_update_slice` reads its first operand element by element if it is the `last` step of
    its group, because then it can update that operand in place.
    """
    if step.primitive is barrier_p or (last and step.primitive is lax.dynamic_update_slice_p):
        return step.operands[1:]
    return () if is_pointwise(step) else step.operands


def is_pointwise(step: FlatStep) -> bool:
    """Whether each element of the result depends on one element of each operand only."""
    others = (barrier_p, lax.convert_element_type_p, lax.copy_p)
    return step.traits.fusion == "elementwise" or step.primitive in others


def _fuses(step: FlatStep) -> bool:
    """Whether a step can be part of a loop over elements."""
    return bool(step.traits.fusion) or step.primitive is repeat_p


def post_order(
    ends: Sequence[FlatStep], reads: Callable[[FlatStep], Sequence[FlatValue]]
) -> Iterable[FlatStep]:
    """Return the steps in XLA's visiting order: from the ends, the operands of each first."""
    done: dict[FlatStep, None] = {}
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
