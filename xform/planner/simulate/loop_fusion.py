"""Fusion as XLA:CPU does it: loops over elements take in what makes their operands.

From the last operation to the first, each takes in what makes its operands, if that is an operation
on elements, a movement or a reduction. A cheap one is repeated in all its readers, and then written
for those that are no loops only; a dear one goes into its only reader; one that reads more than it
makes is repeated nowhere, unless all paths to its readers fuse; one that branches is repeated in
loops that do nothing else.

Each step is looked at once: all groups that read what it makes take it in, or none of them, but for
those that are no loops. So what a group reads follows from what its steps read: of a step in one
group, as it is met on the way from that group's last step; of one in several, once for all.
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
    Group,
    pointwise,
    post_order,
    spoiled_operands,
)
from xform.planner.simulate.products import narrow
from xform.planner.simulate.steps import Cell, Step

# More operands than this and a concatenation is a loop of its own.
_MOST_JOINED = 8
# So many reductions may be in a loop over elements.
_MOST_REDUCTIONS = 6
# How far back it is looked which steps a step depends on.
_WINDOW = 4096
# What reads an element of an operand for several elements of its result.
_REUSES = (*REPEATS, lax.gather_p)
# What branches within a loop. What is computed before is not known after it, so that a loop of
# several operations takes it in for one reader only. Source: XLA's
# `fusion_node_indexing_evaluation.cc`.
_BRANCHES = (lax.concatenate_p, lax.pad_p, lax.dynamic_update_slice_p)


class LoopFusion(Fusion):
    """What is written of a flat program, by loops over elements."""

    def fuse(self, steps: Sequence[Step]) -> None:
        """Let groups take in others: the last first."""
        # What may go into what reads it; of that, what goes into its only reader or none.
        self._loose = {s.makes[0] for s, g in self.by_root.items() if not (g.call or _many(s))}
        self._dear = {c for c in self._loose if c.maker and self._is_dear(c.maker)}
        self._keep_unrepeatable(steps)
        # What was taken in, and by a single step alone; of each step, the only group that it is in
        # (None: there are several); what is read for several elements there; and how many sums
        # each group holds.
        self._taken, self._passed = set[Cell](), set[Cell]()
        self._home: dict[Step, Step | None] = {}
        self._reused = set[Step]()
        self._sums = collections.Counter(s for s in steps if _reduces(s))
        written = {s: self._settle(self.by_root[s]) for s in reversed(steps)}
        for step in steps:
            if step.makes[0] not in self._passed:
                self._collect(self.by_root[step])
        for step in steps:
            update = step.does is lax.dynamic_update_slice_p and not self.by_root[step].call
            if written[step] and update:
                _, self.by_root[step].spoiled = self._behind(step, True)
        self.by_root = {s: self.by_root[s] for s in steps if written[s]}

    def fused_place(self) -> dict[Step, int]:
        """Of the last step of each group, when XLA comes to it after fusion."""
        ends = [c.maker for c in self.outputs if c.maker]
        read = {c for g in self.groups for c in g.reads}
        ends += [g.root for g in self.groups if read.isdisjoint(g.root.makes)]
        walked = post_order(ends, lambda s: self.by_root[s].operands(self.place))
        return {s: i for i, s in enumerate(walked)}

    def _settle(self, group: Group) -> bool:
        """Say which groups a step goes into, its readers being settled; whether it is written."""
        step, cell = group.root, group.root.makes[0]
        users = self.users.get(cell, {}) if cell in self._loose else {}
        takers = [u for u in users if self._takes(u)]
        homes = {self._home[u] for u in takers}
        home = homes.pop() if len(homes) == 1 else None
        written = cell in self.outputs or len(takers) < len(users) or not takers
        if cell in self._dear and (written or not self._goes_once(step, takers, home)):
            takers, written = [], True
        if step.does in _BRANCHES and not self._branches_once(cell, takers):
            takers, written = [], True
        self._home[step] = step if not takers else None if written else home
        if takers:
            self._taken.add(cell)
            if len(takers) == 1 and not written:
                self._passed.add(cell)
        for u in takers:
            self.by_root[u].alone = False
            if self._home[step] and (u.does in _REUSES or u in self._reused):
                self._reused.add(step)
        return written

    def _branches_once(self, cell: Cell, takers: Sequence[Step]) -> bool:
        """Whether what branches goes into all readers: loops of one step, or the only one left."""
        left = len(self.users.get(cell, ())) + (cell in self.outputs)
        for u in sorted(takers, key=self.place.__getitem__, reverse=True):
            alone = self._home[u] is u and self.by_root[u].alone
            if not alone and (left > 1 or self._home[u] is None):
                return False
            left -= 1
        return True

    def _goes_once(self, step: Step, takers: Sequence[Step], home: Step | None) -> bool:
        """Whether a dear step goes into the group in which all its readers are."""
        if home is None or any(u.does in _REUSES or u in self._reused for u in takers):
            return False
        if _reduces(step):
            if len(takers) > 1:  # it branches
                return False
            if not self.by_root[home].alone and self._sums[home] >= _MOST_REDUCTIONS:
                return False
            self._sums[home] += 1
        return True

    def _takes(self, reader: Step) -> bool:
        """Whether a reader is a loop that takes in operands."""
        return not self.by_root[reader].call and not _many(reader)

    def _collect(self, group: Group) -> None:
        """Find what a group reads, when that of what goes into several groups is known."""
        updates = group.root.does is lax.dynamic_update_slice_p
        if self._takes(group.root) and (updates or not group.alone):
            group.reads, group.spoiled = self._behind(group.root, False)

    def _behind(
        self, root: Step, last: bool
    ) -> tuple[dict[Cell, tuple[Step, ...]], frozenset[Cell]]:
        """What the group of a step reads, by which steps; and what not element by element."""
        lost = spoiled_operands(root, last)
        if len(own := self.by_root[root].reads) == 1:
            (cell,) = own
            if (maker := self._maker(cell)) and cell not in self._passed:
                return maker.reads, frozenset(maker.reads) if cell in lost else maker.spoiled
        reads: dict[Cell, list[Step]] = {}
        spoiled = set[Cell]()
        todo = [(c, root, c in lost) for c in reversed(own)]
        while todo:
            cell, reader, is_lost = todo.pop()
            maker = self._maker(cell)
            if maker is None:
                reads.setdefault(cell, []).append(reader)
                spoiled.update((cell,) if is_lost else ())
            elif cell in self._passed:
                lost = maker.reads if is_lost else spoiled_operands(maker.root, False)
                todo += [(c, maker.root, c in lost) for c in reversed(maker.reads)]
            else:
                for c, steps in maker.reads.items():
                    reads.setdefault(c, []).extend(steps)
                spoiled.update(maker.reads if is_lost else maker.spoiled)
        by = {c: tuple(s if len(s) == 1 else dict.fromkeys(s)) for c, s in reads.items()}
        return by, frozenset(spoiled)

    def _maker(self, cell: Cell) -> Group | None:
        """What was taken in with a value, if that is not read."""
        return self.by_root[cell.maker] if cell.maker and cell in self._taken else None

    def _is_dear(self, step: Step) -> bool:
        """Whether a step is not repeated: it takes long, or its numbers are widened."""
        small = self.profile.widens and pointwise(step) and narrow(step.eqn.outvars[0].aval)
        return small or step.of.dear or _reduces(step) or step.does is lax.gather_p

    def _keep_unrepeatable(self, steps: Sequence[Step]) -> None:
        """Let nothing take in what reads more than it makes, but where all paths to it fuse."""
        reach = self._reached(steps)
        for step in reversed(steps):
            cell = step.makes[0]
            if cell not in self._loose or not self._merges(step):
                continue
            known: dict[Step, bool] = {step: True}
            users = self.users.get(cell, {})
            if cell in self.outputs or not all(
                self._on_all_paths(step, u, reach, known) for u in users
            ):
                self._loose.remove(cell)

    def _merges(self, step: Step) -> bool:
        """Whether a step reads several values of its result's size, and more than it makes."""
        if step.does is barrier_p or len(step.reads) < 2:
            return False
        value = step.makes[0]
        rank = lambda c: sum(n != 1 for n in c.shape)
        if sum(rank(c) >= rank(value) and not self._repeat(c) for c in step.reads) <= 1:
            return False
        # A transposed value is copied for each operand.
        turned = [c for c in step.reads if c.maker and c.maker.does is lax.transpose_p]
        others = dict.fromkeys(c for c in step.reads if c not in turned)
        return sum(math.prod(c.shape) for c in (*turned, *others)) > math.prod(value.shape)

    def _repeat(self, cell: Cell) -> bool:
        """Whether a value is a repeated one, which every reader makes for itself."""
        step = cell.maker
        if step is None or step not in self.by_root or self.by_root[step].call:
            return False
        return step.does in REPEATS or step.does is lax.iota_p

    def _reached(self, steps: Sequence[Step]) -> dict[Step, int]:
        """For each step, how many places before it that is which it depends on, as bits.

        As far as `_WINDOW` places; itself is the lowest bit.
        """
        reach: dict[Step, int] = {}
        mask = (1 << _WINDOW) - 1
        for step in steps:
            bits = 1
            for c in self.by_root[step].reads:
                if c.maker:
                    bits |= reach[c.maker] << (self.place[step] - self.place[c.maker])
            reach[step] = bits & mask
        return reach

    def _depends(self, step: Step, first: Step, reach: dict[Step, int]) -> bool:
        """Whether a step depends on another; of what is far behind it, it is taken to."""
        far = self.place[step] - self.place[first]
        return far >= _WINDOW or (far >= 0 and bool(reach[step] >> far & 1))

    def _on_all_paths(self, maker: Step, reader: Step, reach: dict[Step, int],
                      known: dict[Step, bool]) -> bool:  # fmt: skip
        """Whether a step could go into a reader along all paths. Without recursion.

        `known` are the answers for readers that were looked at, the step itself among them.
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
                or not all(self._could_go(s.makes[0], group.root) for s in on)
            ):
                known[group.root] = False
            elif late:
                todo += late
            else:
                known[group.root] = True
        return known[reader]

    def _could_go(self, cell: Cell, reader: Step) -> bool:
        """Whether what makes a value could go into a reader of it, if neither has taken in any."""
        if cell not in self._loose or not self._takes(reader):
            return False
        only = len(self.users[cell]) == 1 and cell not in self.outputs
        return cell not in self._dear or (only and reader.does not in _REUSES)


def _many(step: Step) -> bool:
    """Whether a step is a concatenation that is a loop of its own."""
    return step.does is lax.concatenate_p and len(step.reads) > _MOST_JOINED


def _reduces(step: Step) -> bool:
    return step.of.fusion == "reduction"
