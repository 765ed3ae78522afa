"""Predict which operations a compiler fuses, and so which values it writes to memory.

A group is a fusion, a library call or a single operation. The compiler runs it as one operation and
writes only the result of the last operation in it, the root. The rules of fusion depend on the
compiler. Subclasses of `Fusion` have them: `loop_fusion.py` for CPUs, `gain.py` for GPUs and TPUs.
This file has the common parts: groups, XLA's order of visiting operations, and views. A view is a
value that is never written because it lies in the memory of another value, such as a reshape.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

from jax import lax

from xform._jax import broadcast_in_dim_p
from xform.planner.simulate.library import library_calls
from xform.planner.simulate.profiles import Profile
from xform.planner.simulate.steps import FlatProgram, FlatStep, FlatValue, repeat_p, wait_p
from xform.steering.barrier import barrier_p

# Operations that repeat the elements of a value.
REPEATS = (broadcast_in_dim_p, repeat_p)
# Operations that may write their result over their first operand.
_UPDATES = (
    lax.dynamic_update_slice_p, lax.scatter_p, lax.scatter_add_p, lax.scatter_sub_p,
    lax.scatter_mul_p, lax.scatter_min_p, lax.scatter_max_p,
)  # fmt: skip


@dataclasses.dataclass(eq=False, slots=True)
class FusionGroup:
    """Steps that run as one operation. Only the result of the last step is written to memory.

    Attributes:
      root: the last step. Its result is written.
      reads: the values in memory that the group reads, in order. On a CPU, each is mapped to the
        steps of the group that read it.
      not_elementwise: the values in `reads` that the group does not read element by element.
      call: whether it is a library call, or another operation that is not a loop over elements.
      alone: whether it consists of the root only.
    """

    root: FlatStep
    reads: dict[FlatValue, tuple[FlatStep, ...]]
    not_elementwise: frozenset[FlatValue] = frozenset()
    call: bool = False
    alone: bool = True

    def replaceable(self) -> set[FlatValue]:
        """Return the operands whose memory the result may take over.

        These are the operands of the result's size that the group reads element by element.
        """
        if len(self.root.results) != 1:
            return set()
        size = self.root.results[0].bytes
        return {x for x in self.reads if x.bytes == size and x not in self.not_elementwise}

    def operands(self, visit_index: Mapping[FlatStep, int]) -> list[FlatValue]:
        """Return the operands of the group in the order of XLA:CPU.

        XLA goes through the steps of the group from the last one to the first, and lists the
        operands of each step in the step's own order. It lists each operand once.
        """
        if self.call or self.alone:
            return [*self.reads]
        first_reader = {
            x: max(steps, key=visit_index.__getitem__) for x, steps in self.reads.items()
        }
        return sorted(
            self.reads,
            key=lambda x: (-visit_index[first_reader[x]], first_reader[x].operands.index(x)),
        )


class Fusion(abc.ABC):
    """The fused groups of a flat program. Their results are the values that are written to memory.

    Attributes:
      groups: the groups in program order, including those whose result is a view.
      base_of: for each value that is a view, the value in memory that it is a view of.
      visit_index: for each step, its number in XLA's visiting order (`post_order`).
      by_root: the groups by their root, without those that were fused into all their readers.
      users: for each value, the roots of the groups that read it.
    """

    def __init__(self, flat: FlatProgram, profile: Profile):
        self.outputs, self.profile = dict.fromkeys(flat.outputs), profile
        ends = [s for s in flat.steps if not any(x.readers for x in s.results)]
        ends = [*(x.maker for x in flat.outputs if x.maker), *ends]
        steps = list(post_order(ends, lambda step: step.operands))
        self.visit_index = {s: i for i, s in enumerate(steps)}
        self.by_root: dict[FlatStep, FusionGroup] = {}
        self.users: dict[FlatValue, dict[FlatStep, None]] = {}
        calls = library_calls(flat, steps, profile) if profile.library_elements else {}
        inside_calls = {s for members in calls.values() for s in members[1:]}
        roots = [s for s in steps if s not in inside_calls]
        for step in roots:
            self._add_group(step, calls.get(step, [step]), step in calls)
        self.fuse(roots)
        self.groups = [self.by_root[s] for s in flat.steps if s in self.by_root]
        self.base_of = self._find_views()

    @abc.abstractmethod
    def fuse(self, steps: Sequence[FlatStep]) -> None:
        """Fuse groups: remove each group from `by_root` that is fused into all its readers.

        `steps` are the roots of all groups in XLA's visiting order. At the start each group is a
        single step or a library call.
        """

    def visit_index_after_fusion(self) -> dict[FlatStep, int]:
        """Return the number of each root in XLA's visiting order after fusion.

        A subclass that does not know that order returns the numbers before fusion.
        """
        return self.visit_index

    def _find_views(self) -> dict[FlatValue, FlatValue]:
        """Return the values that are views. Each is mapped to the value in whose memory it lies."""
        base_of: dict[FlatValue, FlatValue] = {}
        for group in self.groups:
            # A group that reads nothing is computed from constants alone.
            if group.reads and group.alone and group.root.primitive in (lax.reshape_p, wait_p):
                value = next(iter(group.reads))
                base_of[group.root.results[0]] = base_of.get(value, value)
        return base_of

    def _add_group(self, root: FlatStep, members: list[FlatStep], call: bool) -> None:
        """Add a group that consists of the steps `members`: a single step, or a library call."""
        inner = {s.results[0] for s in members if s is not root}
        reads = dict.fromkeys((x for s in members for x in s.operands if x not in inner), (root,))
        call = call or not _is_loop_over_elements(root) or len(root.results) != 1
        members.sort(key=self.visit_index.__getitem__, reverse=True)
        self.by_root[root] = FusionGroup(
            root, reads, reads_not_elementwise(members), call, len(members) == 1
        )
        for value in reads:
            self.users.setdefault(value, {})[root] = None


def reads_not_elementwise(members: Sequence[FlatStep]) -> frozenset[FlatValue]:
    """Return the values that a group does not read element by element to compute its result.

    `members` are the steps of the group, each after the steps that read its result. So the first is
    the root.
    """
    root = members[0]
    values: set[FlatValue] = set()
    for step in members:
        if step is not root and step.results[0] in values:
            values.update(step.operands)
        else:
            values.update(operands_not_elementwise(step, step is root))
    return frozenset(values)


def operands_not_elementwise(step: FlatStep, is_root: bool) -> Sequence[FlatValue]:
    """Return the operands that a step does not read element by element.

    A `dynamic_update_slice` or a scatter counts as reading its first operand element by element if
    it is the root of its group, because then it can update that operand in place.
    """
    if step.primitive is barrier_p or (is_root and step.primitive in _UPDATES):
        return step.operands[1:]
    return () if is_pointwise(step) else step.operands


def is_pointwise(step: FlatStep) -> bool:
    """Return whether each element of the result depends on one element of each operand only."""
    others = (barrier_p, lax.convert_element_type_p, lax.copy_p)
    return step.traits.fusion == "elementwise" or step.primitive in others


def _is_loop_over_elements(step: FlatStep) -> bool:
    """Return whether a step can be fused: it is computed element by element in a loop."""
    return bool(step.traits.fusion) or step.primitive is repeat_p


def post_order(
    ends: Sequence[FlatStep], reads: Callable[[FlatStep], Sequence[FlatValue]]
) -> Iterable[FlatStep]:
    """Return the steps in XLA's visiting order: each step after the steps that make its operands.

    The walk starts from each of the steps `ends` in turn. `reads` returns the operands of a step,
    and they are visited in that order.
    """
    done: dict[FlatStep, None] = {}
    stack = list(reversed(ends))
    while stack:
        step = stack[-1]
        if step in done:
            stack.pop()
            continue
        missing = [x.maker for x in reads(step) if x.maker and x.maker not in done]
        if missing:
            missing.reverse()
            stack += missing
        else:
            stack.pop()
            done[step] = None
    return done
