"""Evaluation of a loss with probes on its layers: the program with one more input for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xform._jax import JaxprEqn, Var, cond_p, scan_counts, scan_p, while_p
from xform.diagnosis.layers import Layer, Level, NestedLayer
from xform.program.arithmetic import Value
from xform.program.equation import scan_options, switch
from xform.program.ir import bind, environment, evaluate, program, read, write
from xform.program.source import name_stack, source

# A function of a layer, of a function that returns the values of its program, and of its sink. It
# returns the value to use as the layer's result.
Probe = Callable[[Layer, Callable[[Var], Value], Value], Value]


def sinks(rows: Sequence[NestedLayer], size: int) -> list[Value]:
    """Return zeros of shape `[*trip counts, size]` for each layer."""
    return [jnp.zeros((*row.trips, size), jnp.float32) for row in rows]


def run(level: Level, args: Sequence[Value], into: Sequence[Value], probe: Probe) -> list[Value]:
    """Evaluate a program with a probe on each layer.

    Args:
      level: the program and its layers.
      args: inputs of the program.
      into: the sinks of the layers, in the order of `level.rows`.
      probe: the probe.

    Returns:
      The outputs of the program.
    """
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
    """Evaluate a loop, branch or remat region with probes inside."""
    params = eqn.params
    if eqn.primitive is cond_p:
        branch = lambda i: lambda xs, into: run(levels[i], xs, into[i], probe)
        branches = [branch(i) for i in range(len(levels))]
        return switch(params, xs[0], branches, list(xs[1:]), list(into))
    (level,), (own_sinks,) = levels, into
    if eqn.primitive is scan_p:
        nc, nk = scan_counts(params)

        def step(carry: Any, x: Any) -> Any:
            ys = run(level, [*xs[:nc], *carry, *x[0]], x[1], probe)
            return ys[:nk], ys[nk:]

        scanned = list(xs[nc + nk :]), list(own_sinks)
        carry, ys = lax.scan(step, list(xs[nc : nc + nk]), scanned, **scan_options(params))
        return [*carry, *ys]
    if eqn.primitive is while_p:
        return _while(eqn, level, xs, own_sinks, probe)
    region = jax.checkpoint(
        lambda xs, own_sinks: run(level, xs, own_sinks, probe),
        policy=params["policy"],
        prevent_cse=params["prevent_cse"] if isinstance(params["prevent_cse"], bool) else True,
    )
    return region(list(xs), list(own_sinks))


def _while(eqn: JaxprEqn, level: Level, xs: Sequence[Value], into: Sequence[Value], probe: Probe
           ) -> list[Value]:  # fmt: skip
    """Evaluate a loop of unknown length with probes inside.

    Its iterations share the sinks, so their readings add up.
    """
    a = eqn.params["cond_nconsts"]
    b = a + eqn.params["body_nconsts"]
    condition = program(eqn.params["cond_jaxpr"])
    return list(lax.while_loop(
        lambda state: evaluate(condition, [*xs[:a], *state])[0],
        lambda state: run(level, [*xs[a:b], *state], into, probe),
        list(xs[b:]),
    ))  # fmt: skip
