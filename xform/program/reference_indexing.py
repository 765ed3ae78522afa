"""Read and write a part of a mutable reference's value, as `ref[i, 2:5]` or `ref.at[...]` does.

`read_at`, `write_at` and `add_at` work on the value, an array. The part is given by a list of JAX's
transforms, which are applied one after the other. A transform is a reshape, a transpose, a bitcast,
or an *indexer*, which has one index for each axis. The index is a slice (`start`, `size`, `stride`;
the start may be traced), or an integer or integer array, as in NumPy's advanced indexing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from xform.errors import NotDifferentiable
from xform.program.arithmetic import Value


def read_at(x: Value, transforms: Sequence[Any]) -> Value:
    """Return the part of `x` that is given by `transforms`."""
    for t in transforms:
        x = _KINDS[_kind(t)][0](x, t)
    return x


def write_at(x: Value, transforms: Sequence[Any], value: Value) -> Value:
    """Return `x` with the part that is given by `transforms` replaced by `value`."""
    if not transforms:
        return value
    first, *rest = transforms
    return _KINDS[_kind(first)][1](x, first, write_at(read_at(x, [first]), rest, value))


def add_at(x: Value, transforms: Sequence[Any], value: Value) -> Value:
    """Return `x` with `value` added to the part that is given by `transforms`.

    If an index occurs several times, each occurrence is added.
    """
    if not transforms:
        return lax.add(x, value)
    *outer, last = transforms
    inner = read_at(x, outer)
    if _kind(last) == "NDIndexer":
        return write_at(x, outer, _update(inner, last, value, add=True))
    return write_at(x, transforms, lax.add(read_at(inner, [last]), value))


def _kind(transform: Any) -> str:
    """Return the class name of a transform, a key of `_KINDS`."""
    name = type(transform).__name__
    if name not in _KINDS:
        raise NotDifferentiable(
            "derivative of a program with mutable references",
            f"xform does not support the view {name} of a reference",
            "",
            "read the full reference, and apply the operation to its value",
        )
    return name


def _read(x: Value, indexer: Any) -> Value:
    """Return the elements of `x` that an indexer selects."""
    if _is_full(indexer):
        return x
    if all(map(_is_slice, indexer.indices)) and not _has_unknown_start(indexer):
        starts, sizes = _box(indexer)
        ends = [s + n for s, n in zip(starts, sizes, strict=True)]
        return lax.slice(x, starts, ends, [i.stride for i in indexer.indices])
    if _is_box(indexer):
        starts, sizes = _box(indexer)
        box = lax.dynamic_slice(x, _int32(starts), sizes)
        return lax.squeeze(box, [k for k, i in enumerate(indexer.indices) if not _is_slice(i)])
    return jnp.asarray(x)[_numpy_index(indexer)]


def _update(x: Value, indexer: Any, value: Value, add: bool = False) -> Value:
    """Return `x`, with `value` in place of, or added to, the elements that an indexer selects."""
    if _is_full(indexer):
        return lax.add(x, value) if add else value
    if not _is_box(indexer):
        selected = jnp.asarray(x).at[_numpy_index(indexer)]
        return selected.add(value) if add else selected.set(value)
    starts, sizes = _box(indexer)
    part = lax.reshape(value, sizes)
    if add:
        part = lax.add(lax.dynamic_slice(x, _int32(starts), sizes), part)
    return lax.dynamic_update_slice(x, part, _int32(starts))


# `_read` has the same three cases as JAX, because JAX treats a start out of bounds differently in
# each. In all three a negative start counts from the end. Then only a box that sticks out of the
# array is moved into it.


def _is_box(indexer: Any) -> bool:
    """Return whether an indexer selects a box: by slices of stride 1 and scalar integers."""
    return all(i.stride == 1 if _is_slice(i) else np.ndim(i) == 0 for i in indexer.indices)


def _box(indexer: Any) -> tuple[list[Any], list[int]]:
    """Return the start and the size of the smallest box around the elements, for each axis."""
    starts = [i.start if _is_slice(i) else i for i in indexer.indices]
    return starts, [_extent(i) if _is_slice(i) else 1 for i in indexer.indices]


def _numpy_index(indexer: Any) -> tuple[Any, ...]:
    """Return the NumPy index of an indexer.

    If a slice has a traced or negative start, the index has an integer array for each axis.
    """
    if not _has_unknown_start(indexer):
        return tuple(
            slice(i.start, i.start + _extent(i), i.stride) if _is_slice(i) else i
            for i in indexer.indices
        )
    integer_axes = [k for k, i in enumerate(indexer.indices) if not _is_slice(i)]
    shape = np.broadcast_shapes(*(np.shape(indexer.indices[k]) for k in integer_axes))
    # In the result, NumPy puts the axes of integer arrays at the position of the first array, or in
    # front if a slice separates the arrays.
    separated = any(np.diff(integer_axes) > 1)
    first = integer_axes[0] if integer_axes and not separated else 0
    ndim = len(indexer.indices) - len(integer_axes) + len(shape)
    arrays: list[Any] = []
    slice_axes = iter([*range(first), *range(first + len(shape), ndim)])
    for i in indexer.indices:
        if _is_slice(i):
            steps = lax.mul(lax.iota(np.int32, i.size), np.int32(i.stride))
            indices = lax.add(steps, *_int32([i.start]))
            arrays.append(_append_axes(indices, ndim - 1 - next(slice_axes)))
        else:
            arrays.append(_append_axes(i, ndim - first - len(shape)))
    return tuple(arrays)


def _append_axes(x: Value, axes: int) -> Value:
    """Return `x` with trailing axes of size 1 appended."""
    return lax.expand_dims(x, range(np.ndim(x), np.ndim(x) + axes))


def _int32(starts: Sequence[Any]) -> list[Value]:
    return [lax.convert_element_type(s, np.int32) for s in starts]


def _has_unknown_start(indexer: Any) -> bool:
    """Return whether a slice has a traced or negative start."""
    return any(_is_slice(i) and not _is_known(i.start) for i in indexer.indices)


def _is_slice(index: Any) -> bool:
    return hasattr(index, "stride")


def _is_known(start: Any) -> bool:
    """Return whether a start is known and not negative (negative starts count from the end)."""
    return isinstance(start, int | np.integer) and bool(start >= 0)


def _extent(index: Any) -> int:
    """Return the number of elements from the first to the last one of a slice, both included."""
    return (index.size - 1) * index.stride + 1 if index.size else 0


def _is_full(indexer: Any) -> bool:
    """Return whether an indexer selects all elements."""
    return all(
        _is_slice(i) and _is_known(i.start) and (i.start, i.size, i.stride) == (0, n, 1)
        for n, i in zip(indexer.shape, indexer.indices, strict=True)
    )


def _bitcast(x: Value, dtype: Any) -> Value:
    """Return the bits of `x` as another dtype, of the same size."""
    if x.dtype.itemsize != np.dtype(dtype).itemsize:
        raise NotDifferentiable(
            "derivative of a program with mutable references",
            f"a reference of dtype {x.dtype} is viewed as {dtype}, which has another element size",
            "",
            "read the reference, and convert the value",
        )
    return lax.bitcast_convert_type(x, dtype)


# For each kind of transform, two functions: `read(x, transform)` returns the part, and `write(x,
# transform, value)` returns `x` with the part replaced.
_KINDS: dict[str, tuple[Callable[[Value, Any], Value], Callable[[Value, Any, Value], Value]]] = {
    "NDIndexer": (_read, _update),
    "ReshapeTransform": (
        lambda x, t: lax.reshape(x, t.shape),
        lambda x, t, value: lax.reshape(value, x.shape),
    ),
    "TransposeTransform": (
        lambda x, t: lax.transpose(x, t.permutation),
        lambda x, t, value: lax.transpose(value, np.argsort(t.permutation)),
    ),
    "BitcastTransform": (
        lambda x, t: _bitcast(x, t.dtype),
        lambda x, t, value: _bitcast(value, x.dtype),
    ),
}
