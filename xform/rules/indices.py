"""The elements that slices, gathers and scatters read and write."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import lax

from xform._jax import JaxprEqn
from xform.interpret.cost import shape
from xform.registry.dependence import (
    AxisByAxis,
    AxisLink,
    DataMovement,
    ElementPairs,
    Links,
    Rows,
    Values,
    index_rows,
    reduction_links,
)
from xform.registry.traits import MOVEMENT, Count, Traits

# Slices.


def _starts(values: Values, operand: tuple[int, ...], part: tuple[int, ...]) -> list[int | None]:
    """Return the clamped start of a part on each axis; 0 if it fits once only, None if unknown."""
    pairs = zip(values, operand, part, strict=True)
    return [0 if n == m else None if v is None else int(np.clip(v, 0, n - m))
            for v, n, m in pairs]  # fmt: skip


# Above this number of pairs of places no list is made; then all places of an axis count as read.
_MANY = 2**22


def _part(i: int, n: int, m: int, start: int | None) -> AxisLink | None:
    """Return the links of an axis of a part of `m` of `n` elements; `start` None is unknown."""
    if start is None and m * (n - m + 1) > _MANY:
        return None
    starts = np.arange(n - m + 1) if start is None else np.array([start])
    return AxisLink(i, index_rows(np.arange(m)[:, None] + starts))


def _slice_dependence(eqn: JaxprEqn, values: Values) -> list[list[Links]]:
    whole, part = shape(eqn.invars[0]), shape(eqn.outvars[0])
    starts = _starts(values[1:], whole, part)
    axes = zip(range(len(whole)), whole, part, starts, strict=True)
    return [[tuple(_part(*axis) for axis in axes)], *[[] for _ in starts]]


def _update_dependence(eqn: JaxprEqn, values: Values) -> list[list[Links]]:
    """Link an output to the update, where it may be, and to the operand, which may remain."""
    whole, part = shape(eqn.invars[0]), shape(eqn.invars[1])
    links: list[AxisLink | None] = []
    starts = _starts(values[2:], whole, part)
    for i, (n, m, s) in enumerate(zip(whole, part, starts, strict=True)):
        if s is None and n * (n - m + 1) > _MANY:
            links.append(None)
            continue
        at = np.arange(n)[:, None] - (np.arange(n - m + 1) if s is None else s)
        links.append(AxisLink(i, index_rows(np.where(at < m, at, -1))))
    return [[tuple(map(AxisLink, range(len(whole))))], [tuple(links)], *[[] for _ in starts]]


def _move_update(params: dict[str, Any], x: np.ndarray, update: np.ndarray, *starts: np.ndarray):
    out = x.copy()
    at = _starts(starts, x.shape, update.shape)
    out[tuple(slice(s or 0, (s or 0) + m) for s, m in zip(at, update.shape, strict=True))] = update
    return out


_REST = (2, None)
DYNAMIC_SLICE = dataclasses.replace(MOVEMENT, dependence=AxisByAxis(_slice_dependence, (1, None)))
DYNAMIC_UPDATE = dataclasses.replace(
    MOVEMENT, dependence=DataMovement(_move_update, _REST, AxisByAxis(_update_dependence, _REST))
)

# Gather and scatter.


@dataclasses.dataclass(frozen=True)
class Windows:
    """Where the windows of a gather begin in an array; for a scatter, with the roles swapped.

    Attributes:
      axes: the axes within a window, in the windows' own array (the result, or the updates).
      narrow: axes of the array that have length one in a window, and that the window leaves out.
      named: axes of the array that the indices name.
      batch: batch axes of the array, and the corresponding axes of the indices.
    """

    axes: Sequence[int]
    narrow: Sequence[int]
    named: Sequence[int]
    batch: tuple[Sequence[int], Sequence[int]]

    def links(self, ndim: int, own: int) -> dict[int, int]:
        """Map axes of the array along which no index moves a window to the windows' own axes.

        Along these axes every window begins at 0, or at its own place in the batch. The windows'
        own array has `own` axes.
        """
        inside = [i for i in range(ndim) if i not in {*self.narrow, *self.batch[0]}]
        links = dict(zip(inside, self.axes, strict=True))
        outside = [i for i in range(own) if i not in self.axes]
        links |= {i: outside[j] for i, j in zip(*self.batch, strict=True)}
        return {i: j for i, j in links.items() if i not in self.named}

    def places(self, indices: np.ndarray, array: Sequence[int], own: Sequence[int],
               mode: Any) -> np.ndarray:  # fmt: skip
        """Return the place in the array of each element of the windows; -1 if out of bounds."""
        *batch, _ = indices.shape
        inside = [i for i in range(len(array)) if i not in {*self.narrow, *self.batch[0]}]
        sizes = np.ones(len(array), int)
        sizes[inside] = [own[i] for i in self.axes]
        start = np.zeros((*batch, len(array)), int)
        start[..., list(self.named)] = indices
        for i, j in zip(*self.batch, strict=True):
            start[..., i] = np.expand_dims(np.arange(batch[j]), [k for k in range(len(batch))
                                                                 if k != j])  # fmt: skip
        most = np.array(array, int) - sizes
        there = np.all((start >= 0) & (start <= most), axis=-1)
        steps = np.array([math.prod(array[i + 1 :]) for i in range(len(array))], int)
        if mode != lax.GatherScatterMode.FILL_OR_DROP:
            start, there = np.clip(start, 0, np.maximum(most, 0)), np.ones_like(there)
        first = start @ steps
        at = np.where(there, first, -1).reshape((*batch, *(1,) * len(inside)))
        for k, i in enumerate(inside):
            step = np.arange(sizes[i]) * steps[i]
            step = step.reshape([-1 if j == k else 1 for j in range(len(inside))])
            at = np.where(at < 0, -1, at + step)
        outside = [i for i in range(len(own)) if i not in self.axes]
        return at.transpose(np.argsort([*outside, *self.axes])).reshape(own)


def _gather_windows(eqn: JaxprEqn) -> Windows:
    d = eqn.params["dimension_numbers"]
    batch = d.operand_batching_dims, d.start_indices_batching_dims
    return Windows(d.offset_dims, d.collapsed_slice_dims, d.start_index_map, batch)


def _gather_dependence(eqn: JaxprEqn, values: Values) -> list[list[Links]]:
    ndim, own = len(shape(eqn.invars[0])), len(shape(eqn.outvars[0]))
    follows = {j: i for i, j in _gather_windows(eqn).links(ndim, own).items()}
    return [[tuple(AxisLink(follows[j]) if j in follows else None for j in range(own))], []]


def _gather_pairs(eqn: JaxprEqn, values: Sequence[Any]) -> list[Rows | None]:
    at = _gather_windows(eqn).places(
        values[0], shape(eqn.invars[0]), shape(eqn.outvars[0]), eqn.params["mode"]
    )
    return [index_rows(at.reshape(-1, 1)), None]


_INDICES = (1, 2)
GATHER = dataclasses.replace(
    MOVEMENT, dependence=ElementPairs(_gather_pairs, _INDICES, AxisByAxis(_gather_dependence))
)


def _scatter_windows(eqn: JaxprEqn) -> Windows:
    d = eqn.params["dimension_numbers"]
    batch = d.operand_batching_dims, d.scatter_indices_batching_dims
    named = d.scatter_dims_to_operand_dims
    return Windows(d.update_window_dims, d.inserted_window_dims, named, batch)


def _scatter_dependence(eqn: JaxprEqn, values: Values) -> list[list[Links]]:
    x, _, updates = map(shape, eqn.invars)
    follows = _scatter_windows(eqn).links(len(x), len(updates))
    links = [AxisLink(follows[i]) if i in follows and updates[follows[i]] == n else None
             for i, n in enumerate(x)]  # fmt: skip
    return [[reduction_links(len(x), ())], [], [tuple(links)]]


def _scatter_pairs(replaces: bool) -> Callable[[JaxprEqn, Sequence[Any]], list[Rows | None]]:
    """Link each place to the updates that go there; if updates replace, any of them may remain."""

    def pairs(eqn: JaxprEqn, values: Sequence[Any]) -> list[Rows | None]:
        x, _, updates = map(shape, eqn.invars)
        at = _scatter_windows(eqn).places(values[0], x, updates, eqn.params["mode"]).reshape(-1)
        order = np.argsort(at, kind="stable")
        begins = np.searchsorted(at[order], np.arange(math.prod(x) + 1))
        old = np.arange(math.prod(x))
        old = np.where(np.diff(begins) > 0, -1, old) if replaces else old
        return [
            index_rows(old.reshape(-1, 1)),
            None,
            (begins - begins[0], order[begins[0] :]),
        ]

    return pairs


def scatter_traits(flops: Count, replaces: bool = False) -> Traits:
    dependence = ElementPairs(_scatter_pairs(replaces), _INDICES, AxisByAxis(_scatter_dependence))
    return Traits(flops=flops, dependence=dependence)
