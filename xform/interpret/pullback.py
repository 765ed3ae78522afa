"""Reverse mode in one trace: run a program, and return its pullback."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from xform._jax import (
    JaxprEqn,
    Primitive,
    Var,
    cotangent_aval,
    jaxprs_of,
    set_current_trace,
    tangent_aval,
    trace_of,
    zeros,
)
from xform.errors import WrongCotangent
from xform.interpret.activity import path
from xform.interpret.node import Pull, Structured, gather, spread
from xform.interpret.staged import Split, stage
from xform.program.arithmetic import Value, add, as_jax_value, differentiable
from xform.program.hijax import is_differentiable_hitype, operation_name
from xform.program.ir import Atom, Mask, Program, apply, bind, environment, read, write
from xform.program.source import frame, name_stack, source
from xform.registry.table import Rule, lookup, traits
from xform.registry.words import Composite


def pullback(prog: Program, active: Mask, wanted: Mask, args: Sequence[Value],
             linear: bool = False):  # fmt: skip
    """Run a program; return its outputs, and the map from their cotangents to those of the inputs.

    A cotangent that is zero is None, in and out. Only the `wanted` outputs may bring a cotangent,
    and only the `active` inputs receive one. Everything is bound in the current trace. With
    `linear`, the program is linear in the active inputs; it is transposed, and its outputs do not
    matter.
    """
    steps = path(prog, active, wanted).steps
    env = environment(prog, args)
    tape: list[tuple[JaxprEqn, Pull]] = []
    outer = name_stack()
    for i, eqn in enumerate(prog.equations):
        xs = [read(env, v) for v in eqn.invars]
        if i in steps:
            with source(eqn, outer), eqn.ctx.manager:
                ys, pull_eqn = vjp(lookup(eqn), eqn, xs, *steps[i], linear)
            tape.append((eqn, pull_eqn))
        else:
            ys = bind(eqn, xs, outer)
        write(env, eqn.outvars, ys)

    def pull(cts: Sequence[Value]) -> list[Value]:
        seeds = [v if on else None for v, on in zip(prog.outputs, wanted, strict=True)]
        env_ct = pull_tape(tape, seeds, cts)
        return [env_ct.get(v) if on else None for v, on in zip(prog.inputs, active, strict=True)]

    return [read(env, v) for v in prog.outputs], pull


def pull_tape(tape: Sequence[tuple[JaxprEqn, Pull]], outputs: Sequence[Atom | None],
         cts: Sequence[Value]) -> dict[Var, Value]:  # fmt: skip
    """Pull cotangents of some outputs back through a tape; return the cotangents of variables."""
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
            with eqn.ctx.manager:
                in_cts = _pulled(eqn, pull_eqn, out_cts)
            # A sum belongs to no equation: it uses the trace's mesh, not the equation's.
            for v, ct in zip(eqn.invars, in_cts, strict=True):
                if isinstance(v, Var):
                    _accumulate(env_ct, v, ct)
    return {v: ct for v, ct in env_ct.items() if ct is not RULE_RETURNED_NONE}


# The cotangent of an input for which a user's rule returned None. It is a symbolic zero that other
# equations pass on, so that users' rules behind them are still called, as in JAX. At the end of a
# nested program it becomes None, which means that no cotangent arrives.
RULE_RETURNED_NONE: Any = object()


def _pulled(eqn: JaxprEqn, pull: Pull, cts: Sequence[Value]) -> Sequence[Value]:
    """Return the cotangents of an equation's inputs."""
    by_user = lookup(eqn).calls_user_function  # it gets a Python number unchanged, as in JAX
    some = [None if ct is RULE_RETURNED_NONE else ct if by_user else as_jax_value(ct) for ct in cts]
    if all(ct is None for ct in some) and not by_user:
        return [RULE_RETURNED_NONE if differentiable(v.aval) else None for v in eqn.invars]
    results = pull(some)
    for v, ct in zip(eqn.invars, results, strict=True):
        if isinstance(v, Var) and ct is not None and ct is not RULE_RETURNED_NONE:
            check_cotangent(eqn, v, ct, some)
    return results


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
    off = getattr(jax.config, "jax_disable_bwd_checks", False)
    custom = traits(eqn.primitive).calls == "custom"
    floats = all(jax.numpy.issubdtype(d, np.floating) for d in (dtype, aval.dtype))
    other_float = floats and (custom or jaxprs_of(eqn) or _other_dtype(eqn, out_cts))
    if not (off and custom) and (shape != aval.shape or not other_float):
        raise WrongCotangent(
            f"pullback of {operation_name(eqn)}",
            f"its rule returned a cotangent {dtype}{list(shape)} for an input of type "
            f"{aval.str_short()}",
            frame(eqn),
            "let the rule return a cotangent of the input's shape and dtype",
        )


def _other_dtype(eqn: JaxprEqn, cts: Sequence[Value]) -> bool:
    """Whether a cotangent of an equation's output has another dtype than the output."""
    pairs = [(ct, v.aval) for ct, v in zip(cts, eqn.outvars, strict=False) if ct is not None]
    return any(getattr(jax.typeof(ct), "dtype", None) != getattr(aval, "dtype", None)
               for ct, aval in pairs)  # fmt: skip


def vjp(rule: Rule, eqn: JaxprEqn, xs: Sequence[Value], active: Mask, wanted: Mask,
        linear: bool = False):  # fmt: skip
    """Run one equation in the current trace; return its outputs and pullback."""
    if isinstance(rule, Structured):
        return (rule.transposed if linear else rule.vjp)(eqn, xs, active, wanted)
    if isinstance(rule, Composite):
        return pull_of_jvp(lambda xs, dxs: rule.jvp(eqn, xs, dxs), xs, active, wanted)
    ys = apply(eqn, xs)
    return ys, lambda cts: list(rule.pull(eqn, xs, ys, cts, active))


class _LinearTrace(Split):
    """A trace in which a custom function of tangents is linear, so its derivative is itself."""

    def process_custom_jvp_call(self, primitive: Primitive, fun: Any, jvp: Any, args: Any, /,
                                **options: Any) -> Any:  # fmt: skip
        if self.where(args) is not self.staged:
            return super().process_custom_jvp_call(primitive, fun, jvp, args, **options)
        with set_current_trace(self):
            return fun.call_wrapped(*args)


def _point(x: Value, aval: Any) -> Value:
    """Return any value of a tangent's type: zeros, or the primal if an object has no zero."""
    return x if is_differentiable_hitype(aval) and jax.typeof(x) == aval else zeros(aval)


def pull_of_jvp(
    jvp: Callable[..., Any], xs: Sequence[Value], active: Mask, wanted: Mask | None = None
) -> tuple[list[Value], Pull]:
    """Run a jvp rule; return its outputs, and its linear part transposed as the pullback.

    The rule runs once, at the primals, with staged tangents. Its operations on the tangents are a
    linear program, and the pullback of that program is its transpose. The point of the pullback
    does not matter, and emission drops what is computed from it. `wanted` is None for all outputs.
    """
    outs: list[Value] = []
    staged: list[bool] = []
    nonzero: list[bool] = []

    def tangents(*dxs: Value) -> list[Value]:
        ys, dys = jvp(list(xs), spread(dxs, active))
        want = wanted or tuple(differentiable(jax.typeof(y)) for y in ys)
        nonzero[:] = [dy is not None and on for dy, on in zip(dys, want, strict=True)]
        # A rule that runs primals and tangents in one loop stages the primals too.
        staged[:] = [trace_of(y) is trace_of(dxs[0]) for y in ys]
        outs[:] = [None if s else y for y, s in zip(ys, staged, strict=True)]
        return [*gather(ys, staged), *gather(dys, nonzero)]

    avals = [tangent_aval(jax.typeof(x)) for x in gather(xs, active)]
    prog = stage(tangents, avals, _LinearTrace)
    k = sum(staged)
    ways = (True,) * len(avals), (False,) * k + (True,) * sum(nonzero)
    point = map(_point, gather(xs, active), avals)
    outputs, pull = pullback(prog, *ways, list(point), linear=not k)
    late = spread(outputs[:k], staged)
    ys = [b if s else a for a, b, s in zip(outs, late, staged, strict=True)]

    def pull_primal(cts: Sequence[Value]) -> list[Value]:
        dys = gather(cts, nonzero)
        if all(dy is None for dy in dys):
            return [None] * len(xs)
        return spread(pull([*[None] * k, *dys]), active)

    return ys, pull_primal
