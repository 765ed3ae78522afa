"""Reverse mode in one trace: run a program, and return its pullback."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from xform._jax import JaxprEqn, Var, frame, name_stack, source, zeros
from xform.errors import WrongCotangent
from xform.interpret.activity import path
from xform.interpret.node import Pull, Structured, gather, spread
from xform.ir import Mask, Program, bind, environment, read, trace, write
from xform.table import Composite, Value, lookup


def pullback(prog: Program, active: Mask, wanted: Mask, args: Sequence[Value]):
    """Outputs of a program, and the map from cotangents of its outputs to those of its inputs.

    Cotangents are None where zero, in and out; only the `wanted` outputs may bring one, only the
    `active` inputs receive one. Everything is bound in the current trace.
    """
    steps = path(prog, active, wanted).steps
    env = environment(prog, args)
    tape: list[tuple[JaxprEqn, Pull]] = []
    outer = name_stack()
    for i, eqn in enumerate(prog.equations):
        xs = [read(env, v) for v in eqn.invars]
        if i in steps:
            with source(eqn, outer), eqn.ctx.manager:
                ys, pull_eqn = vjp(eqn, xs, *steps[i])
            tape.append((eqn, pull_eqn))
        else:
            ys = bind(eqn, xs, outer)
        write(env, eqn.outvars, ys)

    def pull(cts: Sequence[Value]) -> list[Value]:
        env_ct: dict[Var, Value] = {}
        for v, ct, on in zip(prog.outputs, cts, wanted, strict=True):
            if on and isinstance(v, Var):
                _accumulate(env_ct, v, ct)
        outer = name_stack()
        for eqn, pull_eqn in reversed(tape):
            out_cts = [env_ct.pop(v, None) for v in eqn.outvars]
            if all(ct is None for ct in out_cts):
                continue
            with source(eqn, outer), eqn.ctx.manager:
                for v, ct in zip(eqn.invars, pull_eqn(out_cts), strict=True):
                    if ct is not None and isinstance(v, Var):
                        _check(eqn, v, ct)
                        _accumulate(env_ct, v, ct)
        return [env_ct.get(v) if on else None for v, on in zip(prog.inputs, active, strict=True)]

    return [read(env, v) for v in prog.outputs], pull


def _accumulate(env_ct: dict[Var, Value], v: Var, ct: Value) -> None:
    if ct is not None:
        env_ct[v] = lax.add(env_ct[v], ct) if v in env_ct else ct


def _check(eqn: JaxprEqn, v: Var, ct: Value) -> None:
    aval: Any = v.aval
    if np.shape(ct) != aval.shape or ct.dtype != aval.dtype:
        raise WrongCotangent(
            f"pullback of {eqn.primitive.name}",
            f"its rule returned a cotangent {ct.dtype}{list(np.shape(ct))} for an input of type "
            f"{aval.str_short()}",
            frame(eqn),
            "let the rule return a cotangent of the input's shape and dtype",
        )


def vjp(eqn: JaxprEqn, xs: Sequence[Value], active: Mask, wanted: Mask):
    """Outputs and pullback of one equation."""
    rule = lookup(eqn)
    if isinstance(rule, Structured):
        return rule.vjp(eqn, xs, active, wanted)
    if isinstance(rule, Composite):
        return pull_of_jvp(
            lambda ps, dps: rule.call(rule.formulas[0], eqn, ps, dps), xs, active, wanted
        )
    ys = bind(eqn, xs)
    return ys, lambda cts: list(rule.pull(eqn, xs, ys, cts, active))


def pull_of_jvp(
    jvp: Callable[..., Any], xs: Sequence[Value], active: Mask, wanted: Mask
) -> tuple[list[Value], Pull]:
    """Outputs and pullback of a jvp rule: its linear part, transposed.

    The rule is traced once, as a program of primals and tangents; a pullback of that program with
    only the tangents active is the transpose of its linear part. What the program computes from the
    tangents themselves is dead code, and emission drops it.
    """
    n = len(xs)
    nonzero: list[bool] = []

    def flat(*args: Value) -> list[Value]:
        ys, dys = jvp(list(args[:n]), spread(args[n:], active))
        nonzero[:] = [dy is not None and on for dy, on in zip(dys, wanted, strict=True)]
        return [*ys, *gather(dys, tuple(nonzero))]

    dxs = [zeros(jax.typeof(x)) for x in gather(xs, active)]
    prog = trace(flat, *xs, *dxs)
    k = len(wanted)
    outs, pull = pullback(
        prog,
        (False,) * n + (True,) * len(dxs),
        (False,) * k + (True,) * sum(nonzero),
        [*xs, *dxs],
    )

    def pull_primal(cts: Sequence[Value]) -> list[Value]:
        dys = gather(cts, tuple(nonzero))
        if all(dy is None for dy in dys):
            return [None] * n
        return spread(pull([*[None] * k, *dys])[n:], active)

    return outs[:k], pull_primal
