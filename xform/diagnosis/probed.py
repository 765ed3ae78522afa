"""Evaluate a loss with a probe on each layer.

A *probe* replaces the result of a layer by a function of the result that has the same value. The
program gets one more input for each probe, its *sink*: a vector of zeros. The probe defines the
gradient of the sink to be measurements of the layer. In a scan the sinks are scanned, so each
iteration has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xform._jax import JaxprEqn, Var, cond_p, scan_counts, scan_p, while_p
from xform.diagnosis.layers import Layer, NestedLayer, ProgramLayers
from xform.program.arithmetic import Value
from xform.program.equation import context, scan_like, switch
from xform.program.ir import bind, environment, evaluate, program, read, write
from xform.program.source import name_stack, source

# `probe(layer, value_of, sink)` returns the value to use as the layer's result. `value_of` returns
# the value of a variable of the layer's program.
Probe = Callable[[Layer, Callable[[Var], Value], Value], Value]


def zero_sinks(rows: Sequence[NestedLayer], size: int) -> list[Value]:
    """Return zeros of shape `[*iterations of the scans around it, size]` for each layer."""
    return [jnp.zeros((*row.trips, size), jnp.float32) for row in rows]


def run_with_probes(
    layers: ProgramLayers, args: Sequence[Value], sinks: Sequence[Value], probe: Probe
) -> list[Value]:
    """Evaluate a program with a probe on each layer.

    Args:
      layers: the program and its layers.
      args: inputs of the program.
      sinks: the sinks of the layers, in the order of `layers.rows`.
      probe: the probe.

    Returns:
      The outputs of the program.
    """
    env = environment(layers.program, args)
    remaining = iter(sinks)
    outer = name_stack()

    def value(v: Var) -> Value:
        return env[v]

    for eqn in layers.program.equations:
        xs = [read(env, v) for v in eqn.invars]
        nested = layers.nested.get(id(eqn), ())
        nested_sinks = [[next(remaining) for _ in inner.rows] for inner in nested]
        if any(nested_sinks):
            with source(eqn, outer), context(eqn):
                ys = _run_nested(eqn, nested, xs, nested_sinks, probe)
        else:
            ys = bind(eqn, xs, outer)
        write(env, eqn.outvars, ys)
        for layer in layers.by_equation.get(id(eqn), ()):
            with source(layer.start, outer):
                env[layer.result] = probe(layer, value, next(remaining))
    return [read(env, v) for v in layers.program.outputs]


def _run_nested(
    eqn: JaxprEqn,
    nested: Sequence[ProgramLayers],
    xs: Sequence[Value],
    sinks: Sequence[Sequence[Value]],
    probe: Probe,
) -> list[Value]:
    """Evaluate a loop, branch or remat region with probes inside.

    `nested` and `sinks` have an entry for each program inside it.
    """
    params = eqn.params
    if eqn.primitive is cond_p:
        branch = lambda i: lambda xs, sinks: run_with_probes(nested[i], xs, sinks[i], probe)
        branches = [branch(i) for i in range(len(nested))]
        return switch(params, xs[0], branches, list(xs[1:]), list(sinks))
    (body,), (body_sinks,) = nested, sinks
    if eqn.primitive is scan_p:
        consts, carries = scan_counts(params)
        first_scanned = consts + carries

        def iteration(carry: Any, slices: Any) -> Any:
            scanned, sinks = slices
            ys = run_with_probes(body, [*xs[:consts], *carry, *scanned], sinks, probe)
            return ys[:carries], ys[carries:]

        start, scanned = (
            list(xs[consts:first_scanned]),
            (list(xs[first_scanned:]), list(body_sinks)),
        )
        carry, ys = scan_like(params, iteration, start, scanned)
        return [*carry, *ys]
    if eqn.primitive is while_p:
        return _while(eqn, body, xs, body_sinks, probe)
    region = jax.checkpoint(
        lambda xs, sinks: run_with_probes(body, xs, sinks, probe),
        policy=params["policy"],
        prevent_cse=params["prevent_cse"] if isinstance(params["prevent_cse"], bool) else True,
    )
    return region(list(xs), list(body_sinks))


def _while(eqn: JaxprEqn, body: ProgramLayers, xs: Sequence[Value], sinks: Sequence[Value],
           probe: Probe) -> list[Value]:  # fmt: skip
    """Evaluate a loop of unknown length with probes inside.

    Its iterations share the sinks, so their readings add up.
    """
    a = eqn.params["cond_nconsts"]  # the operands: constants of the condition, of the body, carry
    b = a + eqn.params["body_nconsts"]
    condition = program(eqn.params["cond_jaxpr"])
    return list(lax.while_loop(
        lambda state: evaluate(condition, [*xs[:a], *state])[0],
        lambda state: run_with_probes(body, [*xs[a:b], *state], sinks, probe),
        list(xs[b:]),
    ))  # fmt: skip
