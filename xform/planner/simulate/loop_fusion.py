"""Fusion as XLA:CPU does it: loops over elements absorb the producers of their operands.

XLA goes from the last operation to the first. Each operation that is a loop over elements absorbs a
producer that is elementwise, a movement of data or a reduction:

- A cheap producer is repeated in all readers that are loops. It is also written if some readers are
  not loops.
- An expensive producer is fused only if all its readers are in one group.
- A producer that reads more elements than it makes is fused only if all paths to its readers fuse.
- A producer with a branch (such as a concatenation) is repeated only in loops of one operation.

The simulation decides about each step once: all loops that read its result absorb it, or none does.
So the operands of a group follow from the operands of its steps. For a step in one group they are
found on the way from that group's root. For a step in several groups they are found once for all.
Source: XLA's `instruction_fusion.cc` and `cpu_instruction_fusion.cc`.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence

from jax import lax

from xform.interpret.barrier import barrier_p
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

# A concatenation of more operands than this is a loop of its own.
_MOST_JOINED = 8
# The most reductions in one loop over elements.
_MOST_REDUCTIONS = 6
# How many steps back the dependences of a step are recorded.
_WINDOW = 4096
# Operations that read an element of an operand for several elements of the result.
_REUSES = (*REPEATS, lax.gather_p)
# Operations that compile to a branch inside a loop. Values computed in a branch cannot be reused
# after it, so a loop of several operations absorbs them for one reader only. Source: XLA's
# `fusion_node_indexing_evaluation.cc`.
_BRANCHES = (lax.concatenate_p, lax.pad_p, lax.dynamic_update_slice_p)


class LoopFusion(Fusion):
    """The groups of a flat program on XLA:CPU: loops over elements, library calls and others."""

    def fuse(self, steps: Sequence[FlatStep]) -> None:
        """Merge groups, the last first."""
        # The values that may be fused into their readers; and those of them that are expensive.
        self._fusible = {
            s.results[0]
            for s, g in self.by_root.items()
            if not (g.call or _is_large_concatenation(s))
        }
        self._expensive = {c for c in self._fusible if c.maker and self._is_expensive(c.maker)}
        self._forbid_large_reads(steps)
        # The values that were fused; and those that were fused into a single step and not written.
        self._fused, self._fused_once = set[FlatValue](), set[FlatValue]()
        # For each step, the root of the only group that it is in; None if it is in several.
        self._only_group: dict[FlatStep, FlatStep | None] = {}
        # The fused steps whose results are read for several elements in their group.
        self._reused = set[FlatStep]()
        # How many reductions each group contains.
        self._reductions = collections.Counter(s for s in steps if _reduces(s))
        written = {s: self._decide(self.by_root[s]) for s in reversed(steps)}
        for step in steps:
            if step.results[0] not in self._fused_once:
                self._collect(self.by_root[step])
        for step in steps:
            update = step.primitive is lax.dynamic_update_slice_p and not self.by_root[step].call
            if written[step] and update:
                _, self.by_root[step].not_elementwise = self._operands(step, True)
        self.by_root = {s: self.by_root[s] for s in steps if written[s]}

    def fused_place(self) -> dict[FlatStep, int]:
        """Return the number of each root in XLA's visiting order after fusion."""
        ends = [c.maker for c in self.outputs if c.maker]
        read = {c for g in self.groups for c in g.reads}
        ends += [g.root for g in self.groups if read.isdisjoint(g.root.results)]
        walked = post_order(ends, lambda s: self.by_root[s].operands(self.place))
        return {s: i for i, s in enumerate(walked)}

    def _decide(self, group: FusionGroup) -> bool:
        """Decide into which groups a step is fused. Return whether its result is written.

        The readers of the step are decided already.
        """
        step, value = group.root, group.root.results[0]
        users = self.users.get(value, {}) if value in self._fusible else {}
        absorbers = [u for u in users if self._absorbs(u)]
        homes = {self._only_group[u] for u in absorbers}
        home = homes.pop() if len(homes) == 1 else None
        written = value in self.outputs or len(absorbers) < len(users) or not absorbers
        if value in self._expensive and (written or not self._joins(step, absorbers, home)):
            absorbers, written = [], True
        if step.primitive in _BRANCHES and not self._branch_fuses(value, absorbers):
            absorbers, written = [], True
        self._only_group[step] = step if not absorbers else None if written else home
        if absorbers:
            self._fused.add(value)
            if len(absorbers) == 1 and not written:
                self._fused_once.add(value)
        for u in absorbers:
            self.by_root[u].alone = False
            if self._only_group[step] and (u.primitive in _REUSES or u in self._reused):
                self._reused.add(step)
        return written

    def _branch_fuses(self, value: FlatValue, absorbers: Sequence[FlatStep]) -> bool:
        """Whether a step with a branch can be fused into all its readers.

        A reader must be a loop of one step, or the only reader that is left.
        """
        left = len(self.users.get(value, ())) + (value in self.outputs)
        for u in sorted(absorbers, key=self.place.__getitem__, reverse=True):
            alone = self._only_group[u] is u and self.by_root[u].alone
            if not alone and (left > 1 or self._only_group[u] is None):
                return False
            left -= 1
        return True

    def _joins(self, step: FlatStep, absorbers: Sequence[FlatStep], home: FlatStep | None) -> bool:
        """Whether an expensive step is fused: all its readers must be in one group, `home`."""
        if home is None or any(u.primitive in _REUSES or u in self._reused for u in absorbers):
            return False
        if _reduces(step):
            if len(absorbers) > 1:  # like an operation with a branch
                return False
            if not self.by_root[home].alone and self._reductions[home] >= _MOST_REDUCTIONS:
                return False
            self._reductions[home] += 1
        return True

    def _absorbs(self, reader: FlatStep) -> bool:
        """Whether a reader is a loop that can absorb producers."""
        return not self.by_root[reader].call and not _is_large_concatenation(reader)

    def _collect(self, group: FusionGroup) -> None:
        """Find the operands of a group, after those of all steps in several groups are known."""
        updates = group.root.primitive is lax.dynamic_update_slice_p
        if self._absorbs(group.root) and (updates or not group.alone):
            group.reads, group.not_elementwise = self._operands(group.root, False)

    def _operands(
        self, root: FlatStep, last: bool
    ) -> tuple[dict[FlatValue, tuple[FlatStep, ...]], frozenset[FlatValue]]:
        """The operands of a group, each with its readers, and those not read element by element.

        `last` is passed to `operands_not_elementwise`.
        """
        not_by_element = operands_not_elementwise(root, last)
        if len(own := self.by_root[root].reads) == 1:
            (value,) = own
            if (maker := self._maker(value)) and value not in self._fused_once:
                all_not_elementwise = value in not_by_element
                return maker.reads, frozenset(
                    maker.reads
                ) if all_not_elementwise else maker.not_elementwise
        reads: dict[FlatValue, list[FlatStep]] = {}
        not_elementwise = set[FlatValue]()
        todo = [(c, root, c in not_by_element) for c in reversed(own)]
        while todo:
            value, reader, is_not_elementwise = todo.pop()
            maker = self._maker(value)
            if maker is None:
                reads.setdefault(value, []).append(reader)
                not_elementwise.update((value,) if is_not_elementwise else ())
            elif value in self._fused_once:
                operands = (
                    maker.reads
                    if is_not_elementwise
                    else operands_not_elementwise(maker.root, False)
                )
                todo += [(c, maker.root, c in operands) for c in reversed(maker.reads)]
            else:
                for c, steps in maker.reads.items():
                    reads.setdefault(c, []).extend(steps)
                not_elementwise.update(maker.reads if is_not_elementwise else maker.not_elementwise)
        by = {c: tuple(s if len(s) == 1 else dict.fromkeys(s)) for c, s in reads.items()}
        return by, frozenset(not_elementwise)

    def _maker(self, value: FlatValue) -> FusionGroup | None:
        """The group that makes a value, if it was fused into the readers; else None."""
        return self.by_root[value.maker] if value.maker and value in self._fused else None

    def _is_expensive(self, step: FlatStep) -> bool:
        """Whether a step is too expensive to be repeated in several readers.

        Slow operations, reductions, gathers, and operations with a widened 16-bit result are.
        """
        small = (
            self.profile.widens_products
            and is_pointwise(step)
            and is_16_bit(step.eqn.outvars[0].aval)
        )
        return small or step.traits.expensive or _reduces(step) or step.primitive is lax.gather_p

    def _forbid_large_reads(self, steps: Sequence[FlatStep]) -> None:
        """Forbid to fuse a step that reads more than it makes, unless all paths to it fuse."""
        reach = self._dependences(steps)
        for step in reversed(steps):
            value = step.results[0]
            if value not in self._fusible or not self._reads_more(step):
                continue
            known: dict[FlatStep, bool] = {step: True}
            users = self.users.get(value, {})
            if value in self.outputs or not all(
                self._on_all_paths(step, u, reach, known) for u in users
            ):
                self._fusible.remove(value)

    def _reads_more(self, step: FlatStep) -> bool:
        """Whether a step reads several arrays of the result's rank, and more elements in total."""
        if step.primitive is barrier_p or len(step.operands) < 2:
            return False
        value = step.results[0]
        rank = lambda c: sum(n != 1 for n in c.shape)
        if sum(rank(c) >= rank(value) and not self._is_broadcast(c) for c in step.operands) <= 1:
            return False
        # A transposed value is copied for each operand.
        turned = [c for c in step.operands if c.maker and c.maker.primitive is lax.transpose_p]
        others = dict.fromkeys(c for c in step.operands if c not in turned)
        return sum(math.prod(c.shape) for c in (*turned, *others)) > math.prod(value.shape)

    def _is_broadcast(self, value: FlatValue) -> bool:
        """Whether a value is a broadcast or an iota, which each reader computes for itself."""
        step = value.maker
        if step is None or step not in self.by_root or self.by_root[step].call:
            return False
        return step.primitive in REPEATS or step.primitive is lax.iota_p

    def _dependences(self, steps: Sequence[FlatStep]) -> dict[FlatStep, int]:
        """For each step, the steps that it depends on, as bits.

        Bit `i` stands for the step `i` places before it, for `i` less than `_WINDOW`. Bit 0 is the
        step itself.
        """
        reach: dict[FlatStep, int] = {}
        mask = (1 << _WINDOW) - 1
        for step in steps:
            bits = 1
            for c in self.by_root[step].reads:
                if c.maker:
                    bits |= reach[c.maker] << (self.place[step] - self.place[c.maker])
            reach[step] = bits & mask
        return reach

    def _depends(self, step: FlatStep, first: FlatStep, reach: dict[FlatStep, int]) -> bool:
        """Whether `step` depends on `first`. Assumed if they are at least `_WINDOW` steps apart."""
        distance = self.place[step] - self.place[first]
        return distance >= _WINDOW or (distance >= 0 and bool(reach[step] >> distance & 1))

    def _on_all_paths(self, maker: FlatStep, reader: FlatStep, reach: dict[FlatStep, int],
                      known: dict[FlatStep, bool]) -> bool:  # fmt: skip
        """Whether a step could be fused into a reader along all paths.

        `known` caches the answers for readers, and contains the step itself.
        """
        todo = [reader]
        while todo:
            group = self.by_root[todo[-1]]
            if group.root in known:
                todo.pop()
                continue
            on = [c.maker for c in group.reads if c.maker and self._depends(c.maker, maker, reach)]
            late = [s for s in on if s not in known]
            if (
                group.call
                or any(known.get(s) is False for s in on)
                or not all(self._could_fuse(s.results[0], group.root) for s in on)
            ):
                known[group.root] = False
            elif late:
                todo += late
            else:
                known[group.root] = True
        return known[reader]

    def _could_fuse(self, value: FlatValue, reader: FlatStep) -> bool:
        """Whether the maker of a value could be fused into a reader, before any other fusion."""
        if value not in self._fusible or not self._absorbs(reader):
            return False
        only = len(self.users[value]) == 1 and value not in self.outputs
        return value not in self._expensive or (only and reader.primitive not in _REUSES)


def _is_large_concatenation(step: FlatStep) -> bool:
    """Whether a step is a concatenation of so many operands that it is a loop of its own."""
    return step.primitive is lax.concatenate_p and len(step.operands) > _MOST_JOINED


def _reduces(step: FlatStep) -> bool:
    return step.traits.fusion == "reduction"
