"""Trace a computation once, and run it under different plans of its derivatives.

The computation is a training step, or a product with a Hessian. While it is traced, the default
policy is a `StepRecorder`. Derivatives that follow the default policy become equations that stand
for their two passes (`interpret/deferred.py`). The result is a `Recorded` computation. `Chosen` has
a plan for each of its derivatives, and runs the computation under them. The user's function does
not run again.

Some derivatives are planned where they are traced, and keep the plan of the default policy:
derivatives inside a function that is differentiated itself, derivatives whose backward functions
log values, and derivatives whose two passes stand in different programs, such as two loops.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from xform._jax import (
    JaxprEqn,
    Literal,
    Tracer,
    jaxpr_and_consts,
    jaxprs_of,
    match_weak_type,
    staging,
    traced_like,
    with_jaxprs,
)
from xform.interpret.deferred import (
    Derivative,
    PlannedPasses,
    Residuals,
    backward,
    deferred_p,
    forward,
    shared_inputs,
)
from xform.interpret.joint import Schedule
from xform.interpret.node import gather
from xform.planner.candidate import Candidate
from xform.planner.choice import Candidates, plans_key
from xform.planner.measure import Measure
from xform.planner.plan.decision import decision_of
from xform.planner.plan.record import record
from xform.planner.planning import (
    current_planner,
    default_policy,
    use_default_policy,
    use_planner,
)
from xform.planner.problem import Problem
from xform.policies import Policy
from xform.program.arithmetic import Value
from xform.program.equation import apply, bind, context
from xform.program.fingerprint import fingerprint, text_of
from xform.program.ir import Program, evaluate, lift_constants
from xform.program.naming import digest
from xform.program.source import source
from xform.registry.table import rule_of
from xform.rules.shard import Devices, ShardMap
from xform.transforms.function import Function
from xform.transforms.linear_map import PlannedRunner


class StepRecorder:
    """The default policy while a computation is recorded. It collects the derivatives.

    Args:
      default: the policy of the derivatives until their plans are chosen.
      has_budget: whether the computation has a budget, which all its derivatives share.
      together: keys of derivatives that keep the plan of `default`.
    """

    def __init__(self, default: Policy, has_budget: bool, together: frozenset[str] = frozenset()):
        self.default, self.has_budget, self.together = default, has_budget, together
        self.derivatives: dict[str, list[Derivative]] = {}

    def __call__(self, prim: Any, *avals: Any, **params: Any) -> Any:
        """Answer as the default policy does, for code that calls policies by JAX's protocol."""
        return self.default(prim, *avals, **params)

    @contextlib.contextmanager
    def active(self) -> Generator[None]:
        """Return a context for the trace of the computation."""
        others = current_planner()

        def planner(problem: Problem, policy: Policy, measure: Measure | None) -> Candidate:
            return others(problem, self.default if policy is self else policy, measure)

        with use_planner(planner), use_default_policy(self):
            yield


def defer(fun: Function, policy: Policy, candidate: Candidate, args: Sequence[Value]
          ) -> tuple[list[Value], PlannedRunner, Any] | None:  # fmt: skip
    """Bind the forward pass of a derivative whose plan is chosen later.

    Return the outputs of its program, the runner of its backward pass, and the arrays of the
    runner. None if the derivative keeps the plan `candidate`.
    """
    if not isinstance(policy, StepRecorder) or policy is not default_policy() or not staging():
        return None
    problem = fun.problem
    key = derivative_key(problem)
    if key in policy.together or candidate.schedule.joint.logs:
        return None
    derivative = Derivative(key, problem, candidate)
    policy.derivatives.setdefault(key, []).append(derivative)
    runner = _DeferredRunner(fun, derivative)
    return forward(derivative, args), runner, runner.arrays([], args)


def derivative_key(problem: Problem) -> str:
    """Return a text that equal derivatives share: of equal programs, by the same inputs.

    It is that of the program with its derivative, which has the operations of users' rules, and not
    the rules. They are Python functions, and may close over a list that each trace makes longer.
    """
    joint = problem.joint()
    return digest([fingerprint(joint.program), text_of((problem.active, problem.wanted))])


class _DeferredRunner(PlannedRunner):
    """Runs the backward pass of a derivative whose plan is chosen later."""

    def __init__(self, fun: Function, derivative: Derivative):
        super().__init__(fun, derivative.schedule, push=False)
        self._derivative = derivative

    def arrays(self, kept: list[Any], args: Sequence[Value]) -> Any:
        """Return the arrays: all inputs of the program."""
        return kept, list(args)

    def _results(self, arrays: Any, seeds: Sequence[Value]) -> list[Value]:
        _, inputs = arrays
        return gather(backward(self._derivative, inputs, seeds), self.schedule.joint.results)


@dataclasses.dataclass(frozen=True, eq=False)
class Recorded:
    """A traced computation.

    Attributes:
      program: its program, with the equations of deferred derivatives.
      out_tree: the tree of its outputs.
      derivatives: the derivatives, by key, in the order of the trace.
      number: identifies the computation.
    """

    program: Program
    out_tree: Any
    derivatives: Mapping[str, Sequence[Derivative]]
    number: int = dataclasses.field(default_factory=itertools.count().__next__)

    @property
    def problems(self) -> dict[str, Problem]:
        """The derivatives as planning problems, by key."""
        return {key: several[0].problem for key, several in self.derivatives.items()}

    @property
    def defaults(self) -> dict[str, Candidate]:
        """The plans of the default policy, by key."""
        return {key: several[0].candidate for key, several in self.derivatives.items()}

    def free_fronts(self) -> None:
        """Free what the search has stored about plans that were not chosen."""
        for several in self.derivatives.values():
            for derivative in several:
                derivative.problem.marked.cache.clear()


def recorded(
    default: Policy, has_budget: bool, trace_once: Callable[[Policy], tuple[Any, Any]]
) -> Recorded:
    """Record a computation.

    Args:
      default: the policy of its derivatives until their plans are chosen.
      has_budget: whether it has a budget, which all its derivatives share.
      trace_once: traces the computation; returns its jaxpr and the tree of its outputs. It is given
        the policy of derivatives whose plans are chosen later, which is the default policy then.

    If the two passes of a derivative stand in different programs, the computation is traced again.
    """
    together: frozenset[str] = frozenset()
    while True:
        recording = StepRecorder(default, has_budget, together)
        with recording.active():
            jaxpr, out_tree = trace_once(recording)
        separate = _separated(jaxpr)
        if not separate:
            break
        together |= separate
    return Recorded(_program(jaxpr), out_tree, recording.derivatives)


def with_lifted_constants(recording: Recorded) -> tuple[Recorded, list[Any]]:
    """Return a computation with its constants as leading inputs, and the constants."""
    prog, consts = lift_constants(recording.program)
    return dataclasses.replace(recording, program=prog), consts


@dataclasses.dataclass(frozen=True)
class ChosenPolicy:
    """The default policy while a recorded computation runs under some plans.

    The default policy is part of the keys of JAX's caches, so JAX keeps a compiled program for the
    plans. This object only identifies them: JAX must not keep the plans themselves.
    """

    key: Hashable

    def __call__(self, prim: Any, *avals: Any, **params: Any) -> Any:
        """Fail: no policy decides while a recorded computation runs."""
        raise AssertionError("no derivative is planned while a recorded computation runs")


@dataclasses.dataclass(frozen=True, eq=False)
class Chosen:
    """A recorded computation with a plan for each derivative, which runs under these plans.

    Attributes:
      recorded: the computation.
      candidates: the plans, by key.
    """

    recorded: Recorded
    candidates: Candidates
    _schedules: dict[Derivative, Schedule] = dataclasses.field(default_factory=dict)
    _jaxprs: dict[Any, Any] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def policy(self) -> ChosenPolicy:
        """The default policy while the computation runs under the plans."""
        return ChosenPolicy((self.recorded.number, plans_key(self.candidates)))

    def run(self, *args: Value) -> list[Value]:
        """Run the computation under the plans; return its flat outputs."""
        return self._evaluate(self.recorded.program, args)

    def _evaluate(self, prog: Program, args: Sequence[Value]) -> list[Value]:
        """Run a program with the planned passes of its derivatives."""
        residuals: dict[Any, Residuals] = {}

        def run(eqn: JaxprEqn, xs: list[Value], outer: Any) -> list[Value]:
            if eqn.primitive is deferred_p:
                with source(eqn, outer), context(eqn):
                    arrays = [_array(x, v.aval) for x, v in zip(xs, eqn.invars, strict=True)]
                    return self._pass(eqn, arrays, residuals)
            if any(map(_has_deferred, jaxprs_of(eqn))):
                with source(eqn, outer), context(eqn):
                    return self._planned(eqn, xs)
            return bind(eqn, xs, outer)

        return evaluate(prog, args, run)

    def _pass(self, eqn: JaxprEqn, xs: list[Value], residuals: dict[Any, Residuals]) -> list[Value]:
        """Run one pass of a derivative; `residuals` are those of the forward passes so far."""
        derivative, given, levels = (eqn.params[k] for k in ("derivative", "given", "levels"))
        passes = PlannedPasses(derivative, self._schedule(derivative))
        if given is None:
            ys, _, residuals[_call(eqn)] = passes.forward(levels, xs)
            return ys
        return passes.backward(levels, given, residuals[_call(eqn)], xs)[0]

    def _schedule(self, derivative: Derivative) -> Schedule:
        """Return the plan of a derivative, for its own program."""
        if derivative not in self._schedules:
            chosen = self.candidates[derivative.key]
            first = self.recorded.derivatives[derivative.key][0]
            if derivative is not first:
                chosen = _for_equal_program(chosen, derivative.problem)
            self._schedules[derivative] = chosen.schedule
        return self._schedules[derivative]

    def _planned(self, eqn: JaxprEqn, xs: Sequence[Value]) -> list[Value]:
        """Run an equation that has deferred derivatives in the programs of its parameters."""
        if isinstance(rule_of(eqn.primitive), ShardMap):
            devices = Devices(eqn)
            mapped = devices.map(
                self._function(devices.jaxpr), tuple(devices.in_specs), list(devices.out_specs)
            )
            return mapped(*xs)
        return apply(with_jaxprs(eqn, self._planned_jaxpr), xs)

    def _planned_jaxpr(self, jaxpr: Any) -> Any:
        """Return a jaxpr of an equation under the plans. A jaxpr that is called often stays one."""
        if not _has_deferred(jaxpr):
            return jaxpr
        if jaxpr not in self._jaxprs:
            self._jaxprs[jaxpr] = traced_like(jaxpr, self._function(jaxpr))
        return self._jaxprs[jaxpr]

    def _function(self, jaxpr: Any) -> Callable[..., list[Value]]:
        """Return a function that does the same as a jaxpr, under the plans."""
        prog = _program(jaxpr)
        return lambda *args: self._evaluate(prog, args)


def _array(x: Value, aval: Any) -> Value:
    """Return the value of an atom of type `aval` as an array. A literal is a Python number."""
    if isinstance(x, Tracer | jax.Array) or not isinstance(x, bool | int | float | complex):
        return x
    return match_weak_type(jnp.asarray(x, aval.dtype), aval)


def _program(jaxpr: Any) -> Program:
    """Return a jaxpr as a Program, with the mutable references that it makes."""
    opened, consts = jaxpr_and_consts(jaxpr)
    pairs = tuple(zip(opened.constvars, consts, strict=True))
    return Program(tuple(opened.invars), pairs, tuple(opened.eqns), tuple(opened.outvars))


def _call(eqn: JaxprEqn) -> Any:
    """Return what only the two equations of one call of a derivative share in a program."""
    derivative, given, levels = (eqn.params[k] for k in ("derivative", "given", "levels"))
    positions, of_program = shared_inputs(derivative, given, levels)
    atoms = tuple(
        (str(v), str(v.aval)) if isinstance(v, Literal) else v
        for v in (eqn.invars[i] for i in positions)
    )
    shared = tuple((type(level), level.of_inputs) for level in of_program if level is not None)
    return derivative, atoms, shared


def _separated(jaxpr: Any) -> frozenset[str]:
    """Return the keys of derivatives whose backward pass stands without its forward pass."""
    found, separated = set[Any](), set[str]()
    for eqn in jaxpr_and_consts(jaxpr)[0].eqns:
        if eqn.primitive is deferred_p:
            if eqn.params["given"] is None:
                found.add(_call(eqn))
            elif _call(eqn) not in found:
                separated.add(eqn.params["derivative"].key)
        for inner in jaxprs_of(eqn):
            separated |= _separated(inner)
    return frozenset(separated)


_HAS_DEFERRED: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def _has_deferred(jaxpr: Any) -> bool:
    """Return whether a jaxpr has an equation of a deferred derivative, also in nested jaxprs."""
    if jaxpr not in _HAS_DEFERRED:
        _HAS_DEFERRED[jaxpr] = any(
            eqn.primitive is deferred_p or any(map(_has_deferred, jaxprs_of(eqn)))
            for eqn in jaxpr_and_consts(jaxpr)[0].eqns
        )
    return _HAS_DEFERRED[jaxpr]


def _for_equal_program(candidate: Candidate, problem: Problem) -> Candidate:
    """Return the plan of a derivative as a plan of an equal one, which was traced another time."""
    problem = dataclasses.replace(problem, regions=candidate.regions, slices=candidate.slices)
    schedule = candidate.schedule
    written = record(decision_of(schedule), schedule.joint, candidate.shapes)
    joint = problem.joint(candidate.shapes)
    return problem.candidate(written.decision(joint, "the plan of an equal derivative"),
                             candidate.shapes)  # fmt: skip


def in_step() -> bool:
    """Return whether a step of `xform.jit` is traced here."""
    return isinstance(default_policy(), StepRecorder)


def in_step_with_budget() -> bool:
    """Return whether the derivatives traced here share the budget of a step of `xform.jit`."""
    recording = default_policy()
    return isinstance(recording, StepRecorder) and recording.has_budget
