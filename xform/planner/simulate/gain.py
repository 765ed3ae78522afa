"""Fusion by gain, as XLA:GPU does it: an operation is fused into all of its readers, or written.

XLA:GPU fuses the producer with the largest gain in time first. The gain is one kernel launch, the
bytes that the producer reads and writes, and the bytes that its readers read from it, minus the
bytes that each reader must read instead. The work of an operation does not count, because kernels
are limited by memory. A written value is never computed again in a reader, except for a reshape. A
reduction is always written.
Source: XLA's `priority_fusion.cc` and `gpu_performance_model.cc`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from jax import lax

from xform.planner.simulate.fusion import Fusion, FusionGroup, reads_not_elementwise
from xform.planner.simulate.steps import FlatStep, FlatValue

# A reduction of fewer elements to one counts as elementwise.
_SMALL_REDUCTION = 16


class GainFusion(Fusion):
    """The groups of a flat program on GPUs and TPUs, fused by gain."""

    def fuse(self, steps: Sequence[FlatStep]) -> None:
        """Merge groups, the largest gain first."""
        self._members = {s: {s: None} for s in steps}
        self._gains = dict[FlatStep, float]()
        self._queue: list[tuple[float, int, FlatStep]] = []
        for step in reversed(steps):
            if step.primitive is lax.reshape_p:
                self._fuse_reshape(self.by_root[step])
        for step in steps:
            if step in self.by_root:
                self._record(self.by_root[step])
        while self._queue:
            gain, _, step = heapq.heappop(self._queue)
            group = self.by_root.get(step)
            if group is None or self._gains.get(step) != -gain:
                continue
            value = step.results[0]
            readers = [self.by_root[s] for s in self.users[value]]
            for reader in readers:
                self._fuse_into(reader, value, group)
            self._update(readers)
        for group in self.by_root.values():
            if not group.alone:
                members = self._members[group.root]
                order = sorted(members, key=self.place.__getitem__, reverse=True)
                group.not_elementwise = reads_not_elementwise(order)

    def _fuse_reshape(self, group: FusionGroup) -> None:
        """Fuse a reshape, which takes no time, into all loops that read it."""
        value = group.root.results[0]
        for step in tuple(self.users.get(value, ())):
            if not self.by_root[step].call:
                self._fuse_into(self.by_root[step], value, group)

    def _fuse_into(self, reader: FusionGroup, value: FlatValue, maker: FusionGroup) -> None:
        """Fuse the maker of a value into one reader. Drop it when no reader is left."""
        del reader.reads[value]
        reader.alone = False
        self._members[reader.root].update(self._members[maker.root])
        del self.users[value][reader.root]
        for c in maker.reads:
            reader.reads[c] = ()
            self.users[c][reader.root] = None
        if not self.users[value] and value not in self.outputs:
            del self.by_root[maker.root]
            for c in maker.reads:
                del self.users[c][maker.root]

    def _update(self, changed: list[FusionGroup]) -> None:
        """Update the gains of changed groups, and of the groups that make their operands."""
        makers = [self.by_root[c.maker] for g in changed for c in g.reads if c.maker]
        for group in dict.fromkeys((*changed, *makers)):
            self._record(group)

    def _record(self, group: FusionGroup) -> None:
        """Record the gain of a group. Put the group into the queue if it is positive."""
        gain = self._gain(group)
        self._gains[group.root] = gain
        if gain > 0:
            heapq.heappush(self._queue, (-gain, -self.place[group.root], group.root))

    def _gain(self, group: FusionGroup) -> float:
        """The time saved if a group is fused into its readers, in bytes that the memory moves."""
        value = group.root.results[0]
        users = self.users.get(value, {})
        if group.call or value in self.outputs or not users:
            return 0.0
        gain = self.profile.kernel_bytes + value.bytes + sum(c.bytes for c in group.reads)
        for step in users:
            reader = self.by_root[step]
            if reader.call or any(map(_reduces, self._members[group.root])):
                return 0.0
            gain += value.bytes - sum(c.bytes for c in group.reads if c not in reader.reads)
        return gain


def _reduces(step: FlatStep) -> bool:
    """Whether a step reduces many elements to one."""
    if step.traits.fusion != "reduction" or not step.operands:
        return False
    sizes = [math.prod(c.shape) for c in (step.operands[0], step.results[0])]
    return sizes[0] >= _SMALL_REDUCTION * sizes[1]
