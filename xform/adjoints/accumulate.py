"""The two orders in which adjoints are added up, edge by edge.

Both go back through the operations. Pushed: an operation whose outputs' adjoints are known hands to
each of its inputs what flows there. Pulled: a value that is reached adds up what comes from each of
its consumers, all of which were reached before.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

import jax.numpy as jnp

from xform.adjoints.parts import Edge, Operation, Step, Value
from xform.arithmetic import Value as Array
from xform.ir import gather

Adjoints = dict[int, Array]
Flows = dict[int, Array]


def pushed(values: Sequence[Value], operations: Sequence[Operation], edges: Sequence[Edge],
           output: int) -> tuple[Adjoints, Flows, list[Step]]:  # fmt: skip
    """Adjoints by value, what flows along each edge, and the steps, pushed to in-edges."""
    into = _by(edges, "target")
    adjoints: Adjoints = {output: jnp.ones_like(values[output].array)}
    flows: Flows = {}
    steps: list[Step] = []
    for op in reversed(operations):
        cts = _cotangents(op, values, adjoints)
        if op.pull is None or cts is None:
            continue
        active = [e for e in into[op.id] if e.partial is not None]
        for edge, flow in zip(active, op.pull(cts), strict=True):
            before = adjoints.get(edge.source)
            adjoints[edge.source] = flow if before is None else before + flow
            flows[edge.id] = flow
            steps.append(Step(edge.id, adjoints[edge.source]))
    return adjoints, flows, steps


def pulled(values: Sequence[Value], operations: Sequence[Operation], edges: Sequence[Edge],
           output: int) -> tuple[Adjoints, list[Step]]:  # fmt: skip
    """Adjoints by value, and the steps, pulled from out-edges; numbers by the chain rule alone."""
    out_of, into = _by(edges, "source"), _by(edges, "target")
    adjoints: Adjoints = {output: jnp.ones_like(values[output].array)}
    steps: list[Step] = []
    for value in reversed(values):
        for edge in sorted(out_of[value.id], key=lambda e: (-e.target, e.operand)):
            op = operations[edge.target]
            cts = _cotangents(op, values, adjoints)
            if edge.partial is None or op.pull is None or cts is None:
                continue
            if edge.partial.value is not None:
                flow = jnp.asarray(edge.partial.value * cts[0], value.array.dtype)
            else:
                place = [e.id for e in into[op.id] if e.partial is not None].index(edge.id)
                flow = op.pull(cts)[place]
            before = adjoints.get(value.id)
            adjoints[value.id] = flow if before is None else before + flow
            steps.append(Step(edge.id, adjoints[value.id]))
    return adjoints, steps


def _by(edges: Sequence[Edge], end: str) -> dict[int, list[Edge]]:
    found: dict[int, list[Edge]] = collections.defaultdict(list)
    for edge in edges:
        found[getattr(edge, end)].append(edge)
    return found


def _cotangents(op: Operation, values: Sequence[Value], adjoints: Adjoints) -> list[Array] | None:
    """Those of the active outputs, zero where nothing comes; None if nothing comes at all."""
    outs = [values[i] for i in op.outputs]
    active = gather(outs, [v.colour == "active" for v in outs])
    if not any(v.id in adjoints for v in active):
        return None
    return [adjoints.get(v.id, jnp.zeros_like(v.array)) for v in active]
