"""Which values are idle for long enough to be offloaded to the host.

The idle window of a value lasts from its last use in the forward part to its first use in the
backward part, in program order. Time is estimated as FLOPs at the peak speed of the device, so a
window is rather too short than too long. A value in the body of a loop, or in a function that is
called several times, has one decision for all iterations and calls. Its window is the mean of
theirs.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp

from xform._jax import JaxprEqn, Var, scan_p
from xform.interpret.cost import aval_bytes, device_flops
from xform.interpret.joint import Joint, Schedule, reads_of
from xform.interpret.node import Node, fork_p, gather, join_p
from xform.passes.dce import live
from xform.planner.costs.link import HostLink

_Times = tuple[list[float], list[float]]


@dataclasses.dataclass(frozen=True)
class OffloadableValues:
    """The values that may be offloaded to the host.

    Attributes:
      values: forward values, also of nested Joints, and states of scans. Each is idle for longer
        than its copies to the host and back take.
      seconds: the time of the forward part. All offloaded values share the link during this time.
    """

    values: frozenset[Var] = frozenset()
    seconds: float = 0.0


def offloadable_values(top: Schedule, link: HostLink | None) -> OffloadableValues:
    """Return the values of a Schedule that may be offloaded over a link. Linear in equations."""
    if link is None:
        return OffloadableValues()
    clock = _Clock(link)
    clock.visit(top, 0.0)
    fits = lambda v: clock.idle(v) >= 2 * link.seconds(aval_bytes(v.aval))
    values = frozenset(v for v in clock.windows if _is_movable(v) and fits(v))
    return OffloadableValues(values, sum(clock.times(top.joint)[0]))


def _is_movable(v: Var) -> bool:
    """Whether a value can be offloaded: PRNG keys and float0 values cannot."""
    dtype = getattr(v.aval, "dtype", jax.dtypes.float0)
    return dtype != jax.dtypes.float0 and not jnp.issubdtype(dtype, jax.dtypes.extended)


class _Clock:
    """The time of each equation, and the idle windows of each value, in seconds."""

    def __init__(self, link: HostLink):
        self.link = link
        self.windows: dict[Var, list[float]] = {}
        self._times: dict[Joint, _Times] = {}

    def idle(self, v: Var) -> float:
        """Return the mean of a value's idle windows."""
        return sum(self.windows[v]) / len(self.windows[v])

    def times(self, joint: Joint) -> _Times:
        """Return the seconds of each equation of the forward part and of the backward part."""
        if joint not in self._times:
            times = lambda equations: list(map(self._seconds, equations))
            self._times[joint] = times(joint.forward), times(joint.backward)
        return self._times[joint]

    def _seconds(self, eqn: JaxprEqn) -> float:
        if eqn.primitive not in (fork_p, join_p):
            return device_flops(eqn) / self.link.flops_per_second
        node, back = eqn.params["node"], eqn.primitive is join_p
        iteration = max((sum(self.times(joint)[back]) for joint in node.joints), default=0.0)
        return node.iterations * iteration

    def visit(self, schedule: Schedule, around: float, states: Iterable[Var] = ()) -> None:
        """Record the idle windows of the values of a Joint and of its nested Joints.

        Args:
          schedule: the Schedule of the Joint.
          around: seconds outside of the Joint, between its forward part and its backward part.
          states: inputs of the Joint that a loop stores in each iteration.
        """
        joint = schedule.joint
        forward, backward = self.times(joint)
        left = _sums_before(reversed(forward))[::-1]  # after each equation
        # A read counts only if an output depends on the equation. Other equations compute
        # coefficients for the backward part: at the end of the forward part, or in the backward
        # part if their operand is offloaded.
        outputs = {id(eqn) for eqn in live(joint.forward, joint.outputs, effects=False)}
        last = {v: i for i, eqn in enumerate(joint.forward)
                for v in (*(eqn.invars if id(eqn) in outputs else ()), *eqn.outvars)
                if isinstance(v, Var)}  # fmt: skip
        use = self._first_uses(schedule, _sums_before(backward))
        for v in (*joint.producer, *states):
            after = left[last[v]] if v in last else sum(forward)
            self.windows.setdefault(v, []).append(around + after + use.get(v, math.inf))
        for i, eqn in enumerate(joint.forward):
            # The branches of a cond share memory for their residuals, which cannot be offloaded.
            if eqn.primitive is not fork_p or len(schedule.inner[eqn.params["node"]]) != 1:
                continue
            node: Node = eqn.params["node"]
            (inner,), trips = schedule.inner[node], node.iterations
            iteration = sum(map(sum, self.times(inner.joint)))
            wait = left[i] + use.get(eqn.outvars[-1], 0.0)
            # On average, half of the other iterations run in between.
            self.visit(inner, around + wait + (trips - 1) / 2 * iteration, _states(node, inner))

    def _first_uses(self, schedule: Schedule, start: list[float]) -> dict[Var, float]:
        """When the backward part first reads each value, or a value computed from it."""
        joint = schedule.joint
        read: dict[Var, float] = {}
        for eqn, now in zip(joint.backward, start, strict=True):
            for v in reads_of(eqn, schedule.inner):
                read.setdefault(v, now)
        use = dict(read)
        for eqn in reversed(joint.forward):
            now = min((use[v] for v in eqn.outvars if v in use), default=math.inf)
            for v in eqn.invars:
                if isinstance(v, Var) and v not in read:
                    use[v] = min(use.get(v, math.inf), now)
        return use


def _states(node: Node, inner: Schedule) -> list[Var]:
    """The inputs of a scan's body that the scan stores in each iteration if they are read."""
    if node.eqn.primitive is not scan_p:
        return []
    inputs = inner.joint.inputs
    return gather(
        inputs, node.stacked_inputs([dataclasses.replace(inner, reads=(True,) * len(inputs))])
    )


def _sums_before(seconds: Iterable[float]) -> list[float]:
    """For each time in a sequence, the sum of the times before it."""
    sums = list(itertools.accumulate(seconds, initial=0.0))
    return sums[:-1]
