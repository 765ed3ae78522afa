"""Evaluate a loss with a probe on each layer.

A *probe* replaces the result of a layer by a function of the result that has the same value. The
program gets one more input for each probe, its *sink*: a vector of zeros. The probe defines the
gradient of the sink to be measurements of the layer. In a scan the sinks are scanned, so each
iteration has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax.numpy as jnp

from xform._jax import JaxprEqn, Var
from xform.diagnosis.layers import Layer, NestedLayer, ProgramLayers
from xform.program.arithmetic import Value
from xform.program.equation import context
from xform.program.flow import BodyFunction
from xform.program.ir import bind, environment, evaluate, read, write
from xform.program.source import name_stack, source
from xform.registry.table import flow_of, rule_of

# `probe(layer, value_of, sink)` returns the value to use as the layer's result. `value_of` returns
# the value of a variable of the layer's program.
Probe = Callable[[Layer, Callable[[Var], Value], Value], Value]


def zero_sinks(rows: Sequence[NestedLayer], size: int) -> list[Value]:
    """Return zeros of shape `[*iterations of the scans around it, size]` for each layer."""
    return [jnp.zeros((*row.lengths, size), jnp.float32) for row in rows]


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

    `nested` and `sinks` have an entry for each program inside it. The iterations of a loop of
    unknown length share the sinks, so their readings add up.
    """
    rule, flow = rule_of(eqn.primitive), flow_of(eqn)
    assert rule is not None
    assert flow is not None

    def with_probes(i: int) -> BodyFunction:
        return lambda xs, sinks: (run_with_probes(nested[i], xs, sinks[i], probe), None)

    functions = list(map(with_probes, range(len(nested))))
    if (condition := flow.condition) is not None:
        functions.insert(0, lambda xs, sinks: (evaluate(condition.program, xs), None))
    return rule.rebuild(eqn, xs, functions, list(map(list, sinks)))[0]
