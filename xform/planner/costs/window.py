"""Which values lie idle for long enough to wait on the host: a window of time for each.

A value is idle from its last use in the forward part to its first in the backward part, along the
order of the program. Time is counted in FLOPs alone, at the most that the device does, so that
windows are rather too short. A value of a loop's body, or of a function that is called several
times, is decided once for all its trips and calls, and is given the mean of their windows.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp

from xform._jax import JaxprEqn, Var, scan_p
from xform.cost import aval_bytes, device_flops
from xform.interpret.joint import Joint, Schedule, reads_of
from xform.interpret.node import Node, fork_p, gather, join_p
from xform.passes.dce import live
from xform.planner.costs.link import Link

_Times = tuple[list[float], list[float]]


@dataclasses.dataclass(frozen=True)
class Room:
    """What may be sent to the host.

    Attributes:
      values: forward values, those of nested Joints included, and states of scans, that wait for
        longer than their way there and back takes.
      seconds: the time of the forward part, in which all that is sent shares the link.
    """

    values: frozenset[Var] = frozenset()
    seconds: float = 0.0


def room(top: Schedule, link: Link | None) -> Room:
    """The values of a Schedule's Joints that may be sent over a link. Linear in equations."""
    if link is None:
        return Room()
    clock = _Clock(link)
    clock.visit(top, 0.0)
    fits = lambda v: clock.idle(v) >= 2 * link.seconds(aval_bytes(v.aval))
    values = frozenset(v for v in clock.windows if _movable(v) and fits(v))
    return Room(values, sum(clock.times(top.joint)[0]))


def _movable(v: Var) -> bool:
    """Keys stay where they are: they are small, and of no plain type."""
    dtype = getattr(v.aval, "dtype", jax.dtypes.float0)
    return dtype != jax.dtypes.float0 and not jnp.issubdtype(dtype, jax.dtypes.extended)


class _Clock:
    def __init__(self, link: Link):
        self.link = link
        self.windows: dict[Var, list[float]] = {}
        self._times: dict[Joint, _Times] = {}

    def idle(self, v: Var) -> float:
        """The mean of a value's windows."""
        return sum(self.windows[v]) / len(self.windows[v])

    def times(self, joint: Joint) -> _Times:
        """Seconds of each equation of the forward and of the backward part."""
        if joint not in self._times:
            times = lambda equations: list(map(self._seconds, equations))
            self._times[joint] = times(joint.forward), times(joint.backward)
        return self._times[joint]

    def _seconds(self, eqn: JaxprEqn) -> float:
        if eqn.primitive not in (fork_p, join_p):
            return device_flops(eqn) / self.link.flops_per_second
        node, back = eqn.params["node"], eqn.primitive is join_p
        trip = max((sum(self.times(joint)[back]) for joint in node.joints), default=0.0)
        return node.trips * trip

    def visit(self, schedule: Schedule, around: float, states: Iterable[Var] = ()) -> None:
        """Note the windows of a Joint's values, and of those within; `around` is spent outside.

        `states` are inputs that are stored in each trip.
        """
        joint = schedule.joint
        forward, backward = self.times(joint)
        left = _before(reversed(forward))[::-1]  # after each equation
        # A factor of the backward part is made at the end; or there, if what makes it is sent.
        outputs = {id(eqn) for eqn in live(joint.forward, joint.outputs, effects=False)}
        last = {v: i for i, eqn in enumerate(joint.forward)
                for v in (*(eqn.invars if id(eqn) in outputs else ()), *eqn.outvars)
                if isinstance(v, Var)}  # fmt: skip
        use = self._first_uses(schedule, _before(backward))
        for v in (*joint.producer, *states):
            after = left[last[v]] if v in last else sum(forward)
            self.windows.setdefault(v, []).append(around + after + use.get(v, math.inf))
        for i, eqn in enumerate(joint.forward):
            # Branches hand on what they keep in shared memory, of which there is one kind.
            if eqn.primitive is not fork_p or len(schedule.inner[eqn.params["node"]]) != 1:
                continue
            node: Node = eqn.params["node"]
            (inner,), trips = schedule.inner[node], node.trips
            trip = sum(map(sum, self.times(inner.joint)))
            wait = left[i] + use.get(eqn.outvars[-1], 0.0)
            self.visit(inner, around + wait + (trips - 1) / 2 * trip, _states(node, inner))

    def _first_uses(self, schedule: Schedule, start: list[float]) -> dict[Var, float]:
        """When the backward part first reads each value, or what is made from it."""
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
    """The inputs of a scan's body that it stores in each trip, if they are read."""
    if node.eqn.primitive is not scan_p:
        return []
    inputs = inner.joint.inputs
    return gather(inputs, node.stacked([dataclasses.replace(inner, reads=(True,) * len(inputs))]))


def _before(seconds: Iterable[float]) -> list[float]:
    """For each of a row of times, the sum of those before it."""
    sums = list(itertools.accumulate(seconds, initial=0.0))
    return sums[:-1]
