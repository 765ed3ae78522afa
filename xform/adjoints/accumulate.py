"""Sum the adjoints of a computational graph, edge by edge, in either of two orders.

Words:

- the *adjoint* of a value is the gradient of the output with respect to it;
- an *edge* leads from a value to an operation that reads the value. Its *contribution* is the part
  of the value's adjoint that comes from this operation;
- a value is *active* if it depends differentiably on an input that is differentiated;
- an *update* adds the contribution of one edge to the adjoint of a value. The list of all updates
  shows the order of the backward pass.

Both orders visit the graph backward. In the "pushed" order, the backward pass visits operations,
and each operation adds a contribution to the adjoint of each of its inputs. In the "pulled" order,
it visits values, and each value sums the contributions of all operations that read it. Both orders
give the same adjoints up to rounding.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from xform.adjoints.parts import AdjointUpdate, Edge, GraphOperation, GraphValue
from xform.program.arithmetic import Value as Array
from xform.program.arrays import filled, zeros
from xform.program.ir import gather

# The adjoint of each value, by the value's `id`.
Adjoints = dict[int, Array]
# The contribution of each edge, by the edge's `id`.
Flows = dict[int, Array]


def push_adjoints(values: Sequence[GraphValue], operations: Sequence[GraphOperation],
           edges: Sequence[Edge], output: int
           ) -> tuple[Adjoints, Flows, list[AdjointUpdate]]:  # fmt: skip
    """Sum adjoints in the pushed order, operation by operation.

    Args:
      values: the values of the graph; the `id` of each is its position.
      operations: the operations of the graph, in execution order.
      edges: the edges of the graph.
      output: the `id` of the value that is differentiated. Its adjoint is an array of ones.

    Returns:
      The adjoints, the contributions and the updates. A value without a path of derivatives to the
      output has no adjoint, and an edge outside all such paths has no contribution.

    Cost: one pullback for each operation with an adjoint.
    """
    edges_into = _edges_by(edges, "target")
    adjoints: Adjoints = {output: filled(jax.typeof(values[output].array), 1)}
    flows: Flows = {}
    updates: list[AdjointUpdate] = []
    for op in reversed(operations):
        cts = _cotangents(op, values, adjoints)
        if op.pull is None or cts is None:
            continue
        active = [e for e in edges_into[op.id] if e.partial is not None]
        for edge, flow in zip(active, op.pull(cts), strict=True):
            so_far = adjoints.get(edge.source)
            adjoints[edge.source] = flow if so_far is None else so_far + flow
            flows[edge.id] = flow
            updates.append(AdjointUpdate(edge.id, adjoints[edge.source]))
    return adjoints, flows, updates


def pull_adjoints(values: Sequence[GraphValue], operations: Sequence[GraphOperation],
           edges: Sequence[Edge], output: int) -> tuple[Adjoints, list[AdjointUpdate]]:  # fmt: skip
    """Sum adjoints in the pulled order, value by value.

    If the local derivative of an edge is a single number, the contribution is that number times the
    adjoint of the operation's result. Otherwise the operation's pullback computes it. The arguments
    are those of `push_adjoints`.

    Returns:
      The adjoints and the updates. The contributions are those of `push_adjoints`.

    Cost: one product of numbers or one pullback for each edge. So the pullback of an operation with
    several array inputs runs several times.
    """
    edges_out_of, edges_into = _edges_by(edges, "source"), _edges_by(edges, "target")
    adjoints: Adjoints = {output: filled(jax.typeof(values[output].array), 1)}
    updates: list[AdjointUpdate] = []
    for value in reversed(values):
        for edge in sorted(edges_out_of[value.id], key=lambda e: (-e.target, e.operand)):
            op = operations[edge.target]
            cts = _cotangents(op, values, adjoints)
            if edge.partial is None or op.pull is None or cts is None:
                continue
            if edge.partial.value is not None:
                flow = jnp.asarray(edge.partial.value * cts[0], value.array.dtype)
            else:
                active = [e.id for e in edges_into[op.id] if e.partial is not None]
                flow = op.pull(cts)[active.index(edge.id)]
            so_far = adjoints.get(value.id)
            adjoints[value.id] = flow if so_far is None else so_far + flow
            updates.append(AdjointUpdate(edge.id, adjoints[value.id]))
    return adjoints, updates


def _edges_by(edges: Sequence[Edge], end: str) -> dict[int, list[Edge]]:
    """Group edges by one end: "source", the value, or "target", the operation."""
    grouped: dict[int, list[Edge]] = collections.defaultdict(list)
    for edge in edges:
        grouped[getattr(edge, end)].append(edge)
    return grouped


def _cotangents(
    op: GraphOperation, values: Sequence[GraphValue], adjoints: Adjoints
) -> list[Array] | None:
    """Return the adjoints of an operation's active outputs, which its pullback takes.

    An active output without an adjoint gets zeros. If no active output has an adjoint, return None:
    the operation does not contribute to the result.
    """
    outs = [values[i] for i in op.outputs]
    active = gather(outs, [v.activity == "active" for v in outs])
    if not any(v.id in adjoints for v in active):
        return None
    return [adjoints.get(v.id, zeros(jax.typeof(v.array))) for v in active]
