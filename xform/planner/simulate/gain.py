"""Fusion on GPUs and TPUs: an operation is fused into all of its readers, or its result is written.

These are the rules of XLA:GPU. TPUs are simulated by the same rules, with the constants of a TPU
(`profiles.py`). `tests/planner/simulate/test_chips.py` compares both simulations with XLA. Fused
operations form a group, which runs as one operation. Its last operation is the root (`fusion.py`).

An operation is fused if that saves time, and the operation that saves most goes first. The saved
time is called the gain. It is expressed as the number of bytes that the memory could move in that
time. Arithmetic does not count, because the memory limits the speed of kernels. The gain of fusing
an operation into all its readers is the sum of

- the start of one kernel (`Profile.kernel_bytes`),
- the bytes that the operation reads, and the bytes of its result, which is no longer written,
- for each reader, the bytes of that result, which is no longer read, minus the bytes of those
  operands of the operation that the reader did not read before.

A value is written to memory or computed in each reader, never both, except for a reshape. A
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

# A reduction counts as elementwise if it reads fewer elements than this for one element of its
# result.
_LEAST_REDUCED = 16


class GainFusion(Fusion):
    """The fused groups of a program on GPUs and TPUs.

    Each step starts as a group of its own. A fused group is removed, and its steps become members
    of the groups that read it.
    """

    def fuse(self, steps: Sequence[FlatStep]) -> None:
        """Fuse groups into their readers, the largest gain first."""
        # The steps of each group, by its root.
        self._members = {s: {s: None} for s in steps}
        # The current gain of each group, by its root; and a queue of (minus gain, minus visit
        # index, root). A step's visit index is its position in the order in which XLA would visit
        # the steps. A queue entry is outdated if its gain is not the current one.
        self._gains = dict[FlatStep, float]()
        self._queue: list[tuple[float, int, FlatStep]] = []
        for step in reversed(steps):
            if step.primitive is lax.reshape_p:
                self._fuse_reshape(self.by_root[step])
        for step in steps:
            if step in self.by_root:
                self._update_gain(self.by_root[step])
        while self._queue:
            gain, _, step = heapq.heappop(self._queue)
            group = self.by_root.get(step)
            if group is None or self._gains.get(step) != -gain:
                continue
            value = step.results[0]
            readers = [self.by_root[s] for s in self.users[value]]
            for reader in readers:
                self._fuse_into(reader, value, group)
            self._update_gains(readers)
        for group in self.by_root.values():
            if not group.alone:
                members = self._members[group.root]
                order = sorted(members, key=self.visit_index.__getitem__, reverse=True)
                group.not_elementwise = reads_not_elementwise(order)

    def _fuse_reshape(self, group: FusionGroup) -> None:
        """Fuse a reshape, which takes no time, into all groups that read it.

        Groups that are not loops over elements, such as library calls, absorb nothing.
        """
        value = group.root.results[0]
        for step in tuple(self.users.get(value, ())):
            if not self.by_root[step].call:
                self._fuse_into(self.by_root[step], value, group)

    def _fuse_into(self, reader: FusionGroup, value: FlatValue, maker: FusionGroup) -> None:
        """Fuse the group `maker` of a value into one reader. Remove it after its last reader."""
        del reader.reads[value]
        reader.alone = False
        self._members[reader.root].update(self._members[maker.root])
        del self.users[value][reader.root]
        for operand in maker.reads:
            reader.reads[operand] = ()
            self.users[operand][reader.root] = None
        if not self.users[value] and value not in self.outputs:
            del self.by_root[maker.root]
            for operand in maker.reads:
                del self.users[operand][maker.root]

    def _update_gains(self, changed: list[FusionGroup]) -> None:
        """Compute the gains of changed groups again, and of the groups that make their operands."""
        makers = [self.by_root[x.maker] for g in changed for x in g.reads if x.maker]
        for group in dict.fromkeys((*changed, *makers)):
            self._update_gain(group)

    def _update_gain(self, group: FusionGroup) -> None:
        """Compute the gain of a group. Put the group into the queue if its gain is positive."""
        gain = self._gain(group)
        self._gains[group.root] = gain
        if gain > 0:
            heapq.heappush(self._queue, (-gain, -self.visit_index[group.root], group.root))

    def _gain(self, group: FusionGroup) -> float:
        """Return the gain of fusing a group into all its readers; 0 if XLA cannot fuse it."""
        value = group.root.results[0]
        users = self.users.get(value, {})
        if group.call or value in self.outputs or not users:
            return 0.0
        gain = self.profile.kernel_bytes + value.bytes + sum(x.bytes for x in group.reads)
        for step in users:
            reader = self.by_root[step]
            if reader.call or any(map(_is_reduction, self._members[group.root])):
                return 0.0
            gain += value.bytes - sum(x.bytes for x in group.reads if x not in reader.reads)
        return gain


def _is_reduction(step: FlatStep) -> bool:
    """Return whether a step reduces many elements to one."""
    if step.traits.fusion != "reduction" or not step.operands:
        return False
    n_read, n_written = (math.prod(x.shape) for x in (step.operands[0], step.results[0]))
    return n_read >= _LEAST_REDUCED * n_written
