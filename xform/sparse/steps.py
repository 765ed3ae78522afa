"""Propagate sets of input elements through one equation.

The rule of a primitive states its dependence: the elements of the operands on which each element of
a result depends. `propagate` applies it to the operands' sets. There are four kinds of dependence
(`registry/dependence.py`), and one function here for each. If nothing is known, each element of a
result depends on all elements of all operands (`depends_on_all`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from xform._jax import JaxprEqn, jit
from xform.program.arithmetic import differentiable
from xform.program.dimensions import shape
from xform.registry.dependence import (
    AxisByAxis,
    AxisLink,
    DataMovement,
    Dependence,
    ElementPairs,
    Elementwise,
    Links,
)
from xform.sparse.known import OperandFacts
from xform.sparse.sets import (
    EMPTY,
    Sets,
    cumulative_union,
    elementwise_union,
    gather_along_axis,
    gather_elements,
    merge_tables,
    union_over_axes,
)

# The sets of several values; None for a value that depends on no input element.
MaybeSets = Sequence[Sets | None]


def propagate(
    eqn: JaxprEqn, dependence: Dependence, sets: MaybeSets, facts: OperandFacts
) -> list[Sets | None]:
    """Return the sets of an equation's results, given the sets of its operands.

    None stands for a value that depends on no input element.
    """
    if isinstance(dependence, Elementwise):
        return _elementwise(eqn, sets, facts.slopes)
    if isinstance(dependence, AxisByAxis):
        return _axis_by_axis(eqn, dependence, sets, facts.values)
    values = facts.values[slice(*dependence.reads)]
    if any(v is None for v in values):
        if dependence.otherwise is None:
            return depends_on_all(eqn, sets)
        return propagate(eqn, dependence.otherwise, sets, facts)
    if isinstance(dependence, ElementPairs):
        return _element_pairs(eqn, dependence, sets, values)
    return _data_movement(eqn, dependence, sets, facts.values)


def depends_on_all(eqn: JaxprEqn, sets: MaybeSets) -> list[Sets | None]:
    """Return the sets of the results if each element depends on all elements of all operands."""
    parts = [union_over_axes(x, range(x.ids.ndim)) for x in sets if x is not None]
    union = elementwise_union(parts)
    return [union.with_ids(np.broadcast_to(union.ids, shape(v))) if differentiable(v.aval) else None
            for v in eqn.outvars]  # fmt: skip


def _elementwise(
    eqn: JaxprEqn, sets: MaybeSets, slopes: Sequence[np.ndarray | None]
) -> list[Sets | None]:
    """Return the sets of an elementwise operation's result.

    Where the slope in an operand is zero, the result does not depend on that operand.
    """
    if len(eqn.outvars) > 1:  # each result depends on one operand
        return list(sets[: len(eqn.outvars)])
    out_shape = shape(eqn.outvars[0])
    parts: list[Sets] = []
    for x, slope in zip(sets, slopes, strict=True):
        if x is not None:
            ids = np.broadcast_to(x.ids, out_shape)
            parts.append(x.with_ids(ids if slope is None else np.where(slope, ids, EMPTY)))
    return [elementwise_union(parts)]


def _element_pairs(
    eqn: JaxprEqn, dependence: ElementPairs, sets: MaybeSets, values: Sequence[Any]
) -> list[Sets | None]:
    """Return the sets for a dependence that lists the operands' elements for each element."""
    out_shape = shape(eqn.outvars[0])
    pairs = zip(dependence.pairs(eqn, values), sets, strict=True)
    parts = [gather_elements(x, rows, out_shape)
             for rows, x in pairs if rows is not None and x is not None]  # fmt: skip
    return [elementwise_union(parts) if parts else None]


def _data_movement(
    eqn: JaxprEqn, dependence: DataMovement, sets: MaybeSets, values: Sequence[Any]
) -> list[Sets | None]:
    """Move the numbers of the sets as the operation moves data.

    An operand that depends on no input element gets zeros, the number of the empty set. Operands
    that decide the movement, such as indices, keep their values.
    """
    ids, table = merge_tables([x for x in sets if x is not None])
    remaining_ids = iter(ids)
    with_values = range(len(sets))[slice(*dependence.reads)]
    operands = [
        values[i] if i in with_values
        else np.zeros(shape(v), int) if x is None
        else next(remaining_ids)
        for i, (v, x) in enumerate(zip(eqn.invars, sets, strict=True))
    ]  # fmt: skip
    if dependence.move is not None:
        out = dependence.move(eqn.params, *operands)
    else:
        numbers = [np.asarray(x, np.int32) for x in operands]
        prim, params = eqn.primitive, eqn.primitive.get_bind_params(eqn.params)
        # Compiled ahead of time, because the caller may be inside another trace.
        out = jit(lambda *xs: prim.bind(*xs, **params)).lower(*numbers).compile()(*numbers)
    results = list(map(np.asarray, out if eqn.primitive.multiple_results else [out]))
    return [Sets(y.astype(int), table) for y in results]


def _axis_by_axis(
    eqn: JaxprEqn, dependence: AxisByAxis, sets: MaybeSets, values: Sequence[Any]
) -> list[Sets | None]:
    """Return the sets of an operation whose dependence is stated for each axis of the result.

    `Links` are one statement about all axes. If an operand has several, the sets are their union.
    """
    parts: list[list[Sets]] = [[] for _ in eqn.outvars]
    for x, alternatives in zip(sets, dependence.links(eqn, values), strict=True):
        for links in alternatives if x is not None else ():
            assert x is not None
            for result_parts, v in zip(parts, eqn.outvars, strict=True):
                result_parts.append(_follow_links(x, links, shape(v)))
    return [elementwise_union(one) if one else None for one in parts]


def _follow_links(x: Sets, links: Links, out_shape: Sequence[int]) -> Sets:
    """Return the sets of a result that depends on the operand `x` as `links` state."""
    followed = [link for link in links if link is not None]
    axes = [link.axis for link in followed]
    x = union_over_axes(x, [i for i in range(x.ids.ndim) if i not in axes])
    order = np.argsort(np.argsort(axes))  # the position of each axis among the remaining axes
    for link, axis in zip(followed, order, strict=True):
        x = _follow_link(x, link, int(axis))
    x = x.with_ids(x.ids.transpose(order))
    linked = [i for i, link in enumerate(links) if link is not None]
    ids = x.ids[tuple(slice(out_shape[i]) for i in linked)]
    with_all_axes = [out_shape[i] if i in linked else 1 for i in range(len(out_shape))]
    return x.with_ids(np.broadcast_to(ids.reshape(with_all_axes), out_shape))


def _follow_link(x: Sets, link: AxisLink, axis: int) -> Sets:
    """Return the sets after the dependence along one axis is applied."""
    if link.cumulative:
        return cumulative_union(x, axis, link.cumulative)
    return x if link.rows is None else gather_along_axis(x, axis, link.rows)
