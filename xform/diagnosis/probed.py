"""A loss with probes on its layers: the same program, with one more argument for each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xform._jax import JaxprEqn, Var, cond_p, scan_counts, scan_p, while_p
from xform.arithmetic import Value
from xform.diagnosis.layers import Layer, Level, Row
from xform.equation import scan_options, switch
from xform.ir import bind, environment, evaluate, program, read, write
from xform.source import name_stack, source

# What is done to a layer's result where it is made: the layer, the values of its program, its sink.
Probe = Callable[[Layer, Callable[[Var], Value], Value], Value]


def sinks(rows: Sequence[Row], size: int) -> list[Value]:
    """A vector of zeros for each layer, and for each trip of the loops around it."""
    return [jnp.zeros((*row.trips, size), jnp.float32) for row in rows]


def run(level: Level, args: Sequence[Value], into: Sequence[Value], probe: Probe) -> list[Value]:
    """Outputs of a program whose layers are probed; `into` is as `level.rows` are."""
    env = environment(level.program, args)
    rest = iter(into)
    outer = name_stack()

    def value(v: Var) -> Value:
        return env[v]

    for eqn in level.program.equations:
        xs = [read(env, v) for v in eqn.invars]
        levels = level.inner.get(id(eqn), ())
        mine = [[next(rest) for _ in inner.rows] for inner in levels]
        if any(mine):
            with source(eqn, outer), eqn.ctx.manager:
                ys = _inside(eqn, levels, xs, mine, probe)
        else:
            ys = bind(eqn, xs, outer)
        write(env, eqn.outvars, ys)
        for layer in level.after.get(id(eqn), ()):
            with source(layer.start, outer):
                env[layer.out] = probe(layer, value, next(rest))
    return [read(env, v) for v in level.program.outputs]


def _inside(eqn: JaxprEqn, levels: Sequence[Level], xs: Sequence[Value],
            into: Sequence[Sequence[Value]], probe: Probe) -> list[Value]:  # fmt: skip
    """Outputs of a loop, a branch or a region, probed inside."""
    params = eqn.params
    if eqn.primitive is cond_p:
        branch = lambda i: lambda xs, into: run(levels[i], xs, into[i], probe)
        branches = [branch(i) for i in range(len(levels))]
        return switch(params, xs[0], branches, list(xs[1:]), list(into))
    (level,), (sunk,) = levels, into
    if eqn.primitive is scan_p:
        nc, nk = scan_counts(params)

        def step(carry: Any, x: Any) -> Any:
            ys = run(level, [*xs[:nc], *carry, *x[0]], x[1], probe)
            return ys[:nk], ys[nk:]

        scanned = list(xs[nc + nk :]), list(sunk)
        carry, ys = lax.scan(step, list(xs[nc : nc + nk]), scanned, **scan_options(params))
        return [*carry, *ys]
    if eqn.primitive is while_p:
        return _while(eqn, level, xs, sunk, probe)
    again = jax.checkpoint(
        lambda xs, sunk: run(level, xs, sunk, probe),
        policy=params["policy"],
        prevent_cse=params["prevent_cse"] if isinstance(params["prevent_cse"], bool) else True,
    )
    return again(list(xs), list(sunk))


def _while(eqn: JaxprEqn, level: Level, xs: Sequence[Value], into: Sequence[Value], probe: Probe
           ) -> list[Value]:  # fmt: skip
    """All trips of a loop of unknown length share a sink, in which their readings add up."""
    a = eqn.params["cond_nconsts"]
    b = a + eqn.params["body_nconsts"]
    until = program(eqn.params["cond_jaxpr"])
    return list(lax.while_loop(
        lambda state: evaluate(until, [*xs[:a], *state])[0],
        lambda state: run(level, [*xs[a:b], *state], into, probe),
        list(xs[b:]),
    ))  # fmt: skip
