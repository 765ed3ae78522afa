"""Derivatives outside `jit`: each operation is differentiated when Python runs it.

Outside `jit` there is nothing to plan, because every value is concrete. Each operation saves what
its pullback reads, and Python may print values and branch on them. The rules are the same as for a
traced program.
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
    cotangent_aval,
    current_trace,
    equation,
    set_current_trace,
    tangent_aval,
    zeros,
)
from xform.interpret.concrete import Mark, MarkedTracer, Results, TangentTracer, Watch
from xform.interpret.jvp import push
from xform.interpret.logs import collect_logs, log_without
from xform.interpret.node import EagerToken, Node, Pull, fork_p, gather, join_p, spread
from xform.interpret.pullback import RULE_RETURNED_NONE, check_cotangent, pull_of_jvp, pull_tape
from xform.interpret.pullback import vjp as pull_equation
from xform.interpret.staged import Split, stage
from xform.passes.dce import live
from xform.planner.decide import schedule
from xform.program.arithmetic import (
    Value,
    as_jax_values,
    differentiable,
    is_number,
    reduce_like,
    scale,
)
from xform.program.equation import EagerEquation
from xform.program.ir import Mask, Program, evaluate, lift_constants
from xform.program.source import frame
from xform.registry.table import Rule
from xform.registry.words import Bilinear, Pointwise
from xform.rules.custom import no_forward_mode, pull_by_rule, push_by_rule, split_by_rule
from xform.transforms.function import FunctionCall, Signature, Tree, as_array, check_outputs
from xform.transforms.linear_map import LinearRunner, Pullback, Pushforward, dense
from xform.transforms.residuals import Primals


class _Direct(Split):
    """A trace that replaces fork and join, when they are bound, by the parts of their node."""

    def process_primitive(self, primitive: Primitive, args: Sequence[Any], params: Any, /) -> Any:
        if primitive is _later_p and not self.stages(args):
            with set_current_trace(self):
                return params["run"](*args)
        if primitive not in (fork_p, join_p):
            return super().process_primitive(primitive, args, params)
        node: Node = params["node"].node
        schedules = [schedule(j, node.policy if node.region else None) for j in node.joints]
        home = self.outside if self.staged is None else self
        if primitive is fork_p:
            with set_current_trace(home):
                ys, value = node.forward(schedules, args, (True,) * len(node.eqn.outvars))
            reads = zip(args, node.reads(schedules), strict=True)
            return [*ys, EagerToken(self, value, [x if on else None for x, on in reads])]
        token, given = args[0], params["given"]
        seeds = spread(args[len(args) - sum(given) :], given)
        # A remat region recomputes when the linear map is called, not when the map is made.
        where = self.staged if node.region and self.staged is not None else home
        with set_current_trace(where):
            results = node.backward(schedules, token.value, token.inputs, seeds, False)
        return gather(results, node.present_results(given))

    def stages(self, args: Sequence[Any]) -> bool:
        """Whether this trace stages an operation on `args`."""
        return self.staged is not None and self.where(args) is self.staged


def _directly(f: Callable[..., Any], *args: Any) -> Any:
    """Call a function that may bind fork, join or `xform_later`, under a `_Direct` trace."""
    current = current_trace()
    with set_current_trace(current if isinstance(current, _Direct) else _Direct(current)):
        return f(*args)


# The call of a user's backward function in a staged linear map. It runs when the map is called.
_later_p = Primitive("xform_later")
_later_p.multiple_results = True
_later_p.def_abstract_eval(lambda *_, run, avals: list(avals))


def _late(eqn: JaxprEqn, residuals: Sequence[Value], on: Mask,
          pull: Callable[..., list[Value]]) -> Pull:  # fmt: skip
    """Return the pullback of a user's rule. While a tape is staged, the rule is not called."""
    inputs: list[Any] = gather(eqn.invars, on)
    avals = tuple(cotangent_aval(v.aval) for v in inputs)

    def run(cts: Sequence[Value]) -> list[Value]:
        active = tuple(ct is not None for ct in cts)
        current = current_trace()
        staged = isinstance(current, _Direct) and current.stages(gather(cts, active))
        if not staged:
            return pull(residuals, cts)

        def later(*values: Value) -> list[Value]:
            held, seeds = values[: len(residuals)], values[len(residuals) :]
            cts = pull(held, spread(seeds, active))
            results = [None if ct is RULE_RETURNED_NONE else ct for ct in gather(cts, on)]
            for v, ct in zip(inputs, results, strict=True):
                if ct is not None:
                    check_cotangent(eqn, v, ct)
            return [zeros(a) if ct is None else jax.lax.convert_element_type(ct, a.dtype)
                    for ct, a in zip(results, avals, strict=True)]  # fmt: skip

        return spread(_later_p.bind(*residuals, *gather(cts, active), run=later, avals=avals), on)

    return run


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
        return push_by_rule(rule, symbolic, xs, marks)

    def custom_vjp(self, prim: Primitive, rules: Any, symbolic: bool, xs: Sequence[Value],
                   marks: Sequence[Mark]) -> Results:  # fmt: skip
        raise no_forward_mode(frame())


class _LinearizeTrace(_PushTrace):
    """A trace whose marks are staged tangents; primal and tangent part are kept apart."""

    tracer_type = MarkedTracer
    split = True
    applied = Watch.applied  # a plain equation, because a Node keeps it

    def custom_vjp(self, prim: Primitive, rules: Any, symbolic: bool, xs: Sequence[Value],
                   marks: Sequence[Mark]) -> Results:  # fmt: skip
        fwd, bwd, trees = rules
        return split_by_rule(fwd, bwd, trees, symbolic, xs, marks, frame())

    def show(self, value: Value, mark: Value) -> str:
        return _show(value, mark)


class _TapeTrace(Watch):
    """A trace whose marks are variables; `tape` lists their equations with the pullbacks."""

    def __init__(self, below: Trace):
        super().__init__(below)
        self.tape: list[tuple[JaxprEqn, Pull]] = []

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
        ys, pull = _directly(pull_equation, rule, eqn, xs, on, wanted)
        self.tape.append((eqn, functools.partial(_directly, pull)))
        return ys, eqn.outvars

    def custom_jvp(self, prim: Primitive, rule: Callable[..., Any], symbolic: bool,
                   xs: Sequence[Value], marks: Sequence[Mark]) -> Results:  # fmt: skip
        moving: list[bool] = []

        def jvp(xs: Sequence[Value], dxs: Sequence[Value]):
            ys, dys = push_by_rule(rule, symbolic, xs, dxs)
            moving[:] = [dy is not None for dy in dys]
            return ys, dys

        ys, pull = _directly(pull_of_jvp, jvp, xs, tuple(m is not None for m in marks))
        pull = functools.partial(_directly, pull)
        ys, outs = self._by_rule(prim, xs, marks, ys, lambda eqn: pull)
        return ys, [v if on else None for v, on in zip(outs, moving, strict=True)]

    def custom_vjp(self, prim: Primitive, rules: Any, symbolic: bool, xs: Sequence[Value],
                   marks: Sequence[Mark]) -> Results:  # fmt: skip
        fwd, bwd, trees = rules
        on = tuple(m is not None for m in marks)
        ys, residuals, pull = pull_by_rule(fwd, bwd, trees, symbolic, xs, on)
        return self._by_rule(prim, xs, marks, ys, lambda eqn: _late(eqn, residuals, on, pull))

    def _by_rule(self, prim: Primitive, xs: Sequence[Value], marks: Sequence[Any],
                 ys: Sequence[Value], pull: Callable[[JaxprEqn], Pull]) -> Results:  # fmt: skip
        inputs = list(map(self.variable, map(jax.typeof, xs), marks))
        outs = [Var(jax.typeof(y)) for y in ys]
        eqn = equation(prim, inputs, {}, outs)
        self.tape.append((eqn, pull(eqn)))
        return ys, [v if differentiable(v.aval) else None for v in outs]


def _show(value: Value, mark: Any) -> str:
    return f"GradTracer(primal={value}, typeof(tangent)={mark.aval.str_short(short_dtypes=True)})"


def _pull_by_formula(rule: Rule, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value],
                     active: Mask) -> Pull:  # fmt: skip
    """Return the pullback of an equation that has run. It holds only the values that it reads."""
    if isinstance(rule, Pointwise):
        return _pull_pointwise(rule, eqn, xs, ys[0], active)
    if isinstance(rule, Bilinear):
        reads = [active[1], active[0], *[True] * (len(xs) - 2)]
    else:
        over = getattr(rule, "over", None) or [
            i for i, x in enumerate(xs) if differentiable(jax.typeof(x))
        ]
        reads = [i not in over for i in range(len(xs))]
    held = [x if r else _Type(x) for x, r in zip(xs, reads, strict=True)]
    of = [_Type(y) for y in ys]
    return lambda cts: list(rule.pull(eqn, held, of, cts, active))


def _pull_pointwise(rule: Rule, eqn: JaxprEqn, xs: Sequence[Value], y: Value, active: Mask) -> Pull:
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
    """Run a linear map by its tape, until the map's arrays are needed."""

    def __init__(self, tape: Any, inputs: Sequence[Var | None], outputs: Sequence[Var | None]):
        self._tape, self._inputs, self._outputs = tape, inputs, outputs

    def run(self, arrays: Any, seeds: Sequence[Value]) -> list[Value]:
        cts = pull_tape(self._tape, self._outputs, seeds)
        return [cts.get(v) if v is not None else None for v in self._inputs]

    def active_outputs(self) -> Mask:
        return tuple(v is not None for v in self._outputs)

    def with_explicit_arrays(self, arrays: Any) -> tuple[LinearRunner, Any]:
        takes = tuple(v is not None for v in self._outputs)
        avals = [v.aval for v in self._outputs if v is not None]
        return _stage_linear(
            lambda cts: self.run(None, spread(cts, takes)), takes, avals, push=False
        )


class _ProgramRunner(LinearRunner):
    """Run a linear map as a program; the arrays are the program's constants."""

    def __init__(self, program: Program, takes: Mask, gives: Mask, push: bool,
                 places: dict[Any, str]):  # fmt: skip
        self._places = places
        self._program, self._takes, self._gives, self._push = program, takes, gives, push

    def active_outputs(self) -> Mask:
        return self._gives if self._push else self._takes

    def run(self, arrays: Any, seeds: Sequence[Value]) -> list[Value]:
        values = as_jax_values(gather(seeds, self._takes))
        results = _directly(evaluate, self._program, [*arrays, *values])
        log_without(self._places, "a linear map", "")
        return spread(results, self._gives)


def _stage_linear(f: Callable[..., Any], takes: Mask, avals: Sequence[Any], push: bool
            ) -> tuple[LinearRunner, Any]:  # fmt: skip
    """Stage a linear function, which returns None for a zero; return its runner and arrays."""
    gives: list[bool] = []
    places: dict[Any, str] = {}

    def run(*seeds: Value) -> list[Value]:
        with collect_logs() as logs:
            results = f(seeds)
        places.update(logs.places("a pullback that was flattened before its call"))
        gives[:] = [r is not None for r in results]
        return gather(results, gives)

    prog = stage(run, avals, _Direct)
    equations = live(prog.equations, prog.outputs)
    read = {v for eqn in equations for v in eqn.invars if isinstance(v, Var)}
    read.update(v for v in prog.outputs if isinstance(v, Var))
    kept = tuple((v, x) for v, x in prog.consts if v in read)
    lifted_prog, consts = lift_constants(Program(prog.inputs, kept, equations, prog.outputs))
    return _ProgramRunner(lifted_prog, takes, tuple(gives), push, places), [
        as_array(x, "staging") for x in consts
    ]


def _watched(at: FunctionCall, trace: Watch, marks: Sequence[Any]):
    """Run a call with marked arguments: return outputs, their marks, their tree, and `aux`."""
    with set_current_trace(trace):
        triples = zip(at.leaves, at.args, marks, strict=True)
        # An argument that is returned unchanged keeps its type: a Python number stays one.
        args = [g if m is None else trace.lift(g if is_number(g) else x, m) for g, x, m in triples]
        y, aux = at.run(args)
        del args, triples
    leaves, tree = jax.tree.flatten(y)
    pairs = [trace.lower(x) for x in leaves]
    check_outputs([x for x, _ in pairs], at)
    for x, _ in pairs:
        as_array(x, at.caller)  # or an error; a Python number stays one
    ys = [x for x, _ in pairs]
    aux = jax.tree.map(lambda x: trace.lower(x)[0], aux)
    trace.invalidate()
    return ys, [m for _, m in pairs], tree, aux


def push_trace() -> Watch:
    """Return a trace that pushes tangents."""
    return _PushTrace(current_trace())


def jvp(at: FunctionCall, dxs: Sequence[Value], trace: Watch) -> tuple[Tree, Tree, Tree]:
    """Return output, tangent and auxiliary output of a call that runs under `trace`."""
    ys, dys, tree, aux = _watched(at, trace, dxs)
    dy = map(dense, dys, (tangent_aval(jax.typeof(y)) for y in ys))
    return tree.unflatten(ys), tree.unflatten(dy), aux


def vjp(at: FunctionCall, saveable: Mask) -> tuple[Tree, Pullback, Tree]:
    """Return output, pullback and auxiliary output; the pullback holds only `saveable` inputs."""
    inputs = [Var(jax.typeof(x)) if on else None for x, on in zip(at.args, at.active, strict=True)]
    trace = _TapeTrace(current_trace())
    ys, outputs, tree, aux = _watched(at, trace, inputs)
    runner = _TapeRunner(_leading_to(outputs, trace.tape), inputs, outputs)
    pull = Pullback(_signature(at, ys, tree), runner, (), Primals(at.args, saveable))
    return tree.unflatten(ys), pull, aux


def _leading_to(outputs: Sequence[Any], tape: Any) -> list[Any]:
    """Return the part of a tape that some outputs depend on. The rest is freed."""
    by_equation = {id(eqn): pull for eqn, pull in tape}
    return [(eqn, by_equation[id(eqn)]) for eqn in live([eqn for eqn, _ in tape], outputs)]


def linearize(at: FunctionCall) -> tuple[Tree, Pushforward, Tree]:
    """Return output, pushforward and auxiliary output."""
    out: list[Any] = []

    def tangents(dxs: Sequence[Value]) -> list[Value]:
        trace = _LinearizeTrace(current_trace())
        ys, dys, tree, aux = _watched(at, trace, spread(dxs, at.active))
        out[:] = ys, tree, aux
        return dys

    avals = [tangent_aval(jax.typeof(x)) for x in gather(at.args, at.active)]
    runner, arrays = _stage_linear(tangents, at.active, avals, push=True)
    ys, tree, aux = out
    return tree.unflatten(ys), Pushforward(_signature(at, ys, tree), runner, arrays), aux


def _signature(at: FunctionCall, ys: Sequence[Value], out_tree: Any) -> Signature:
    avals = list(map(jax.typeof, at.args)), list(map(jax.typeof, ys))
    return Signature(at.name, at.in_tree, out_tree, *avals)
