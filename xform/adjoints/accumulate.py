"""The two orders in which the backward pass can sum adjoints, edge by edge.

In the "pushed" order, the backward pass visits the operations in reverse, and each operation adds a
contribution to the adjoint of each of its inputs. In the "pulled" order, it visits the values in
reverse, and each value sums the contributions of all operations that read it.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

import jax.numpy as jnp

from xform.adjoints.parts import Edge, Operation, Step, Value
from xform.program.arithmetic import Value as Array
from xform.program.ir import gather

Adjoints = dict[int, Array]
Flows = dict[int, Array]


def pushed(values: Sequence[Value], operations: Sequence[Operation], edges: Sequence[Edge],
           output: int) -> tuple[Adjoints, Flows, list[Step]]:  # fmt: skip
    """Sum adjoints in the pushed order, operation by operation.

    Returns the adjoints by value id, the contribution of each edge by edge id, and the steps.
    """
    into = _edges_by(edges, "target")
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
    """Sum adjoints in the pulled order, value by value.

    If a local derivative is a number, its contribution is the product of that number and the
    consumer's adjoint. Returns the adjoints by value id, and the steps.
    """
    out_of, into = _edges_by(edges, "source"), _edges_by(edges, "target")
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
                position = [e.id for e in into[op.id] if e.partial is not None].index(edge.id)
                flow = op.pull(cts)[position]
            before = adjoints.get(value.id)
            adjoints[value.id] = flow if before is None else before + flow
            steps.append(Step(edge.id, adjoints[value.id]))
    return adjoints, steps


def _edges_by(edges: Sequence[Edge], end: str) -> dict[int, list[Edge]]:
    grouped: dict[int, list[Edge]] = collections.defaultdict(list)
    for edge in edges:
        grouped[getattr(edge, end)].append(edge)
    return grouped


def _cotangents(op: Operation, values: Sequence[Value], adjoints: Adjoints) -> list[Array] | None:
    """Return the cotangents of the active outputs, zeros for an output without an adjoint.

    None if no active output has an adjoint.
    """
    outs = [values[i] for i in op.outputs]
    active = gather(outs, [v.colour == "active" for v in outs])
    if not any(v.id in adjoints for v in active):
        return None
    return [adjoints.get(v.id, jnp.zeros_like(v.array)) for v in active]
