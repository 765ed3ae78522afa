"""Derivatives outside `jit`: each operation is differentiated when Python runs it.

Outside `jit` every value is concrete, so there is no program to plan. The function runs with values
that a trace watches (`interpret/concrete.py`). Each watched value has a mark. For `jvp` the mark is
the tangent. For `linearize` it is a staged tangent: the operations on tangents are recorded as a
program. For `vjp` it is a variable: each operation adds its equation and its pullback to a tape,
and the pullback holds only the values that it reads. Python may print values and branch on them.
The rules are the same as for a traced program.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from xform._jax import (
    JaxprEqn,
    Primitive,
    Trace,
    Tracer,
    Var,
    current_trace,
    equation,
    jaxprs_of,
    set_current_trace,
    tangent_aval,
)
from xform.interpret.concrete import Mark, MarkedTracer, Results, TangentTracer, Watch
from xform.interpret.jvp import push
from xform.interpret.logs import collect_logs, log_without
from xform.interpret.node import Pull, Structured, gather, spread
from xform.interpret.pullback import pull_of_jvp, pull_tape
from xform.interpret.pullback import vjp as pull_equation
from xform.interpret.staged import stage
from xform.passes.dce import live
from xform.program.arithmetic import (
    Value,
    as_jax_values,
    differentiable,
    is_number,
    reduce_like,
    scale,
)
from xform.program.equation import EagerEquation
from xform.program.ir import Mask, Program, evaluate, lift_constants, program
from xform.program.source import frame
from xform.registry.table import Rule
from xform.registry.words import Bilinear, Pointwise
from xform.rules.refused import push_custom_vjp, split_by_rule
from xform.rules.user_rules import calls_backward, indexable, pull_by_rule, push_by_rule
from xform.transforms.function import FunctionCall, Signature, Tree, as_array, check_outputs
from xform.transforms.linear_map import LinearRunner, Pullback, Pushforward, dense
from xform.transforms.pulled_later import run_pulled_later
from xform.transforms.residuals import Primals
from xform.transforms.run_nodes import RunNodes, pull_by_user, with_nodes


class _PushTrace(Watch):
    """A trace whose marks are tangents."""

    tracer_type = TangentTracer
    split = False

    def show(self, value: Value, mark: Value) -> str:
        return f"JVPTracer(primal={value}, tangent={mark!r})"

    def applied(self, primitive: Primitive, params: Any, avals: Sequence[Any],
                marks: Sequence[Mark], outputs: list[Var] | None = None) -> Any:  # fmt: skip
        return EagerEquation(primitive, params, avals, outputs)

    def formula(self, rule: Rule, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value],
                marks: Sequence[Mark]) -> Sequence[Mark]:  # fmt: skip
        return rule.push(eqn, xs, ys, as_jax_values(marks))

    def equation(self, rule: Rule, eqn: JaxprEqn, xs: Sequence[Value], marks: Sequence[Mark],
                 wanted: Mask) -> Results:  # fmt: skip
        return push(rule, eqn, xs, as_jax_values(marks), wanted, self.split)

    def custom_jvp(self, prim: Primitive, rule: Callable[..., Any], symbolic: bool,
                   xs: Sequence[Value], marks: Sequence[Mark]) -> Results:  # fmt: skip
        return push_by_rule(rule, symbolic, indexable(xs), marks)

    def custom_vjp(self, prim: Primitive, rules: Any, symbolic: bool, xs: Sequence[Value],
                   marks: Sequence[Mark]) -> Results:  # fmt: skip
        fwd, bwd, trees = rules
        return push_custom_vjp(fwd, bwd, trees, symbolic, xs, marks, frame())


class _LinearizeTrace(_PushTrace):
    """A trace whose marks are staged tangents. No operation computes both primals and tangents."""

    tracer_type = MarkedTracer
    split = True
    applied = Watch.applied  # a real JaxprEqn, because a Node keeps it

    def custom_vjp(self, prim: Primitive, rules: Any, symbolic: bool, xs: Sequence[Value],
                   marks: Sequence[Mark]) -> Results:  # fmt: skip
        fwd, bwd, trees = rules
        return split_by_rule(fwd, bwd, trees, symbolic, xs, marks, frame())

    def show(self, value: Value, mark: Value) -> str:
        return _show(value, mark)


class _TapeTrace(Watch):
    """A trace whose marks are variables.

    `tape` has, for each operation on a watched value, its equation and its pullback.
    """

    def __init__(self, below: Trace, later: bool):
        super().__init__(below)
        self.tape: list[tuple[JaxprEqn, Pull]] = []
        self.later = later  # whether the user calls the pullback, and not xform at once

    def show(self, value: Value, mark: Var) -> str:
        return _show(value, mark)

    def variable(self, aval: Any, mark: Var | None) -> Var:
        return Var(aval) if mark is None else mark

    def formula(self, rule: Rule, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value],
                marks: Sequence[Mark]) -> Sequence[Mark]:  # fmt: skip
        on = tuple(m is not None for m in marks)
        self.tape.append((eqn, _pull_by_formula(rule, eqn, xs, ys, on)))
        return eqn.outvars

    def equation(self, rule: Rule, eqn: JaxprEqn, xs: Sequence[Value], marks: Sequence[Mark],
                 wanted: Mask) -> Results:  # fmt: skip
        on = tuple(m is not None for m in marks)
        if isinstance(rule, Structured) and any(map(calls_backward, map(program, jaxprs_of(eqn)))):
            ys, pull = run_pulled_later(rule, eqn, xs, on, wanted, self.later)
        else:
            ys, pull = with_nodes(pull_equation, rule, eqn, xs, on, wanted)
            pull = functools.partial(with_nodes, pull)
        self.tape.append((eqn, pull))
        return ys, eqn.outvars

    def custom_jvp(self, prim: Primitive, rule: Callable[..., Any], symbolic: bool,
                   xs: Sequence[Value], marks: Sequence[Mark]) -> Results:  # fmt: skip
        has_tangent: list[bool] = []

        def jvp(xs: Sequence[Value], dxs: Sequence[Value]):
            ys, dys = push_by_rule(rule, symbolic, indexable(xs), dxs)
            has_tangent[:] = [dy is not None for dy in dys]
            return ys, dys

        ys, pull = with_nodes(pull_of_jvp, jvp, xs, tuple(m is not None for m in marks))
        pull = functools.partial(with_nodes, pull)
        ys, outs = self._by_rule(prim, xs, marks, ys, lambda eqn: pull)
        return ys, [v if on else None for v, on in zip(outs, has_tangent, strict=True)]

    def custom_vjp(self, prim: Primitive, rules: Any, symbolic: bool, xs: Sequence[Value],
                   marks: Sequence[Mark]) -> Results:  # fmt: skip
        fwd, bwd, trees = rules
        on = tuple(m is not None for m in marks)
        ys, residuals, pull = pull_by_rule(fwd, bwd, trees, symbolic, xs, on)
        return self._by_rule(
            prim, xs, marks, ys, lambda eqn: pull_by_user(eqn, residuals, on, pull)
        )

    def _by_rule(self, prim: Primitive, xs: Sequence[Value], marks: Sequence[Any],
                 ys: Sequence[Value], pull: Callable[[JaxprEqn], Pull]) -> Results:  # fmt: skip
        """Add a call of a custom function to the tape; return its outputs and their marks.

        `pull` returns the pullback of the equation that stands for the call.
        """
        inputs = list(map(self.variable, map(jax.typeof, xs), marks))
        outs = [Var(jax.typeof(y)) for y in ys]
        eqn = equation(prim, inputs, {}, outs)
        self.tape.append((eqn, pull(eqn)))
        return ys, [v if differentiable(v.aval) else None for v in outs]


def _show(value: Value, mark: Any) -> str:
    return f"GradTracer(primal={value}, typeof(tangent)={mark.aval.str_short(short_dtypes=True)})"


def _pull_by_formula(rule: Rule, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value],
                     active: Mask) -> Pull:  # fmt: skip
    """Return the pullback of an equation that has run, by a rule that does not run it again.

    The pullback holds only the values that it reads, and the types of all other values.
    """
    if isinstance(rule, Pointwise):
        return _pull_pointwise(rule, eqn, xs, ys[0], active)
    if isinstance(rule, Bilinear):
        reads = [active[1], active[0], *[True] * (len(xs) - 2)]
    else:
        argnums = getattr(rule, "argnums", None) or [
            i for i, x in enumerate(xs) if differentiable(jax.typeof(x))
        ]
        reads = [i not in argnums for i in range(len(xs))]
    inputs = [x if r else _Type(x) for x, r in zip(xs, reads, strict=True)]
    outputs = [_Type(y) for y in ys]
    return lambda cts: list(rule.pull(eqn, inputs, outputs, cts, active))


def _pull_pointwise(rule: Rule, eqn: JaxprEqn, xs: Sequence[Value], y: Value, active: Mask) -> Pull:
    """Return the pullback of an elementwise equation. It holds its partial derivatives."""
    partials = zip(rule.formulas, active, strict=True)
    factors = [rule.call(d, eqn, y, *xs) if on else None for d, on in partials]
    types = [_Type(x) for x in xs]
    return lambda cts: [
        reduce_like(scale(cts[0], d), x) if on else None
        for d, x, on in zip(factors, types, active, strict=True)
    ]


class _Type(Tracer[Any]):
    """A stand-in for a value that has its type only: reading the value is an error."""

    def __init__(self, value: Value):
        super().__init__(None, jax.typeof(value))


class _TapeRunner(LinearRunner):
    """Runs a pullback by its tape. If the pullback must be a pytree of arrays, the tape is staged.

    `inputs` and `outputs` are the variables of the function's arguments and of its outputs; None
    for those without a derivative.
    """

    def __init__(self, tape: Any, inputs: Sequence[Var | None], outputs: Sequence[Var | None]):
        self._tape, self._inputs, self._outputs = tape, inputs, outputs

    def run(self, arrays: Any, seeds: Sequence[Value]) -> list[Value]:
        cts = pull_tape(self._tape, self._outputs, seeds)
        return [cts.get(v) if v is not None else None for v in self._inputs]

    def active_outputs(self) -> Mask:
        return tuple(v is not None for v in self._outputs)

    def with_explicit_arrays(self, arrays: Any) -> tuple[LinearRunner, Any]:
        inputs_on = tuple(v is not None for v in self._outputs)
        avals = [v.aval for v in self._outputs if v is not None]
        return _stage_linear(
            lambda cts: self.run(None, spread(cts, inputs_on)), inputs_on, avals, push=False
        )


class _ProgramRunner(LinearRunner):
    """Runs a linear map as a program, whose constants are the arrays of the map.

    The masks say which inputs and outputs of the map are inputs and outputs of the program; the
    others are ignored or zero. `push` says whether the map is a pushforward; else it is a pullback.
    `log_places` has the keys that users' backward functions log, with their places (`log_without`).
    """

    def __init__(self, program: Program, inputs_on: Mask, outputs_on: Mask, push: bool,
                 log_places: dict[Any, str]):  # fmt: skip
        self._log_places, self._program, self._push = log_places, program, push
        self._inputs_on, self._outputs_on = inputs_on, outputs_on

    def active_outputs(self) -> Mask:
        return self._outputs_on if self._push else self._inputs_on

    def run(self, arrays: Any, seeds: Sequence[Value]) -> list[Value]:
        values = as_jax_values(gather(seeds, self._inputs_on))
        results = with_nodes(evaluate, self._program, [*arrays, *values])
        log_without(self._log_places, "a linear map", "")
        return spread(results, self._outputs_on)


def _stage_linear(f: Callable[..., Any], inputs_on: Mask, avals: Sequence[Any], push: bool
            ) -> tuple[LinearRunner, Any]:  # fmt: skip
    """Stage a linear function; return its runner and arrays, as for `_ProgramRunner`.

    `f` takes values of types `avals`, for the inputs in `inputs_on`. It returns None for a zero.
    """
    outputs_on: list[bool] = []
    log_places: dict[Any, str] = {}

    def run(*seeds: Value) -> list[Value]:
        with collect_logs() as logs:
            results = f(seeds)
        log_places.update(logs.places("a pullback that was flattened before its call"))
        outputs_on[:] = [r is not None for r in results]
        return gather(results, outputs_on)

    prog = stage(run, avals, RunNodes)
    equations = live(prog.equations, prog.outputs)
    read = {v for eqn in equations for v in eqn.invars if isinstance(v, Var)}
    read.update(v for v in prog.outputs if isinstance(v, Var))
    read_consts = tuple((v, x) for v, x in prog.consts if v in read)
    lifted_prog, consts = lift_constants(Program(prog.inputs, read_consts, equations, prog.outputs))
    runner = _ProgramRunner(lifted_prog, inputs_on, tuple(outputs_on), push, log_places)
    return runner, [as_array(x, "staging") for x in consts]


def _run_watched(at: FunctionCall, trace: Watch, marks: Sequence[Any]):
    """Run a call under `trace`, with a mark for each argument (None: not watched).

    Return the outputs, their marks, their tree, and the auxiliary output.
    """
    with set_current_trace(trace):
        triples = zip(at.leaves, at.args, marks, strict=True)
        # `given` is the user's argument. If it is a Python number, it stays one.
        args = [given if m is None else trace.lift(given if is_number(given) else x, m)
                for given, x, m in triples]  # fmt: skip
        y, aux = at.run(args)
        del args, triples
    leaves, tree = jax.tree.flatten(y)
    pairs = [trace.lower(x) for x in leaves]
    check_outputs([x for x, _ in pairs], at)
    for x, _ in pairs:
        as_array(x, at.caller)  # raises an error for other values; its result is not used
    ys = [x for x, _ in pairs]
    aux = jax.tree.map(lambda x: trace.lower(x)[0], aux)
    trace.invalidate()
    return ys, [m for _, m in pairs], tree, aux


def push_trace() -> Watch:
    """Return a trace that pushes tangents, for `jvp`."""
    return _PushTrace(current_trace())


def jvp(at: FunctionCall, dxs: Sequence[Value], trace: Watch) -> tuple[Tree, Tree, Tree]:
    """Run a call at tangents `dxs`; return its output, the output's tangent, and `aux`.

    `trace` is the result of `push_trace`. A tangent in `dxs` that is None is zero.
    """
    ys, dys, tree, aux = _run_watched(at, trace, dxs)
    dy = map(dense, dys, (tangent_aval(jax.typeof(y)) for y in ys))
    return tree.unflatten(ys), tree.unflatten(dy), aux


def vjp(at: FunctionCall, saveable: Mask, later: bool) -> tuple[Tree, Pullback, Tree]:
    """Run a call; return its output, its pullback and its auxiliary output.

    The pullback holds an argument only if `saveable` allows it. `later` says whether the user calls
    it, and not xform at once.
    """
    inputs = [Var(jax.typeof(x)) if on else None for x, on in zip(at.args, at.active, strict=True)]
    trace = _TapeTrace(current_trace(), later)
    ys, outputs, tree, aux = _run_watched(at, trace, inputs)
    runner = _TapeRunner(_live_tape(outputs, trace.tape), inputs, outputs)
    pull = Pullback(_signature(at, ys, tree), runner, (), Primals(at.args, saveable))
    return tree.unflatten(ys), pull, aux


def _live_tape(outputs: Sequence[Any], tape: Any) -> list[Any]:
    """Return the part of a tape that some outputs depend on. The rest is freed."""
    by_equation = {id(eqn): pull for eqn, pull in tape}
    return [(eqn, by_equation[id(eqn)]) for eqn in live([eqn for eqn, _ in tape], outputs)]


def linearize(at: FunctionCall) -> tuple[Tree, Pushforward, Tree]:
    """Run a call; return its output, its pushforward and its auxiliary output."""
    out: list[Any] = []

    def tangents(dxs: Sequence[Value]) -> list[Value]:
        trace = _LinearizeTrace(current_trace())
        ys, dys, tree, aux = _run_watched(at, trace, spread(dxs, at.active))
        out[:] = ys, tree, aux
        return dys

    avals = [tangent_aval(jax.typeof(x)) for x in gather(at.args, at.active)]
    runner, arrays = _stage_linear(tangents, at.active, avals, push=True)
    ys, tree, aux = out
    return tree.unflatten(ys), Pushforward(_signature(at, ys, tree), runner, arrays), aux


def _signature(at: FunctionCall, ys: Sequence[Value], out_tree: Any) -> Signature:
    avals = list(map(jax.typeof, at.args)), list(map(jax.typeof, ys))
    return Signature(at.name, at.in_tree, out_tree, *avals)
