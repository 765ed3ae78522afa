"""Walk over the equations of a Joint under a Schedule, with a back end that processes each.

A Joint is the forward and the backward pass of a function as one program of two parts. A Schedule
says which forward values are saved for the backward part, which equations it recomputes, and in
which order. A seed is an input of the backward part, such as a cotangent. A node is a loop, branch
or call with a derivative: a `fork` equation runs its forward part and returns a token with its
residuals, and a `join` equation runs its backward part from that token.

The walk passes the equations to the back end in order. It also tells the back end when to move a
value to the host, to write it to memory, or to let it wait for a cotangent at a barrier. There are
two back ends: `emit` binds each equation in the current trace, and the planner's simulator adds its
steps to a flat program.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from xform._jax import JaxprEqn, Var
from xform.interpret.joint import Schedule, reads_of
from xform.interpret.node import fork_p, gather, join_p, spread
from xform.passes.dce import live
from xform.program.ir import Mask, Program
from xform.steering.barrier import Where
from xform.steering.draws import find_draw_waits
from xform.steering.gradients_first import with_gradients_first
from xform.steering.long_chains import shared_values
from xform.steering.must_materialize import must_materialize
from xform.steering.wait import Wait, Waits, find_waits

# Values by variable: arrays, tracers, or the values of another back end.
Environment = dict[Var, Any]


class BackEnd(abc.ABC):
    """How to process the equations of one part of a Joint.

    Arguments: `env` maps variables to values, `xs` are the values of an equation's inputs, and
    `schedules` has one Schedule for each nested Joint of a node.

    Attributes:
      staged: whether operations become a program that is compiled. If not, they run one by one.
        Then the walk frees values after their last use, and writes none to memory for the compiler.
    """

    staged: bool = True

    @abc.abstractmethod
    def read(self, env: Environment, v: Any) -> Any:
        """Return the value of a variable or literal."""

    @abc.abstractmethod
    def constants(self, prog: Program) -> Mapping[Var, Any]:
        """Return the values of a program's constants."""

    @abc.abstractmethod
    def results(self, eqn: JaxprEqn, xs: list[Any]) -> Sequence[Any]:
        """Return the results of an equation."""

    @abc.abstractmethod
    def fork(
        self, eqn: JaxprEqn, schedules: Sequence[Schedule], xs: list[Any], used: Mask
    ) -> list[Any]:
        """Run a node's forward part; return its outputs and then its token, None if not `used`."""

    @abc.abstractmethod
    def join(self, eqn: JaxprEqn, schedules: Sequence[Schedule], token: Any, xs: list[Any],
             seeds: list[Any], together: bool) -> list[Any]:  # fmt: skip
        """Run a node's backward part; return the results.

        `xs` has None for the inputs that it does not read. `seeds` has only the seeds that are
        present. `together` says that its forward part is in the same XLA program, so XLA may merge
        a recompute with it.
        """

    @abc.abstractmethod
    def delay(self, wait: Wait, saved: list[Any], seeds: list[Any]) -> Sequence[Any]:
        """Return `saved`, as values that are available only after the cotangents `seeds`."""

    @abc.abstractmethod
    def materialize(self, eqn: JaxprEqn, x: Any, where: Where) -> Any:
        """Return `x`, a result of an equation, written to memory on the backends `where`."""

    @abc.abstractmethod
    def transfer(self, schedule: Schedule, v: Var, x: Any, back: bool) -> Any:
        """Return the value `x` of `v`, moved to the memory that it is offloaded to, or `back`."""


def forward(
    schedule: Schedule, back_end: BackEnd, args: Sequence[Any], used: Mask | None = None
) -> tuple[list[Any], list[Any]]:
    """Run the forward part; return its outputs (None where not `used`) and the saved values."""
    joint = schedule.joint
    used = used or (True,) * len(joint.outputs)
    outputs = gather(joint.outputs, used)
    env = dict(zip(joint.inputs, args, strict=True))
    walk = _ScheduleWalk(schedule, back_end, env)
    to_memory = must_materialize(schedule) if back_end.staged else {}
    results = walk.values([*outputs, *schedule.saved], to_memory, offload=True)
    saved = zip(schedule.saved, results[len(outputs) :], strict=True)
    return spread(results[: len(outputs)], used), [walk.offloaded.get(v, x) for v, x in saved]


def values(
    schedule: Schedule,
    back_end: BackEnd,
    wanted: Sequence[Any],
    env: Environment,
    effects: bool = True,
) -> list[Any]:
    """Compute the `wanted` forward values of a Joint from the values in `env`.

    `env` has the inputs of the Joint, and may have other forward values, which are then not
    computed again. With `effects`, equations with side effects run too.
    """
    return _ScheduleWalk(schedule, back_end, dict(env)).values(wanted, effects=effects)


def backward(schedule: Schedule, back_end: BackEnd, kept: Sequence[Any], args: Sequence[Any],
             seeds: Sequence[Any], together: bool, whole: bool) -> list[Any]:  # fmt: skip
    """Run the backward part; return its results.

    `kept` are the values of `schedule.saved`, `args` the values of the Joint's inputs (None if the
    backward part does not read them), and `seeds` the values of its seeds. `together` says that the
    forward part is in the same XLA program. `whole` says that the Joint belongs to a whole function
    or to a loop's body, not to a remat region. Then each recompute waits for a cotangent of its own
    (`find_waits`).
    """
    joint = schedule.joint
    env = _SavedValues(schedule, back_end, kept)
    env.update(back_end.constants(joint.program))
    env.update(zip(joint.inputs, args, strict=True))
    env.update(zip(joint.seeds, seeds, strict=True))
    waits = find_waits(schedule, whole, together) if together or whole else {}
    to_memory = must_materialize(schedule) if waits and back_end.staged else {}
    if schedule.gradients_first and together and whole and back_end.staged:
        waits = with_gradients_first(schedule, waits)
    if together and whole and back_end.staged:
        to_memory = shared_values(schedule) | to_memory
    walk = _ScheduleWalk(schedule, back_end, env, schedule.inner if together else ())
    walk.run(schedule.order, joint.backward_outputs, to_memory, waits)
    return [back_end.read(env, v) for v in joint.backward_outputs]


class _SavedValues(Environment):
    """An environment with the saved values; an offloaded one is moved back when it is first read.

    A value that `checkpoint_name` names may be saved as its named copy. Reading it reads the copy.
    """

    def __init__(self, schedule: Schedule, back_end: BackEnd, kept: Sequence[Any]):
        self._schedule, self._back_end = schedule, back_end
        self._kept = dict(zip(schedule.saved, kept, strict=True))

    def __missing__(self, v: Var) -> Any:
        if v not in self._kept:
            self[v] = self[self._schedule.joint.named_copy[v]]
        elif v in self._schedule.offloaded:
            self[v] = self._back_end.transfer(self._schedule, v, self._kept[v], back=True)
        else:
            self[v] = self._kept[v]
        return self[v]


class _ScheduleWalk:
    """A walk over equations of one part.

    Attributes:
      env: the values of variables so far.
      forked: the nodes whose forward part is in the same XLA program.
      offloaded: the offloaded values, in the memory that they were moved to.
    """

    def __init__(
        self, schedule: Schedule, back_end: BackEnd, env: Environment, forked: Iterable[Any] = ()
    ):
        self.schedule, self.back_end, self.env = schedule, back_end, env
        self.forked = set(forked)
        self.offloaded: Environment = {}

    def values(
        self,
        wanted: Sequence[Any],
        to_memory: Mapping[Var, Where] | None = None,
        effects: bool = True,
        offload: bool = False,
    ) -> list[Any]:
        """Compute forward values by the equations that lead from the values in `env` to them."""
        joint = self.schedule.joint
        equations = live(joint.forward, wanted, self.env, effects)
        self.env |= self.back_end.constants(joint.program)
        waits = find_draw_waits(equations) if self.back_end.staged else {}
        self.run(equations, wanted, to_memory or {}, waits, offload=offload)
        return [self.back_end.read(self.env, v) for v in wanted]

    def run(
        self,
        equations: Sequence[JaxprEqn],
        wanted: Iterable[Any],
        to_memory: Mapping[Var, Where],
        waits: Waits | None = None,
        offload: bool = False,
    ) -> None:
        """Process equations in order, for the values `wanted` afterwards.

        Results in `to_memory` are written to memory. Before an equation whose index is in `waits`,
        saved values wait for cotangents. With `offload`, each offloaded value is moved to the other
        memory when it has been computed.
        """
        schedule, back_end, env, waits = self.schedule, self.back_end, self.env, waits or {}
        wanted = [v for v in wanted if isinstance(v, Var)]
        needed = {*wanted, *(v for eqn in equations for v in reads_of(eqn, schedule.inner))}
        freed_after = {} if back_end.staged else _last_reads(equations, schedule, wanted, waits)
        for i, eqn in enumerate(equations):
            for wait in waits.get(i, ()):
                delayed = back_end.delay(wait, self._read(wait.saved), self._read(wait.seeds))
                env.update(zip(wait.saved, delayed, strict=True))
            env.update(zip(eqn.outvars, self._results(eqn, needed), strict=True))
            for v in eqn.outvars:
                if v in to_memory:
                    env[v] = back_end.materialize(eqn, env[v], to_memory[v])
                if offload and v in schedule.offloaded:
                    self.offloaded[v] = back_end.transfer(schedule, v, env[v], back=False)
            for v in freed_after.get(i, ()):
                env.pop(v, None)

    def _read(self, variables: Iterable[Any]) -> list[Any]:
        return [self.back_end.read(self.env, v) for v in variables]

    def _results(self, eqn: JaxprEqn, needed: set[Var]) -> Sequence[Any]:
        """Return the results of an equation; for a fork, None for results that are not `needed`."""
        if eqn.primitive is fork_p:
            node = eqn.params["node"]
            self.forked.add(node)
            used = tuple(v in needed for v in eqn.outvars)
            return self.back_end.fork(eqn, self.schedule.inner[node], self._read(eqn.invars), used)
        if eqn.primitive is not join_p:
            return self.back_end.results(eqn, self._read(eqn.invars))
        node = eqn.params["node"]
        schedules, n = self.schedule.inner[node], len(node.eqn.invars)
        reads = node.reads(schedules)
        token, inputs, seeds = eqn.invars[0], eqn.invars[1 : 1 + n], eqn.invars[1 + n :]
        xs = spread(self._read(gather(inputs, reads)), reads)
        token, seeds = self.back_end.read(self.env, token), self._read(seeds)
        return self.back_end.join(eqn, schedules, token, xs, seeds, node in self.forked)


def _last_reads(
    equations: Sequence[JaxprEqn], schedule: Schedule, wanted: Sequence[Var], waits: Waits
) -> dict[int, list[Var]]:
    """Return, by the index of an equation, the values that nothing reads after that equation."""
    named_copy = schedule.joint.named_copy
    read_later = {*wanted, *(named_copy[v] for v in wanted if v in named_copy)}
    freed_after: dict[int, list[Var]] = {}
    for i, eqn in reversed([*enumerate(equations)]):
        waiting = [v for wait in waits.get(i, ()) for v in (*wait.seeds, *wait.saved)]
        for v in (*eqn.outvars, *reads_of(eqn, schedule.inner), *waiting):
            for x in (v, named_copy.get(v, v)):
                if x not in read_later:
                    read_later.add(x)
                    freed_after.setdefault(i, []).append(x)
    return freed_after
