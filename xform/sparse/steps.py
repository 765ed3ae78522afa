"""Propagate sets of input elements through one equation, by the dependence in its rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from xform._jax import JaxprEqn
from xform.interpret.cost import shape
from xform.program.arithmetic import differentiable
from xform.registry.dependence import (
    AxisByAxis,
    AxisLink,
    DataMovement,
    Dependence,
    ElementPairs,
    Elementwise,
    Links,
)
from xform.sparse import sets as S
from xform.sparse.known import Facts
from xform.sparse.sets import Sets

MaybeSets = Sequence[Sets | None]


def step(eqn: JaxprEqn, dependence: Dependence, sets: MaybeSets, facts: Facts) -> list[Sets | None]:
    """The sets of the results, given those of the operands; None: depends on no input element."""
    if isinstance(dependence, Elementwise):
        return _each(eqn, sets, facts.slopes)
    if isinstance(dependence, AxisByAxis):
        return _linked(eqn, dependence, sets, facts.values)
    values = facts.values[slice(*dependence.reads)]
    if any(v is None for v in values):
        otherwise = dependence.otherwise
        return dense(eqn, sets) if otherwise is None else step(eqn, otherwise, sets, facts)
    if isinstance(dependence, ElementPairs):
        out = shape(eqn.outvars[0])
        pairs = zip(dependence.pairs(eqn, values), sets, strict=True)
        seen = [S.paired(x, rows, out) for rows, x in pairs if rows is not None and x is not None]
        return [S.either(seen) if seen else None]
    return _moved(eqn, dependence, sets, facts.values)


def dense(eqn: JaxprEqn, sets: MaybeSets) -> list[Sets | None]:
    """The sets if nothing is known of the equation: each result depends on all operands."""
    parts = [S.over(x, range(x.ids.ndim)) for x in sets if x is not None]
    whole = S.either(parts)
    return [whole.at(np.broadcast_to(whole.ids, shape(v))) if differentiable(v.aval) else None
            for v in eqn.outvars]  # fmt: skip


def _each(eqn: JaxprEqn, sets: MaybeSets, slopes: Sequence[np.ndarray | None]) -> list[Sets | None]:
    if len(eqn.outvars) > 1:
        return list(sets[: len(eqn.outvars)])
    out = shape(eqn.outvars[0])
    parts: list[Sets] = []
    for x, slope in zip(sets, slopes, strict=True):
        if x is not None:
            ids = np.broadcast_to(x.ids, out)
            parts.append(x.at(ids if slope is None else np.where(slope, ids, S.EMPTY)))
    return [S.either(parts)]


def _moved(
    eqn: JaxprEqn, dependence: DataMovement, sets: MaybeSets, values: Sequence[Any]
) -> list[Sets | None]:
    """Apply the movement to the numbers of the sets; 0, the empty set, for other operands."""
    ids, table = S.together([x for x in sets if x is not None])
    numbers = iter(ids)
    where = range(len(sets))[slice(*dependence.reads)]
    operands = [
        values[i] if i in where
        else np.zeros(shape(v), int) if x is None
        else next(numbers)
        for i, (v, x) in enumerate(zip(eqn.invars, sets, strict=True))
    ]  # fmt: skip
    if dependence.move is not None:
        out = dependence.move(eqn.params, *operands)
    else:
        numbered = [np.asarray(x, np.int32) for x in operands]
        prim, params = eqn.primitive, eqn.primitive.get_bind_params(eqn.params)
        # Compiled ahead of time, because the caller may be inside another trace.
        out = jax.jit(lambda *xs: prim.bind(*xs, **params)).lower(*numbered).compile()(*numbered)
    results = list(map(np.asarray, out if eqn.primitive.multiple_results else [out]))
    return [Sets(y.astype(int), table) for y in results]


def _linked(
    eqn: JaxprEqn, dependence: AxisByAxis, sets: MaybeSets, values: Sequence[Any]
) -> list[Sets | None]:
    seen: list[list[Sets]] = [[] for _ in eqn.outvars]
    for x, ways in zip(sets, dependence.links(eqn, values), strict=True):
        for links in ways if x is not None else ():
            assert x is not None
            for found, v in zip(seen, eqn.outvars, strict=True):
                found.append(_follow(x, links, shape(v)))
    return [S.either(found) if found else None for found in seen]


def _follow(x: Sets, links: Links, out: Sequence[int]) -> Sets:
    followed = [link for link in links if link is not None]
    axes = [link.axis for link in followed]
    x = S.over(x, [i for i in range(x.ids.ndim) if i not in axes])
    order = np.argsort(np.argsort(axes))  # the index of each among the remaining axes
    for link, axis in zip(followed, order, strict=True):
        x = _axis(x, link, int(axis))
    x = x.at(x.ids.transpose(order))
    places = [i for i, link in enumerate(links) if link is not None]
    ids = x.ids[tuple(slice(out[i]) for i in places)]
    wide = ids.reshape([out[i] if i in places else 1 for i in range(len(out))])
    return x.at(np.broadcast_to(wide, out))


def _axis(x: Sets, link: AxisLink, axis: int) -> Sets:
    if link.cumulative:
        return S.accumulated(x, axis, link.cumulative)
    return x if link.rows is None else S.along(x, axis, link.rows)
