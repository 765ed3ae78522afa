"""Walk over the equations of both parts of a Joint under a Schedule.

The walk knows the order of the equations. It knows which values are saved, sent to the host,
written to memory or made to wait, and which parts of loops and calls are needed. A back end decides
what to do with each equation: `emit` runs it in the current trace, and the simulator adds its steps
to a flat program.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from xform._jax import JaxprEqn, Var
from xform.interpret.barrier import Where
from xform.interpret.joint import Schedule, reads_of
from xform.interpret.must_materialize import must_materialize
from xform.interpret.node import fork_p, gather, join_p, spread
from xform.interpret.shared import shared_values
from xform.interpret.wait import Wait, Waits, find_waits
from xform.passes.dce import live
from xform.program.ir import Mask, Program

# Values by variable: arrays, tracers, or the values of another back end.
Environment = dict[Var, Any]


class BackEnd(abc.ABC):
    """How to process the equations of one part of a Joint.

    Attributes:
      staged: whether operations become a program. If not, they run one by one. Then values are
        freed after their last use, and no value is written to memory for the compiler.
    """

    staged: bool = True

    @abc.abstractmethod
    def read(self, env: Environment, v: Any) -> Any:
        """Return the value of a variable or literal."""

    @abc.abstractmethod
    def constants(self, prog: Program) -> Mapping[Var, Any]:
        """Return the values that a program closes over."""

    @abc.abstractmethod
    def results(self, eqn: JaxprEqn, xs: list[Any]) -> Sequence[Any]:
        """Return the results of an equation."""

    @abc.abstractmethod
    def fork(
        self, eqn: JaxprEqn, schedules: Sequence[Schedule], xs: list[Any], used: Mask
    ) -> list[Any]:
        """Run a node's forward part; return its outputs and its token, None where not `used`."""

    @abc.abstractmethod
    def join(self, eqn: JaxprEqn, schedules: Sequence[Schedule], token: Any, xs: list[Any],
             seeds: list[Any], together: bool) -> list[Any]:  # fmt: skip
        """Run a node's backward part; return the results.

        `xs` are the inputs that it reads, with None for others, and `seeds` are the given seeds.
        `together` says that its forward part is in the same computation.
        """

    @abc.abstractmethod
    def delay(self, wait: Wait, saved: list[Any], seeds: list[Any]) -> Sequence[Any]:
        """Return saved values that wait for cotangents."""

    @abc.abstractmethod
    def materialize(self, eqn: JaxprEqn, x: Any, where: Where) -> Any:
        """Return a result of an equation, written to memory on some backends."""

    @abc.abstractmethod
    def transfer(self, schedule: Schedule, v: Var, x: Any, back: bool) -> Any:
        """Return an offloaded value after a move to the memory where it waits, or `back`."""


def forward(
    schedule: Schedule, by: BackEnd, args: Sequence[Any], used: Mask | None = None
) -> tuple[list[Any], list[Any]]:
    """Run the forward part; return its outputs (None where not `used`) and the saved values."""
    joint = schedule.joint
    used = used or (True,) * len(joint.outputs)
    outputs = gather(joint.outputs, used)
    env = dict(zip(joint.inputs, args, strict=True))
    walk = _ScheduleWalk(schedule, by, env)
    out = walk.values(
        [*outputs, *schedule.saved], must_materialize(schedule) if by.staged else {}, sends=True
    )
    kept = [walk.sent.get(v, x) for v, x in zip(schedule.saved, out[len(outputs) :], strict=True)]
    return spread(out[: len(outputs)], used), kept


def values(
    schedule: Schedule, by: BackEnd, wanted: Sequence[Any], env: Environment, effects: bool = True
) -> list[Any]:
    """Compute forward values of a Joint from those in `env` (its inputs, and any others known)."""
    return _ScheduleWalk(schedule, by, dict(env)).values(wanted, effects=effects)


def backward(schedule: Schedule, by: BackEnd, kept: Sequence[Any], args: Sequence[Any],
             seeds: Sequence[Any], together: bool, whole: bool) -> list[Any]:  # fmt: skip
    """Run the backward part on saved values, the inputs that it reads, and seeds.

    `together` says that the forward part is in the same computation. `whole` says that the Joint is
    a whole function or the body of a loop, see `find_waits`.
    """
    joint = schedule.joint
    env = _SavedValues(schedule, by, kept)
    env.update(by.constants(joint.program))
    env.update(zip(joint.inputs, args, strict=True))
    env.update(zip(joint.seeds, seeds, strict=True))
    places = find_waits(schedule, whole, together) if together or whole else {}
    stays = must_materialize(schedule) if places and by.staged else {}
    if together and whole and by.staged:
        stays = shared_values(schedule) | stays
    walk = _ScheduleWalk(schedule, by, env, schedule.inner if together else ())
    walk.run(schedule.order, joint.backward_outputs, stays, places)
    return [by.read(env, v) for v in joint.backward_outputs]


class _SavedValues(Environment):
    """An environment with the saved values; an offloaded one returns when it is first read."""

    def __init__(self, schedule: Schedule, by: BackEnd, kept: Sequence[Any]):
        self._schedule, self._by = schedule, by
        self._kept = dict(zip(schedule.saved, kept, strict=True))

    def __missing__(self, v: Var) -> Any:
        if v not in self._kept:
            self[v] = self[self._schedule.joint.named_copy[v]]
        elif v in self._schedule.offloaded:
            self[v] = self._by.transfer(self._schedule, v, self._kept[v], back=True)
        else:
            self[v] = self._kept[v]
        return self[v]


class _ScheduleWalk:
    """A walk over equations of one part.

    Attributes:
      env: the values of variables so far.
      forked: the nodes whose forward part is in this computation.
      sent: the offloaded values, in the memory where they wait.
    """

    def __init__(
        self, schedule: Schedule, by: BackEnd, env: Environment, forked: Iterable[Any] = ()
    ):
        self.schedule, self.by, self.env = schedule, by, env
        self.forked = set(forked)
        self.sent: Environment = {}

    def values(
        self,
        wanted: Sequence[Any],
        stays: Mapping[Var, Where] | None = None,
        effects: bool = True,
        sends: bool = False,
    ) -> list[Any]:
        """Compute forward values by the equations that lead from known values to them."""
        joint = self.schedule.joint
        equations = live(joint.forward, wanted, self.env, effects)
        self.env |= self.by.constants(joint.program)
        self.run(equations, wanted, stays or {}, sends=sends)
        return [self.by.read(self.env, v) for v in wanted]

    def run(
        self,
        equations: Sequence[JaxprEqn],
        wanted: Iterable[Any],
        stays: Mapping[Var, Where],
        places: Waits | None = None,
        sends: bool = False,
    ) -> None:
        """Process equations in order.

        Results in `stays` are written to memory. At each of `places`, values wait for cotangents.
        With `sends`, offloaded values are sent when they are computed.
        """
        schedule, by, env, places = self.schedule, self.by, self.env, places or {}
        wanted = [v for v in wanted if isinstance(v, Var)]
        need = {*wanted, *(v for eqn in equations for v in reads_of(eqn, schedule.inner))}
        drop = {} if by.staged else _last_reads(equations, schedule, wanted, places)
        for i, eqn in enumerate(equations):
            for wait in places.get(i, ()):
                held = by.delay(wait, self._read(wait.saved), self._read(wait.seeds))
                env.update(zip(wait.saved, held, strict=True))
            env.update(zip(eqn.outvars, self._results(eqn, need), strict=True))
            for v in eqn.outvars:
                if v in stays:
                    env[v] = by.materialize(eqn, env[v], stays[v])
                if sends and v in schedule.offloaded:
                    self.sent[v] = by.transfer(schedule, v, env[v], back=False)
            for v in drop.get(i, ()):
                env.pop(v, None)

    def _read(self, atoms: Iterable[Any]) -> list[Any]:
        return [self.by.read(self.env, v) for v in atoms]

    def _results(self, eqn: JaxprEqn, need: set[Var]) -> Sequence[Any]:
        """Return the results of an equation; for a node, only those that are needed."""
        if eqn.primitive is fork_p:
            node = eqn.params["node"]
            self.forked.add(node)
            used = tuple(v in need for v in eqn.outvars)
            return self.by.fork(eqn, self.schedule.inner[node], self._read(eqn.invars), used)
        if eqn.primitive is not join_p:
            return self.by.results(eqn, self._read(eqn.invars))
        node = eqn.params["node"]
        schedules, n = self.schedule.inner[node], len(node.eqn.invars)
        reads = node.reads(schedules)
        token, inputs, seeds = eqn.invars[0], eqn.invars[1 : 1 + n], eqn.invars[1 + n :]
        xs = spread(self._read(gather(inputs, reads)), reads)
        token, seeds = self.by.read(self.env, token), self._read(seeds)
        return self.by.join(eqn, schedules, token, xs, seeds, node in self.forked)


def _last_reads(
    equations: Sequence[JaxprEqn], schedule: Schedule, wanted: Sequence[Var], places: Waits
) -> dict[int, list[Var]]:
    """Return, for each place, the values that nothing reads after it."""
    named = schedule.joint.named_copy
    seen = {*wanted, *(named[v] for v in wanted if v in named)}
    drop: dict[int, list[Var]] = {}
    for i, eqn in reversed([*enumerate(equations)]):
        waiting = [v for wait in places.get(i, ()) for v in (*wait.seeds, *wait.saved)]
        for v in (*eqn.outvars, *reads_of(eqn, schedule.inner), *waiting):
            for x in (v, named.get(v, v)):
                if x not in seen:
                    seen.add(x)
                    drop.setdefault(i, []).append(x)
    return drop
