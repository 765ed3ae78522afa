"""Find the values that are idle for long enough to be offloaded to the host.

A value is *offloaded* if it is copied to the host's memory in the forward pass and copied back in
the backward pass. It is idle from its last use in the forward pass to its first use in the backward
pass. This time is its idle window. It is estimated as the FLOPs in between at the peak speed of the
device, so the estimate is rather too short than too long.

A value in the body of a loop, or in a function that is called several times, has one decision for
all iterations and calls. This decision depends on the mean of the idle windows.

Words: a *Joint* is the forward and the backward pass of a program as one program; a *Schedule* says
which forward values are saved and which are recomputed; a *node* is a loop, branch or call in a
Joint, with Joints of its own. Its equation is `fork_p` in the forward pass, `join_p` in the
backward pass.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp

from xform._jax import JaxprEqn, Var
from xform.interpret.cost import aval_bytes, device_flops
from xform.interpret.joint import Joint, Schedule, reads_of
from xform.interpret.node import Node, fork_p, gather, join_p
from xform.passes.dce import live
from xform.planner.costs.link import HostLink

# The seconds of each equation of a Joint, in the forward pass and in the backward pass.
_Times = tuple[list[float], list[float]]


@dataclasses.dataclass(frozen=True)
class OffloadableValues:
    """The values that may be offloaded to the host.

    Attributes:
      values: values of the forward pass, also in nested Joints, and states of scans. Each is idle
        for at least the time of its copies to the host and back.
      seconds: the time of the forward pass. All copies to the host share the link in this time.
    """

    values: frozenset[Var] = frozenset()
    seconds: float = 0.0


def offloadable_values(top: Schedule, link: HostLink | None) -> OffloadableValues:
    """Return the values of a whole program's Schedule that may be offloaded over a link.

    Without a link, no value may be offloaded.

    Cost: linear in the number of equations.
    """
    if link is None:
        return OffloadableValues()
    clock = _Clock(link)
    clock.visit(top, 0.0)
    idle_enough = lambda v: clock.mean_window(v) >= 2 * link.seconds(aval_bytes(v.aval))
    values = frozenset(v for v in clock.windows if _can_be_copied(v) and idle_enough(v))
    return OffloadableValues(values, sum(clock.times(top.joint)[0]))


def _can_be_copied(v: Var) -> bool:
    """Return whether a value can be offloaded: PRNG keys and float0 values cannot."""
    dtype = getattr(v.aval, "dtype", jax.dtypes.float0)
    return dtype != jax.dtypes.float0 and not jnp.issubdtype(dtype, jax.dtypes.extended)


class _Clock:
    """The time of each equation, and the idle windows of each value, in seconds.

    Attributes:
      windows: the idle windows of each value: one for each visit of its Joint.
    """

    def __init__(self, link: HostLink):
        self.link = link
        self.windows: dict[Var, list[float]] = {}
        self._times: dict[Joint, _Times] = {}

    def mean_window(self, v: Var) -> float:
        """Return the mean of a value's idle windows."""
        return sum(self.windows[v]) / len(self.windows[v])

    def times(self, joint: Joint) -> _Times:
        """Return the seconds of each equation of the forward pass and of the backward pass."""
        if joint not in self._times:
            forward, backward = (map(self._seconds, e) for e in (joint.forward, joint.backward))
            self._times[joint] = list(forward), list(backward)
        return self._times[joint]

    def _seconds(self, eqn: JaxprEqn) -> float:
        """Return the seconds of one equation; for a node, of its forward or its backward pass."""
        if eqn.primitive not in (fork_p, join_p):
            return device_flops(eqn) / self.link.flops_per_second
        node, is_backward = eqn.params["node"], eqn.primitive is join_p
        iteration = max((sum(self.times(joint)[is_backward]) for joint in node.joints), default=0.0)
        return node.iterations * iteration

    def visit(self, schedule: Schedule, outside_seconds: float, states: Iterable[Var] = ()) -> None:
        """Record the idle windows of the values of a Joint and of its nested Joints.

        Args:
          schedule: the Schedule of the Joint.
          outside_seconds: the time between the end of the Joint's forward pass and the start of its
            backward pass.
          states: inputs of the Joint that a loop stores in each iteration.
        """
        joint = schedule.joint
        forward, backward = self.times(joint)
        seconds_after = _sums_before(reversed(forward))[::-1]
        # A read counts only if an output of the forward pass depends on the equation. Other
        # equations compute coefficients for the backward pass. They run at the end of the forward
        # pass, or in the backward pass if their operand is offloaded.
        outputs = {id(eqn) for eqn in live(joint.forward, joint.outputs, effects=False)}
        last_use = {v: i for i, eqn in enumerate(joint.forward)
                    for v in (*(eqn.invars if id(eqn) in outputs else ()), *eqn.outvars)
                    if isinstance(v, Var)}  # fmt: skip
        first_use = self._first_uses(schedule, _sums_before(backward))
        for v in (*joint.producer, *states):
            rest = seconds_after[last_use[v]] if v in last_use else sum(forward)
            window = outside_seconds + rest + first_use.get(v, math.inf)
            self.windows.setdefault(v, []).append(window)
        for i, eqn in enumerate(joint.forward):
            # The branches of a cond share memory for their residuals, which cannot be offloaded.
            if eqn.primitive is not fork_p or len(schedule.inner[eqn.params["node"]]) != 1:
                continue
            node: Node = eqn.params["node"]
            (inner,), trips = schedule.inner[node], node.iterations
            iteration = sum(map(sum, self.times(inner.joint)))
            wait = seconds_after[i] + first_use.get(eqn.outvars[-1], 0.0)
            # On average, half of the other iterations run in between.
            others = (trips - 1) / 2 * iteration
            self.visit(inner, outside_seconds + wait + others, _states(node, inner))

    def _first_uses(self, schedule: Schedule, start_times: list[float]) -> dict[Var, float]:
        """Return when the backward pass first reads each value, or a value computed from it.

        `start_times` are the seconds before each equation of the backward pass.
        """
        joint = schedule.joint
        read: dict[Var, float] = {}
        for eqn, now in zip(joint.backward, start_times, strict=True):
            for v in reads_of(eqn, schedule.inner):
                read.setdefault(v, now)
        first_use = dict(read)
        for eqn in reversed(joint.forward):
            now = min((first_use[v] for v in eqn.outvars if v in first_use), default=math.inf)
            for v in eqn.invars:
                if isinstance(v, Var) and v not in read:
                    first_use[v] = min(first_use.get(v, math.inf), now)
        return first_use


def _states(node: Node, inner: Schedule) -> list[Var]:
    """Return the inputs of a scan's body that the scan stores in each iteration if they are read.

    The result is empty for any other node.
    """
    if not node.loop or node.unknown_length:
        return []
    inputs = inner.joint.inputs
    return gather(
        inputs, node.stacked_inputs([dataclasses.replace(inner, reads=(True,) * len(inputs))])
    )


def _sums_before(seconds: Iterable[float]) -> list[float]:
    """Return for each time in a sequence the sum of the times before it."""
    sums = list(itertools.accumulate(seconds, initial=0.0))
    return sums[:-1]
