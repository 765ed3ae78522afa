"""Fusion where it saves time: an operation goes into all of its readers, or is written.

XLA:GPU takes the producer first of which most time is saved: a kernel less, what it writes and what
its readers read of it, against what each of them then reads instead. No operation is dear, as
kernels wait for memory. What is written is computed nowhere again, but for a value in another
shape; a reduction is always written.
Source: XLA's `priority_fusion.cc` and `gpu_performance_model.cc`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from jax import lax

from xform.planner.simulate.fusion import Fusion, Group, spoiled
from xform.planner.simulate.steps import Cell, Step

# A reduction of fewer elements to one is an operation on elements.
_SMALL_REDUCTION = 16


class GainFusion(Fusion):
    """What is written of a flat program, by gain."""

    def fuse(self, steps: Sequence[Step]) -> None:
        """Let groups take in others: that first of which most time is saved."""
        self._members = {s: {s: None} for s in steps}
        self._gains = dict[Step, float]()
        self._queue: list[tuple[float, int, Step]] = []
        for step in reversed(steps):
            if step.does is lax.reshape_p:
                self._repeat_view(self.by_root[step])
        for step in steps:
            if step in self.by_root:
                self._note(self.by_root[step])
        while self._queue:
            gain, _, step = heapq.heappop(self._queue)
            group = self.by_root.get(step)
            if group is None or self._gains.get(step) != -gain:
                continue
            cell = step.makes[0]
            readers = [self.by_root[s] for s in self.users[cell]]
            for reader in readers:
                self._take(reader, cell, group)
            self._renew(readers)
        for group in self.by_root.values():
            if not group.alone:
                members = self._members[group.root]
                order = sorted(members, key=self.place.__getitem__, reverse=True)
                group.spoiled = spoiled(order)

    def _repeat_view(self, group: Group) -> None:
        """Let a value in another shape, which takes no time, go into the loops that read it."""
        cell = group.root.makes[0]
        for step in tuple(self.users.get(cell, ())):
            if not self.by_root[step].call:
                self._take(self.by_root[step], cell, group)

    def _take(self, reader: Group, cell: Cell, maker: Group) -> None:
        """Let a group take in what makes a value; that is dropped when no group is left."""
        del reader.reads[cell]
        reader.alone = False
        self._members[reader.root].update(self._members[maker.root])
        del self.users[cell][reader.root]
        for c in maker.reads:
            reader.reads[c] = ()
            self.users[c][reader.root] = None
        if not self.users[cell] and cell not in self.outputs:
            del self.by_root[maker.root]
            for c in maker.reads:
                del self.users[c][maker.root]

    def _renew(self, changed: list[Group]) -> None:
        """Note the gains of groups, and of what makes what they read."""
        makers = [self.by_root[c.maker] for g in changed for c in g.reads if c.maker]
        for group in dict.fromkeys((*changed, *makers)):
            self._note(group)

    def _note(self, group: Group) -> None:
        gain = self._gain(group)
        self._gains[group.root] = gain
        if gain > 0:
            heapq.heappush(self._queue, (-gain, -self.place[group.root], group.root))

    def _gain(self, group: Group) -> float:
        """Bytes of memory's time that are saved if what a group makes is not written."""
        cell = group.root.makes[0]
        users = self.users.get(cell, {})
        if group.call or cell in self.outputs or not users:
            return 0.0
        gain = self.profile.kernel + cell.bytes + sum(c.bytes for c in group.reads)
        for step in users:
            reader = self.by_root[step]
            if reader.call or any(map(_reduces, self._members[group.root])):
                return 0.0
            gain += cell.bytes - sum(c.bytes for c in group.reads if c not in reader.reads)
        return gain


def _reduces(step: Step) -> bool:
    """Whether a step sums many elements to one."""
    if step.of.fusion != "reduction" or not step.reads:
        return False
    sizes = [math.prod(c.shape) for c in (step.reads[0], step.makes[0])]
    return sizes[0] >= _SMALL_REDUCTION * sizes[1]
