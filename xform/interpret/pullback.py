"""Reverse mode in one trace: run a program, and return its pullback.

The pullback maps cotangents of the outputs to cotangents of the inputs. While the program runs, a
tape records the pullback of each equation. The pullback of the program runs these from the last
equation to the first. Names: `xs` and `ys` are the inputs and outputs of an equation, `dxs` and
`dys` their tangents, `ct` is a cotangent. A tangent or cotangent that is None is a symbolic zero.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from xform._jax import (
    JaxprEqn,
    Primitive,
    Var,
    cotangent_aval,
    current_trace,
    jaxprs_of,
    set_current_trace,
    staging,
    tangent_aval,
    trace_of,
)
from xform.errors import WrongCotangent
from xform.interpret.activity import path
from xform.interpret.node import Pull, Structured, gather, spread
from xform.interpret.staged import Split, Substitute, stage
from xform.passes.inline import inline_bodies, jitted_body
from xform.program.arithmetic import Value, add, as_jax_values, differentiable
from xform.program.arrays import zeros
from xform.program.hijax import is_differentiable_hitype, operation_name
from xform.program.ir import Atom, Mask, Program, apply, bind, context, environment, read, write
from xform.program.source import frame, name_stack, source
from xform.registry.table import Rule, lookup, traits
from xform.registry.words import Composite


def pullback(prog: Program, active: Mask, wanted: Mask, args: Sequence[Value],
             linear: bool = False):  # fmt: skip
    """Run a program in the current trace; return its outputs and its pullback.

    The pullback takes one cotangent for each output and returns one for each input. Only `wanted`
    outputs may have a cotangent other than None, and only `active` inputs get one. With `linear`,
    the program is linear in the active inputs, and the pullback is its transpose. Then the active
    inputs may have any values, and nothing may use the returned outputs.
    """
    steps = path(prog, active, wanted).steps
    env = environment(prog, args)
    tape: list[tuple[JaxprEqn, Pull]] = []
    outer = name_stack()
    for i, eqn in enumerate(prog.equations):
        xs = [read(env, v) for v in eqn.invars]
        if i in steps:
            rule = lookup(eqn)
            with source(eqn, outer), context(eqn):
                ys, pull_eqn = vjp(rule, eqn, xs, *steps[i], linear)
            if rule.calls_user_function and staging():
                pull_eqn = functools.partial(_with_values, env, pull_eqn)
            tape.append((eqn, pull_eqn))
        else:
            ys = bind(eqn, xs, outer)
        write(env, eqn.outvars, ys)

    def pull(cts: Sequence[Value]) -> list[Value]:
        outputs = [v if on else None for v, on in zip(prog.outputs, wanted, strict=True)]
        env_ct = pull_tape(tape, outputs, cts)
        return [env_ct.get(v) if on else None for v, on in zip(prog.inputs, active, strict=True)]

    return [read(env, v) for v in prog.outputs], pull


def _with_values(env: Mapping[Var, Value], pull: Pull, cts: Sequence[Value]) -> list[Value]:
    """Call a user's backward function, which may close over values of the program.

    It then has tracers of the trace of the program, which has ended. `env` has their values here.
    """
    trace = Substitute(current_trace(), env)
    with set_current_trace(trace):
        return list(map(trace.value, pull(cts)))


def pull_tape(tape: Sequence[tuple[JaxprEqn, Pull]], outputs: Sequence[Atom | None],
         cts: Sequence[Value]) -> dict[Var, Value]:  # fmt: skip
    """Pull the cotangents of `outputs` back through a tape.

    Return the cotangents of the variables that no equation of the tape computes, which are inputs.
    An output that is None is skipped.
    """
    env_ct: dict[Var, Value] = {}
    for v, ct in zip(outputs, cts, strict=True):
        if isinstance(v, Var):
            _accumulate(env_ct, v, ct)
    outer = name_stack()
    for eqn, pull_eqn in reversed(tape):
        out_cts = [env_ct.pop(v, None) for v in eqn.outvars]
        if all(ct is None for ct in out_cts):
            continue
        with source(eqn, outer):
            with context(eqn):
                in_cts = _pull_equation(eqn, pull_eqn, out_cts)
            # The sum of two cotangents belongs to no equation: it uses the trace's mesh, not the
            # equation's.
            for v, ct in zip(eqn.invars, in_cts, strict=True):
                if isinstance(v, Var):
                    _accumulate(env_ct, v, ct)
    return {v: ct for v, ct in env_ct.items() if ct is not RULE_RETURNED_NONE}


# Stands for the cotangent of an input for which a user's rule returned None. Other equations pass
# it on as a symbolic zero, so that the users' rules that the backward pass reaches later are still
# called, as in JAX. At the end of a nested program it becomes None, which means that no cotangent
# arrives.
RULE_RETURNED_NONE: Any = object()


def _pull_equation(eqn: JaxprEqn, pull: Pull, out_cts: Sequence[Value]) -> Sequence[Value]:
    """Return the cotangents of an equation's inputs, from those of its outputs."""
    by_user = lookup(eqn).calls_user_function  # it gets a Python number unchanged, as in JAX
    known = [None if ct is RULE_RETURNED_NONE else ct for ct in out_cts]
    if all(ct is None for ct in known) and not by_user:
        return [RULE_RETURNED_NONE if differentiable(v.aval) else None for v in eqn.invars]
    given = known if by_user else as_jax_values(known)
    in_cts = pull(given)
    for v, ct in zip(eqn.invars, in_cts, strict=True):
        if isinstance(v, Var) and ct is not None and ct is not RULE_RETURNED_NONE:
            check_cotangent(eqn, v, ct, given)
    return in_cts


def _accumulate(env_ct: dict[Var, Value], v: Var, ct: Value) -> None:
    """Add a cotangent to that of a variable; None and `RULE_RETURNED_NONE` add nothing."""
    if ct is None:
        return
    before = env_ct.get(v, RULE_RETURNED_NONE)
    if before is RULE_RETURNED_NONE:
        env_ct[v] = ct
    elif ct is not RULE_RETURNED_NONE:
        env_ct[v] = add([before, ct])


def check_cotangent(eqn: JaxprEqn, v: Var, ct: Value, out_cts: Sequence[Value] = ()) -> None:
    """Raise WrongCotangent if a rule returned a value that is not a cotangent of the input `v`.

    As in JAX, a `custom_vjp` may return another float dtype for a float input. Other equations pass
    such a dtype on: those that contain the `custom_vjp` in a nested program, and those that receive
    that dtype in `out_cts`, the cotangents of their outputs.
    """
    aval: Any = v.aval
    ct_aval = jax.typeof(ct)
    if is_differentiable_hitype(aval) and ct_aval == cotangent_aval(aval):
        return
    shape, dtype = ct_aval.shape, ct_aval.dtype
    if shape == aval.shape and dtype == aval.dtype:
        return
    unchecked = getattr(jax.config, "jax_disable_bwd_checks", False)
    custom = traits(eqn.primitive).calls == "custom"
    floats = all(jax.numpy.issubdtype(d, np.floating) for d in (dtype, aval.dtype))
    other_float = floats and (custom or jaxprs_of(eqn) or _other_dtype(eqn, out_cts))
    if not (unchecked and custom) and (shape != aval.shape or not other_float):
        raise WrongCotangent(
            f"pullback of {operation_name(eqn)}",
            f"its rule returned a cotangent {dtype}{list(shape)} for an input of type "
            f"{aval.str_short()}",
            frame(eqn),
            "let the rule return a cotangent of the input's shape and dtype",
        )


def _other_dtype(eqn: JaxprEqn, cts: Sequence[Value]) -> bool:
    """Return whether a cotangent of an equation's output has another dtype than the output."""
    pairs = [(ct, v.aval) for ct, v in zip(cts, eqn.outvars, strict=False) if ct is not None]
    return any(getattr(jax.typeof(ct), "dtype", None) != getattr(aval, "dtype", None)
               for ct, aval in pairs)  # fmt: skip


def vjp(rule: Rule, eqn: JaxprEqn, xs: Sequence[Value], active: Mask, wanted: Mask,
        linear: bool = False):  # fmt: skip
    """Run one equation in the current trace; return its outputs and its pullback.

    `linear` is explained at `pullback`.
    """
    if isinstance(rule, Structured):
        return (rule.transposed if linear else rule.vjp)(eqn, xs, active, wanted)
    if isinstance(rule, Composite):
        return pull_of_jvp(lambda xs, dxs: rule.jvp(eqn, xs, dxs), xs, active, wanted)
    ys = apply(eqn, xs)
    return ys, lambda cts: list(rule.pull(eqn, xs, ys, cts, active))


class _LinearTrace(Split):
    """A trace that stages the tangent part of a jvp rule, which is a linear program.

    If that part calls a `custom_jvp` function, the function is linear there. So its rule is not
    needed, and its body is staged.
    """

    def process_custom_jvp_call(self, primitive: Primitive, fun: Any, jvp: Any, args: Any, /,
                                **options: Any) -> Any:  # fmt: skip
        if self.trace_for(args) is not self.staged:
            return super().process_custom_jvp_call(primitive, fun, jvp, args, **options)
        with set_current_trace(self):
            return fun.call_wrapped(*args)


def _any_tangent(x: Value, aval: Any) -> Value:
    """Return some value of type `aval`, the tangent type of `x`: zeros, or `x` itself.

    An object of a user's hijax type may have no zeros; then its tangent type is its own type.
    """
    return x if is_differentiable_hitype(aval) and jax.typeof(x) == aval else zeros(aval)


def pull_of_jvp(
    jvp: Callable[..., Any], xs: Sequence[Value], active: Mask, wanted: Mask | None = None
) -> tuple[list[Value], Pull]:
    """Run a jvp rule at `xs`; return its outputs, and the transpose of its linear part.

    The rule runs once. Its operations on known values run at once, and its operations on tangents
    are staged as a program. That program is linear, so its pullback at any point is its transpose,
    and so the pullback of the rule. `wanted` says which outputs have a cotangent; None: all.
    """
    known_ys: list[Value] = []  # None where an output is staged
    staged: list[bool] = []  # which outputs are staged
    has_tangent: list[bool] = []  # which outputs have a wanted tangent

    def tangents(*dxs: Value) -> list[Value]:
        ys, dys = jvp(list(xs), spread(dxs, active))
        wanted_ys = wanted or tuple(differentiable(jax.typeof(y)) for y in ys)
        has_tangent[:] = [dy is not None and on for dy, on in zip(dys, wanted_ys, strict=True)]
        # If a rule runs primals and tangents in one loop, its primal outputs are staged too.
        staged[:] = [trace_of(y) is trace_of(dxs[0]) for y in ys]
        known_ys[:] = [None if s else y for y, s in zip(ys, staged, strict=True)]
        return [*gather(ys, staged), *gather(dys, has_tangent)]

    avals = [tangent_aval(jax.typeof(x)) for x in gather(xs, active)]
    prog = stage(tangents, avals, _LinearTrace)
    n_staged = sum(staged)
    inputs_on = (True,) * len(avals)
    outputs_on = (False,) * n_staged + (True,) * sum(has_tangent)
    point = list(map(_any_tangent, gather(xs, active), avals))
    if n_staged:  # a jitted function may compute primals and tangents; its equations do not
        prog = inline_bodies(prog, jitted_body)
    linear = not n_staged or not any(path(prog, inputs_on).outputs[:n_staged])
    outputs, pull = pullback(prog, inputs_on, outputs_on, point, linear)
    staged_ys = spread(outputs[:n_staged], staged)
    ys = [b if s else a for a, b, s in zip(known_ys, staged_ys, staged, strict=True)]

    def pull_primal(cts: Sequence[Value]) -> list[Value]:
        dys = gather(cts, has_tangent)
        if all(dy is None for dy in dys):
            return [None] * len(xs)
        return spread(pull([*[None] * n_staged, *dys]), active)

    return ys, pull_primal
