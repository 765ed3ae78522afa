"""Positions of a sparse array's elements in the dense array, for the rules of sparse arrays.

A sparse array has data, and index arrays in one of several formats: COO, CSR, BCOO and BCSR. All
formats are converted to *positions*: `positions[..., k, :]` has the indices of element k in the
dense array, along its first axes, batch axes included. If the positions stop before the last axes
of the dense array, an element is a whole row along these axes. A negative index counts from the end
of its axis, as in JAX's operations. A position outside the array is padding: reading gives zero,
and nothing is written.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jax import lax

from xform.program.arithmetic import Value


def take(dense: Value, positions: Value) -> Value:
    """Return the elements of a dense array at positions; zero outside the array."""
    n, k = positions.shape[-1], positions.ndim - 1
    if 0 in dense.shape[:n]:  # no position is inside; JAX's gather refuses such an array
        return lax.full_like(dense, 0, shape=(*positions.shape[:-1], *dense.shape[n:]))
    window = tuple(range(k, k + dense.ndim - n))
    axes = tuple(range(n))
    numbers = lax.GatherDimensionNumbers(window, axes, axes)
    sizes = (*(1,) * n, *dense.shape[n:])
    return lax.gather(dense, positions, numbers, sizes, mode="fill", fill_value=0)


def put(values: Value, positions: Value, shape: Sequence[int]) -> Value:
    """Return zeros of a shape, with `values` added at positions."""
    n, k = positions.shape[-1], positions.ndim - 1
    window = tuple(range(k, k + len(shape) - n))
    axes = tuple(range(n))
    numbers = lax.ScatterDimensionNumbers(window, axes, axes)
    dense = lax.full(shape, 0, values.dtype)
    full = (*positions.shape[:-1], *shape[n:])
    values = lax.broadcast_in_dim(values, full, tuple(range(values.ndim)))
    return lax.scatter_add(dense, positions, values, numbers, mode="drop")


def with_batch_axes(indices: Value, shape: Sequence[int]) -> Value:
    """Prepend batch positions to `indices`, which index the axes of `shape` after the batch axes.

    The leading axes of `indices`, except the last two, are the batch axes. The last axis has an
    index for each other axis of `shape`. Negative indices become positive.
    """
    n_batch = indices.ndim - 2
    full = (*shape[:n_batch], *indices.shape[n_batch:])
    from_end = lax.lt(indices, lax.full_like(indices, 0))
    indices = lax.select(from_end, lax.add(indices, axis_lengths(indices, shape)), indices)
    indices = lax.broadcast_in_dim(indices, full, tuple(range(n_batch + 2)))
    batch = [lax.broadcasted_iota(indices.dtype, (*full[:-1], 1), i) for i in range(n_batch)]
    return lax.concatenate([*batch, indices], n_batch + 1)


def axis_lengths(indices: Value, shape: Sequence[int]) -> Value:
    """Return an array like `indices`, with the length of the axis in place of each index."""
    n_batch = indices.ndim - 2
    lengths = np.asarray(shape[n_batch : n_batch + indices.shape[-1]], indices.dtype)
    return lax.broadcast_in_dim(lengths, indices.shape, (n_batch + 1,))


def from_rows_and_columns(row: Value, column: Value) -> Value:
    """Return positions in a matrix, from an array of row indices and one of column indices."""
    return lax.concatenate([lax.expand_dims(i, (i.ndim,)) for i in (row, column)], row.ndim)


def from_compressed_rows(indices: Value, indptr: Value) -> Value:
    """Return positions in a matrix, from column indices and `indptr`, where each row begins."""
    return from_rows_and_columns(_rows(indices, indptr), indices)


def _rows(indices: Value, indptr: Value) -> Value:
    """Return the row of each element: the number of rows that end at or before it."""
    *batch, n = indices.shape
    # Mark the end of each row, in slot n for rows that end after the last element. Count the marks.
    ends = lax.slice_in_dim(indptr, 1, indptr.shape[-1], axis=-1)
    positions = with_batch_axes(lax.expand_dims(ends, (ends.ndim,)), (*batch, n + 1))
    counts = put(lax.full(ends.shape, 1, indices.dtype), positions, (*batch, n + 1))
    return lax.slice_in_dim(lax.cumsum(counts, len(batch)), 0, n, axis=-1)


def select_axes(positions: Value, axes: Sequence[int]) -> Value:
    """Return the positions along some of the axes only, in the given order."""
    selected = [lax.slice_in_dim(positions, i, i + 1, axis=-1) for i in axes]
    empty = lax.slice_in_dim(positions, 0, 0, axis=-1)
    return lax.concatenate([empty, *selected], positions.ndim - 1)


def positions_in_rows(positions: Value, shape: Sequence[int]) -> Value:
    """Return the positions of all elements of rows, from positions of the rows.

    The rows lie along the last axes of an array of the given shape. These axes become new axes of
    the result.
    """
    k, n = positions.ndim - 1, positions.shape[-1]
    full = (*positions.shape[:-1], *shape[n:])
    positions = lax.broadcast_in_dim(positions, (*full, n), (*range(k), len(full)))
    in_row = [lax.broadcasted_iota(positions.dtype, (*full, 1), i) for i in range(k, len(full))]
    return lax.concatenate([positions, *in_row], len(full))
