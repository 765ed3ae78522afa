"""The dependence of slices, gathers and scatters: which elements they read and write.

The dependence of a primitive says on which elements of the operands each element of the result
depends (`xform.registry.dependence`). It gives the sparsity pattern of a Jacobian. The functions
here return the dependence in three forms. `Links` state it axis by axis. Pairs state it element by
element. A movement is a NumPy function that moves elements as the primitive does; applied to the
numbers of the elements, it shows where each one comes from. `values` has the value of each operand
that is known, else None. If the indices are known, the dependence is exact. Otherwise it covers all
possible indices.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import lax

from xform._jax import JaxprEqn
from xform.program.dimensions import shape
from xform.registry.dependence import (
    AxisByAxis,
    AxisLink,
    DataMovement,
    ElementPairs,
    Links,
    Rows,
    Values,
    index_rows,
)
from xform.registry.ends import Ends, EndsRule, remaining_axes, same_lengths_stay
from xform.registry.traits import MOVEMENT, Count, Traits

# Slices.


def _starts(values: Values, operand: tuple[int, ...], part: tuple[int, ...]) -> list[int | None]:
    """Return the start of a part on each axis, clamped as JAX does; None if it is not known.

    `values` are the start indices. `operand` and `part` are shapes.
    """
    triples = zip(values, operand, part, strict=True)
    return [0 if n == m else None if v is None else int(np.clip(v, 0, n - m))
            for v, n, m in triples]  # fmt: skip


# If an axis has more pairs of dependent indices than this, no list of pairs is made. Then each
# index of the result counts as dependent on all indices of the operand along that axis.
_MANY = 2**22


def _slice_link(axis: int, n: int, m: int, start: int | None) -> AxisLink | None:
    """Link an axis of a part with `m` elements to the axis of the operand with `n` elements."""
    if start is None and m * (n - m + 1) > _MANY:
        return None
    starts = np.arange(n - m + 1) if start is None else np.array([start])
    return AxisLink(axis, index_rows(np.arange(m)[:, None] + starts))


def _slice_dependence(eqn: JaxprEqn, values: Values) -> list[list[Links]]:
    """Link each element of a dynamic slice to the elements that it may be a copy of."""
    whole, part = shape(eqn.invars[0]), shape(eqn.outvars[0])
    starts = _starts(values[1:], whole, part)
    axes = zip(range(len(whole)), whole, part, starts, strict=True)
    return [[tuple(_slice_link(*axis) for axis in axes)], *[[] for _ in starts]]


def _update_dependence(eqn: JaxprEqn, values: Values) -> list[list[Links]]:
    """Link each element to the elements of the update that may replace it, and to its old value."""
    whole, part = shape(eqn.invars[0]), shape(eqn.invars[1])
    links: list[AxisLink | None] = []
    starts = _starts(values[2:], whole, part)
    for i, (n, m, start) in enumerate(zip(whole, part, starts, strict=True)):
        if start is None and n * (n - m + 1) > _MANY:
            links.append(None)
            continue
        indices = np.arange(n)[:, None] - (np.arange(n - m + 1) if start is None else start)
        links.append(AxisLink(i, index_rows(np.where(indices < m, indices, -1))))
    return [[tuple(map(AxisLink, range(len(whole))))], [tuple(links)], *[[] for _ in starts]]


def _update_ends(eqn: JaxprEqn) -> list[Ends]:
    """An axis stays unless the update is shorter: then only some indices are updated."""
    x, update = map(shape, eqn.invars[:2])
    axes = tuple(i if n == m else None for i, (n, m) in enumerate(zip(x, update, strict=True)))
    return [axes, axes, *[()] * (len(eqn.invars) - 2)]


def _move_update(params: dict[str, Any], x: np.ndarray, update: np.ndarray, *starts: np.ndarray):
    """Do in NumPy what `dynamic_update_slice` does."""
    out = x.copy()
    pairs = zip(_starts(starts, x.shape, update.shape), update.shape, strict=True)
    out[tuple(slice(s or 0, (s or 0) + m) for s, m in pairs)] = update
    return out


_FROM_2 = (2, None)  # the operands from number 2 on
DYNAMIC_SLICE = dataclasses.replace(
    MOVEMENT,
    part_shape="slice_sizes",
    ends=same_lengths_stay,
    dependence=AxisByAxis(_slice_dependence, (1, None)),
)
DYNAMIC_UPDATE = dataclasses.replace(
    MOVEMENT,
    ends=_update_ends,
    dependence=DataMovement(_move_update, _FROM_2, AxisByAxis(_update_dependence, _FROM_2)),
)

# Gather and scatter.


@dataclasses.dataclass(frozen=True)
class Windows:
    """The axes of a gather or scatter.

    A gather reads windows of an array, its operand. The result holds all windows: it has axes
    inside a window, and axes that number the windows. A scatter writes such windows to its operand:
    its updates hold all windows. Here *the array* is the operand. *The windows* is the array that
    holds all windows: the result of a gather, or the updates of a scatter.

    Attributes:
      axes: the axes of the windows along which the elements of one window lie. The other axes of
        the windows number the windows.
      narrow: axes of the array along which a window has length one. The windows have no such axes.
      named: axes of the array along which the indices say where a window begins.
      batch: batch axes of the array, and the corresponding axes of the indices.
    """

    axes: Sequence[int]
    narrow: Sequence[int]
    named: Sequence[int]
    batch: tuple[Sequence[int], Sequence[int]]

    def links(self, array_ndim: int, windows_ndim: int) -> dict[int, int]:
        """Map axes of the array to axes of the windows, where both have the same indices.

        These are the axes along which every window begins at 0, and the batch axes.
        """
        inside = [i for i in range(array_ndim) if i not in {*self.narrow, *self.batch[0]}]
        links = dict(zip(inside, self.axes, strict=True))
        numbers = remaining_axes(windows_ndim, self.axes)
        links |= {i: numbers[j] for i, j in zip(*self.batch, strict=True)}
        return {i: j for i, j in links.items() if i not in self.named}

    def whole(self, array: Sequence[int], windows: Sequence[int]) -> dict[int, int]:
        """Return the same for the axes that every window covers in full, and the batch axes.

        `array` and `windows` are shapes.
        """
        links = self.links(len(array), len(windows))
        return {i: j for i, j in links.items() if array[i] == windows[j]}

    def elements(self, indices: np.ndarray, array_shape: Sequence[int],
                 windows_shape: Sequence[int], mode: Any) -> np.ndarray:  # fmt: skip
        """Return, for each element of the windows, its number in the array; -1 if out of bounds.

        The elements of the array are numbered in row-major order. The result has the shape of the
        windows.
        """
        *batch, _ = indices.shape
        ndim = len(array_shape)
        inside = [i for i in range(ndim) if i not in {*self.narrow, *self.batch[0]}]
        sizes = np.ones(ndim, int)
        sizes[inside] = [windows_shape[i] for i in self.axes]
        start = np.zeros((*batch, ndim), int)
        start[..., list(self.named)] = indices
        for i, j in zip(*self.batch, strict=True):
            start[..., i] = np.expand_dims(np.arange(batch[j]), [k for k in range(len(batch))
                                                                 if k != j])  # fmt: skip
        last_start = np.array(array_shape, int) - sizes
        in_bounds = np.all((start >= 0) & (start <= last_start), axis=-1)
        strides = np.array([math.prod(array_shape[i + 1 :]) for i in range(ndim)], int)
        if mode != lax.GatherScatterMode.FILL_OR_DROP:
            start = np.clip(start, 0, np.maximum(last_start, 0))
            in_bounds = np.ones_like(in_bounds)
        numbers = np.where(in_bounds, start @ strides, -1)
        numbers = numbers.reshape((*batch, *(1,) * len(inside)))
        for k, i in enumerate(inside):
            offset = np.arange(sizes[i]) * strides[i]
            offset = offset.reshape([-1 if j == k else 1 for j in range(len(inside))])
            numbers = np.where(numbers < 0, -1, numbers + offset)
        outside = [i for i in range(len(windows_shape)) if i not in self.axes]
        return numbers.transpose(np.argsort([*outside, *self.axes])).reshape(windows_shape)


def _gather_windows(eqn: JaxprEqn) -> Windows:
    d = eqn.params["dimension_numbers"]
    batch = d.operand_batching_dims, d.start_indices_batching_dims
    return Windows(d.offset_dims, d.collapsed_slice_dims, d.start_index_map, batch)


def _gather_dependence(eqn: JaxprEqn, values: Values) -> list[list[Links]]:
    """Link the axes of the result that have the same indices as an axis of the operand."""
    ndim, out_ndim = len(shape(eqn.invars[0])), len(shape(eqn.outvars[0]))
    source = {j: i for i, j in _gather_windows(eqn).links(ndim, out_ndim).items()}
    return [[tuple(AxisLink(source[j]) if j in source else None for j in range(out_ndim))], []]


def _gather_ends(eqn: JaxprEqn) -> list[Ends]:
    """Axes that every window covers in full stay, and batch axes and axes of the indices."""
    x, indices, y = map(shape, (*eqn.invars, *eqn.outvars))
    end = _gather_windows(eqn).whole(x, y)
    numbers = remaining_axes(len(y), _gather_windows(eqn).axes)
    return [tuple(end.get(i) for i in range(len(x))), (*numbers[: len(indices) - 1], None)]


def _gather_pairs(eqn: JaxprEqn, values: Sequence[Any]) -> list[Rows | None]:
    """Pair each element of the result with the element that it reads, for known indices."""
    elements = _gather_windows(eqn).elements(
        values[0], shape(eqn.invars[0]), shape(eqn.outvars[0]), eqn.params["mode"]
    )
    return [index_rows(elements.reshape(-1, 1)), None]


_INDICES = (1, 2)
GATHER = dataclasses.replace(
    MOVEMENT,
    part_shape="slice_sizes",
    ends=_gather_ends,
    dependence=ElementPairs(_gather_pairs, _INDICES, AxisByAxis(_gather_dependence)),
)


def _scatter_windows(eqn: JaxprEqn) -> Windows:
    d = eqn.params["dimension_numbers"]
    batch = d.operand_batching_dims, d.scatter_indices_batching_dims
    named = d.scatter_dims_to_operand_dims
    return Windows(d.update_window_dims, d.inserted_window_dims, named, batch)


def _scatter_dependence(eqn: JaxprEqn, values: Values) -> list[list[Links]]:
    """Link each element to its old value, and to updates along axes with the same indices."""
    x, _, updates = map(shape, eqn.invars)
    source = _scatter_windows(eqn).whole(x, updates)
    links = [AxisLink(source[i]) if i in source else None for i in range(len(x))]
    return [[tuple(map(AxisLink, range(len(x))))], [], [tuple(links)]]


def _scatter_ends(adds: bool) -> EndsRule:
    """Return how axes end in a scatter, the reverse of a gather.

    If it `adds`, the axes of the updates that do not stay are summed.
    """

    def ends(eqn: JaxprEqn) -> list[Ends]:
        x, indices, updates = map(shape, eqn.invars)
        source = _scatter_windows(eqn).whole(x, updates)
        numbers = remaining_axes(len(updates), _scatter_windows(eqn).axes)
        end: dict[int, int] = {j: i for i, j in source.items()}
        summed = {j: len(x) + k for k, j in enumerate(numbers) if adds and j not in end}
        of_updates = tuple((end | summed).get(j) for j in range(len(updates)))
        of_indices = (*(of_updates[j] for j in numbers[: len(indices) - 1]), None)
        return [tuple(i if i in source else None for i in range(len(x))), of_indices, of_updates]

    return ends


def _scatter_pairs(replaces: bool) -> Callable[[JaxprEqn, Sequence[Any]], list[Rows | None]]:
    """Return a function that pairs elements with old values and updates, for known indices.

    `replaces`: whether an update replaces the old value. If several updates go to one element, any
    of them may remain, so the element depends on all of them.
    """

    def pairs(eqn: JaxprEqn, values: Sequence[Any]) -> list[Rows | None]:
        x, _, updates = map(shape, eqn.invars)
        targets = _scatter_windows(eqn).elements(values[0], x, updates, eqn.params["mode"])
        targets = targets.reshape(-1)
        order = np.argsort(targets, kind="stable")
        begins = np.searchsorted(targets[order], np.arange(math.prod(x) + 1))
        old = np.arange(math.prod(x))
        old = np.where(np.diff(begins) > 0, -1, old) if replaces else old
        return [
            index_rows(old.reshape(-1, 1)),
            None,
            (begins - begins[0], order[begins[0] :]),
        ]

    return pairs


def scatter_traits(flops: Count, replaces: bool = False, adds: bool = False) -> Traits:
    """Return the traits of a scatter.

    `replaces`: whether an update replaces the old value. `adds`: whether updates are added.
    """
    dependence = ElementPairs(_scatter_pairs(replaces), _INDICES, AxisByAxis(_scatter_dependence))
    return Traits(flops=flops, dependence=dependence, ends=_scatter_ends(adds), adds=adds)
