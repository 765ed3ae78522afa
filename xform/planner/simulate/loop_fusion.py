"""Fusion on XLA:CPU: an operation that loops over elements absorbs the operations before it.

XLA goes from the last operation to the first. Each operation that is a loop over elements (a
*reader*) absorbs the operations that make its operands (*producers*), if these are elementwise,
movements of data or reductions:

- A cheap producer is computed again in all readers that are loops. It is also written if some
  readers are not loops.
- An expensive producer is fused only if all its readers are in one group.
- A producer that reads more elements than it makes is fused only if everything on all paths from it
  to its readers can be fused.
- A producer that compiles to a branch (such as a concatenation) is computed again only in loops of
  one operation.

The simulation decides about each step (operation) once: all loops that read its result absorb it,
or none does. Fused steps form a group, and the last step of a group is its root (`fusion.py`). Then
the simulation finds the values in memory that each group reads, by going back from its root. A step
that was fused into several readers needs this search only once: all its readers use the result.
Source: XLA's `instruction_fusion.cc` and `cpu_instruction_fusion.cc`.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence

from jax import lax

from xform.planner.simulate.fusion import (
    REPEATS,
    Fusion,
    FusionGroup,
    is_pointwise,
    operands_not_elementwise,
    post_order,
)
from xform.planner.simulate.products import is_16_bit
from xform.planner.simulate.steps import FlatStep, FlatValue
from xform.steering.barrier import barrier_p

# A concatenation of more operands than this is not fused.
_MOST_CONCATENATED = 8
# The most reductions in one loop over elements.
_MOST_REDUCTIONS = 6
# For each step, its dependences on this many steps before it are recorded.
_WINDOW = 4096
# Operations that may read one element of an operand for several elements of the result.
_REUSES_ELEMENTS = (*REPEATS, lax.gather_p)
# Operations that compile to a branch inside a loop. Values computed in a branch cannot be reused
# after it. So a loop of several operations absorbs such an operation only if no other reader is
# left. Source: XLA's `fusion_node_indexing_evaluation.cc`.
_BRANCHES = (lax.concatenate_p, lax.pad_p, lax.dynamic_update_slice_p)


class LoopFusion(Fusion):
    """The fused groups of a flat program on XLA:CPU: loops, library calls and other operations."""

    def fuse(self, steps: Sequence[FlatStep]) -> None:
        """Fuse groups into their readers, the last group first."""
        # The values that may be fused into their readers; and which of them are expensive.
        self._fusible = {
            s.results[0]
            for s, g in self.by_root.items()
            if not (g.call or _is_large_concatenation(s))
        }
        self._expensive = {x for x in self._fusible if x.maker and self._is_expensive(x.maker)}
        self._forbid_large_reads(steps)
        # All values that were fused; and those of them that were fused into one step only and are
        # not written.
        self._fused, self._fused_once = set[FlatValue](), set[FlatValue]()
        # For each step, the root of the only group that contains it; None if several contain it.
        self._only_group: dict[FlatStep, FlatStep | None] = {}
        # The fused steps whose reader, such as a broadcast, may read one element of the result
        # several times.
        self._reused = set[FlatStep]()
        # How many reductions each group contains, by its root.
        self._n_reductions = collections.Counter(s for s in steps if _is_reduction(s))
        is_written = {s: self._decide_fusion(self.by_root[s]) for s in reversed(steps)}
        for step in steps:
            if step.results[0] not in self._fused_once:
                self._set_operands(self.by_root[step])
        for step in steps:
            group = self.by_root[step]
            is_update = step.primitive is lax.dynamic_update_slice_p and not group.call
            if is_written[step] and is_update:
                _, group.not_elementwise = self._find_operands(step, is_root=True)
        self.by_root = {s: self.by_root[s] for s in steps if is_written[s]}

    def visit_index_after_fusion(self) -> dict[FlatStep, int]:
        """Return the number of each root in XLA's visiting order after fusion."""
        ends = [x.maker for x in self.outputs if x.maker]
        read = {x for g in self.groups for x in g.reads}
        ends += [g.root for g in self.groups if read.isdisjoint(g.root.results)]
        order = post_order(ends, lambda s: self.by_root[s].operands(self.visit_index))
        return {s: i for i, s in enumerate(order)}

    def _decide_fusion(self, group: FusionGroup) -> bool:
        """Decide into which groups a step is fused. Return whether its result is written.

        This must be called for the readers of the step first. `group` is the group of the step,
        which still contains nothing else (or is a library call).
        """
        step, value = group.root, group.root.results[0]
        users = self.users.get(value, {}) if value in self._fusible else {}
        loops = [u for u in users if self._can_absorb(u)]
        groups_of_loops = {self._only_group[u] for u in loops}
        common_group = groups_of_loops.pop() if len(groups_of_loops) == 1 else None
        is_written = value in self.outputs or len(loops) < len(users) or not loops
        if value in self._expensive and (
            is_written or not self._can_fuse_expensive(step, loops, common_group)
        ):
            loops, is_written = [], True
        if step.primitive in _BRANCHES and not self._can_fuse_branch(value, loops):
            loops, is_written = [], True
        self._only_group[step] = step if not loops else None if is_written else common_group
        if loops:
            self._fused.add(value)
            if len(loops) == 1 and not is_written:
                self._fused_once.add(value)
        for loop in loops:
            self.by_root[loop].alone = False
            if self._only_group[step] and self._reuses_elements(loop):
                self._reused.add(step)
        return is_written

    def _reuses_elements(self, reader: FlatStep) -> bool:
        """Return whether a loop may read one element of its operand several times."""
        return reader.primitive in _REUSES_ELEMENTS or reader in self._reused

    def _can_fuse_branch(self, value: FlatValue, loops: Sequence[FlatStep]) -> bool:
        """Return whether a step that compiles to a branch can be fused into all these readers.

        Each reader must be a loop of one step. Only the reader that absorbs the step last may be in
        a larger group. `value` is the result of the step.
        """
        n_left = len(self.users.get(value, ())) + (value in self.outputs)
        for loop in sorted(loops, key=self.visit_index.__getitem__, reverse=True):
            alone = self._only_group[loop] is loop and self.by_root[loop].alone
            if not alone and (n_left > 1 or self._only_group[loop] is None):
                return False
            n_left -= 1
        return True

    def _can_fuse_expensive(
        self, step: FlatStep, loops: Sequence[FlatStep], common_group: FlatStep | None
    ) -> bool:
        """Return whether an expensive step can be fused into its readers, the steps `loops`.

        All readers must be in one group, whose root is `common_group`. If the step is a reduction,
        it is counted as a reduction of that group.
        """
        if common_group is None or any(map(self._reuses_elements, loops)):
            return False
        if _is_reduction(step):
            if len(loops) > 1:  # XLA treats it like an operation that compiles to a branch
                return False
            n_reductions = self._n_reductions[common_group]
            if not self.by_root[common_group].alone and n_reductions >= _MOST_REDUCTIONS:
                return False
            self._n_reductions[common_group] += 1
        return True

    def _can_absorb(self, reader: FlatStep) -> bool:
        """Return whether a reader is a loop that can absorb the makers of its operands."""
        return not self.by_root[reader].call and not _is_large_concatenation(reader)

    def _set_operands(self, group: FusionGroup) -> None:
        """Set the operands of a group. Those of the steps that it absorbed must be set before."""
        is_update = group.root.primitive is lax.dynamic_update_slice_p
        if self._can_absorb(group.root) and (is_update or not group.alone):
            group.reads, group.not_elementwise = self._find_operands(group.root, is_root=False)

    def _find_operands(
        self, root: FlatStep, is_root: bool
    ) -> tuple[dict[FlatValue, tuple[FlatStep, ...]], frozenset[FlatValue]]:
        """Return the operands of a step with everything fused into it.

        The first result has each operand with the steps that read it. The second result has the
        operands that are not read element by element. `is_root` is passed on to
        `operands_not_elementwise`.
        """
        root_not_elementwise = operands_not_elementwise(root, is_root)
        if len(own := self.by_root[root].reads) == 1:
            (value,) = own
            if (maker := self._fused_maker(value)) and value not in self._fused_once:
                if value in root_not_elementwise:
                    return maker.reads, frozenset(maker.reads)
                return maker.reads, maker.not_elementwise
        readers: dict[FlatValue, list[FlatStep]] = {}
        not_elementwise = set[FlatValue]()
        # Values to follow: the value, its reader, and True if it is not read element by element.
        stack = [(x, root, x in root_not_elementwise) for x in reversed(own)]
        while stack:
            value, reader, is_not_elementwise = stack.pop()
            maker = self._fused_maker(value)
            if maker is None:
                readers.setdefault(value, []).append(reader)
                not_elementwise.update((value,) if is_not_elementwise else ())
            elif value in self._fused_once:
                makers_not_elementwise = (
                    maker.reads
                    if is_not_elementwise
                    else operands_not_elementwise(maker.root, False)
                )
                stack += [
                    (x, maker.root, x in makers_not_elementwise) for x in reversed(maker.reads)
                ]
            else:
                for operand, steps in maker.reads.items():
                    readers.setdefault(operand, []).extend(steps)
                not_elementwise.update(maker.reads if is_not_elementwise else maker.not_elementwise)
        reads = {x: tuple(s if len(s) == 1 else dict.fromkeys(s)) for x, s in readers.items()}
        return reads, frozenset(not_elementwise)

    def _fused_maker(self, value: FlatValue) -> FusionGroup | None:
        """Return the group that makes a value if it is fused into the readers, else None."""
        return self.by_root[value.maker] if value.maker and value in self._fused else None

    def _is_expensive(self, step: FlatStep) -> bool:
        """Return whether a step is too expensive to be computed again in several readers.

        These are slow functions, reductions, gathers, and elementwise operations on 16-bit floats
        where XLA computes with 32-bit floats.
        """
        is_widened = (
            self.profile.widens_products
            and is_pointwise(step)
            and is_16_bit(step.eqn.outvars[0].aval)
        )
        is_slow = step.traits.expensive or step.primitive is lax.gather_p
        return is_widened or is_slow or _is_reduction(step)

    def _forbid_large_reads(self, steps: Sequence[FlatStep]) -> None:
        """Forbid the fusion of steps that read more than they make, if a path cannot be fused.

        A path leads from the step to one of its readers. The results of these steps are removed
        from `_fusible`, the values that may be fused.
        """
        dependences = self._dependences(steps)
        for step in reversed(steps):
            value = step.results[0]
            if value not in self._fusible or not self._reads_more(step):
                continue
            known: dict[FlatStep, bool] = {step: True}
            users = self.users.get(value, {})
            if value in self.outputs or not all(
                self._fuses_on_all_paths(step, u, dependences, known) for u in users
            ):
                self._fusible.remove(value)

    def _reads_more(self, step: FlatStep) -> bool:
        """Return whether a step reads more elements than it makes.

        This is False unless the step reads several arrays of at least the rank of the result. Axes
        of length one do not count in the rank.
        """
        if step.primitive is barrier_p or len(step.operands) < 2:
            return False
        value = step.results[0]
        rank = lambda x: sum(n != 1 for n in x.shape)
        if sum(rank(x) >= rank(value) and not self._is_broadcast(x) for x in step.operands) <= 1:
            return False
        # A transposed value that is several operands counts several times: XLA has one transpose
        # for each operand.
        transposed = [x for x in step.operands if x.maker and x.maker.primitive is lax.transpose_p]
        others = dict.fromkeys(x for x in step.operands if x not in transposed)
        return sum(math.prod(x.shape) for x in (*transposed, *others)) > math.prod(value.shape)

    def _is_broadcast(self, value: FlatValue) -> bool:
        """Return whether a value is a broadcast or an iota, which each reader computes itself."""
        step = value.maker
        if step is None or step not in self.by_root or self.by_root[step].call:
            return False
        return step.primitive in REPEATS or step.primitive is lax.iota_p

    def _dependences(self, steps: Sequence[FlatStep]) -> dict[FlatStep, int]:
        """Return for each step the steps that it depends on, as the bits of an integer.

        Bit `i` stands for the step `i` places before it, for `i` less than `_WINDOW`. Bit 0 is the
        step itself.
        """
        dependences: dict[FlatStep, int] = {}
        mask = (1 << _WINDOW) - 1
        for step in steps:
            bits = 1
            for x in self.by_root[step].reads:
                if x.maker:
                    distance = self.visit_index[step] - self.visit_index[x.maker]
                    bits |= dependences[x.maker] << distance
            dependences[step] = bits & mask
        return dependences

    def _depends(self, step: FlatStep, other: FlatStep, dependences: dict[FlatStep, int]) -> bool:
        """Return whether `step` depends on `other`, or is `other`.

        If `other` is `_WINDOW` or more steps before `step`, the dependence is not recorded, and the
        answer is True.
        """
        distance = self.visit_index[step] - self.visit_index[other]
        return distance >= _WINDOW or (distance >= 0 and bool(dependences[step] >> distance & 1))

    def _fuses_on_all_paths(
        self,
        producer: FlatStep,
        reader: FlatStep,
        dependences: dict[FlatStep, int],
        known: dict[FlatStep, bool],
    ) -> bool:
        """Return whether everything on all paths from a producer to a reader could be fused.

        `known` holds earlier answers, by reader, and True for the producer itself.
        """
        stack = [reader]
        while stack:
            group = self.by_root[stack[-1]]
            if group.root in known:
                stack.pop()
                continue
            makers = [
                x.maker
                for x in group.reads
                if x.maker and self._depends(x.maker, producer, dependences)
            ]
            unknown = [s for s in makers if s not in known]
            if (
                group.call
                or any(known.get(s) is False for s in makers)
                or not all(self._could_fuse(s.results[0], group.root) for s in makers)
            ):
                known[group.root] = False
            elif unknown:
                stack += unknown
            else:
                known[group.root] = True
        return known[reader]

    def _could_fuse(self, value: FlatValue, reader: FlatStep) -> bool:
        """Return whether a value could be fused into a reader, before any other fusion."""
        if value not in self._fusible or not self._can_absorb(reader):
            return False
        has_one_reader = len(self.users[value]) == 1 and value not in self.outputs
        is_read_once = has_one_reader and reader.primitive not in _REUSES_ELEMENTS
        return value not in self._expensive or is_read_once


def _is_large_concatenation(step: FlatStep) -> bool:
    """Return whether a step concatenates so many operands that XLA does not fuse it."""
    return step.primitive is lax.concatenate_p and len(step.operands) > _MOST_CONCATENATED


def _is_reduction(step: FlatStep) -> bool:
    """Return whether a step is a reduction, such as a sum."""
    return step.traits.fusion == "reduction"
