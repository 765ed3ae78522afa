"""Indexing into references: reads and writes at `ref[i, 2:5]` or `ref.at[...]`.

The position is a list of transforms, which are applied one after the other. An indexer is a
transform with one index for each axis. The index is a slice (`start`, `size`, `stride`; the start
may be traced), or an integer or integer array, as in NumPy's advanced indexing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from xform.errors import NotDifferentiable

Value = Any


def read_at(x: Value, transforms: Sequence[Any]) -> Value:
    """Read `x` at the position given by `transforms`."""
    for t in transforms:
        x = _KINDS[_name(t)][0](x, t)
    return x


def write_at(x: Value, transforms: Sequence[Any], value: Value) -> Value:
    """`x` with the elements at the position replaced by `value`."""
    if not transforms:
        return value
    first, *rest = transforms
    return _KINDS[_name(first)][1](x, first, write_at(read_at(x, [first]), rest, value))


def add_at(x: Value, transforms: Sequence[Any], value: Value) -> Value:
    """`x` with `value` added at the position; if indices repeat, each occurrence is added."""
    if not transforms:
        return lax.add(x, value)
    *outer, last = transforms
    inner = read_at(x, outer)
    if _name(last) == "NDIndexer":
        return write_at(x, outer, _update(inner, last, value, add=True))
    return write_at(x, transforms, lax.add(read_at(inner, [last]), value))


def _name(transform: Any) -> str:
    name = type(transform).__name__
    if name not in _KINDS:
        raise NotDifferentiable(
            "derivative of a program with mutable references",
            f"xform does not support the view {name} of a reference",
            "",
            "read the full reference, and apply the operation to its value",
        )
    return name


def _read(x: Value, at: Any) -> Value:
    if _is_full(at):
        return x
    if all(map(_is_slice, at.indices)) and not _has_unknown_start(at):
        starts, sizes = _box(at)
        ends = [s + n for s, n in zip(starts, sizes, strict=True)]
        return lax.slice(x, starts, ends, [i.stride for i in at.indices])
    if _is_box(at):
        starts, sizes = _box(at)
        box = lax.dynamic_slice(x, _int32(starts), sizes)
        return lax.squeeze(box, [k for k, i in enumerate(at.indices) if not _is_slice(i)])
    return jnp.asarray(x)[_numpy_index(at)]


def _update(x: Value, at: Any, value: Value, add: bool = False) -> Value:
    """`x` with `value` set, or added, at the position of an indexer."""
    if _is_full(at):
        return lax.add(x, value) if add else value
    if not _is_box(at):
        places = jnp.asarray(x).at[_numpy_index(at)]
        return places.add(value) if add else places.set(value)
    starts, sizes = _box(at)
    part = lax.reshape(value, sizes)
    if add:
        part = lax.add(lax.dynamic_slice(x, _int32(starts), sizes), part)
    return lax.dynamic_update_slice(x, part, _int32(starts))


# JAX reads a reference in one of three ways, which treat a start out of bounds differently. A
# negative start counts from the end. After that, a box is clamped to the array, other indices not.


def _is_box(at: Any) -> bool:
    """Whether an indexer selects a contiguous box: slices of stride 1, and scalar integers."""
    return all(i.stride == 1 if _is_slice(i) else np.ndim(i) == 0 for i in at.indices)


def _box(at: Any) -> tuple[list[Any], list[int]]:
    """The start indices and the sizes of an indexer's box; a strided slice counts its extent."""
    starts = [i.start if _is_slice(i) else i for i in at.indices]
    return starts, [_extent(i) if _is_slice(i) else 1 for i in at.indices]


def _numpy_index(at: Any) -> tuple[Any, ...]:
    """The NumPy index of an indexer; integer arrays for all axes if a slice has a traced start."""
    if not _has_unknown_start(at):
        return tuple(
            slice(i.start, i.start + _extent(i), i.stride) if _is_slice(i) else i
            for i in at.indices
        )
    integers = [k for k, i in enumerate(at.indices) if not _is_slice(i)]
    shape = np.broadcast_shapes(*(np.shape(at.indices[k]) for k in integers))
    # NumPy puts the axes of integer arrays at the position of the first array, or in front if a
    # slice separates the arrays.
    apart = any(np.diff(integers) > 1)
    before = integers[0] if integers and not apart else 0
    ndim = len(at.indices) - len(integers) + len(shape)
    places: list[Any] = []
    axes = iter([*range(before), *range(before + len(shape), ndim)])
    for i in at.indices:
        if _is_slice(i):
            steps = lax.mul(lax.iota(np.int32, i.size), np.int32(i.stride))
            places.append(_append_axes(lax.add(steps, *_int32([i.start])), ndim - 1 - next(axes)))
        else:
            places.append(_append_axes(i, ndim - before - len(shape)))
    return tuple(places)


def _append_axes(x: Value, axes: int) -> Value:
    """`x` with trailing axes of size 1 appended."""
    return lax.expand_dims(x, range(np.ndim(x), np.ndim(x) + axes))


def _int32(starts: Sequence[Any]) -> list[Value]:
    return [lax.convert_element_type(s, np.int32) for s in starts]


def _has_unknown_start(at: Any) -> bool:
    """Whether a slice has a traced or negative start."""
    return any(_is_slice(i) and not _is_known(i.start) for i in at.indices)


def _is_slice(index: Any) -> bool:
    return hasattr(index, "stride")


def _is_known(start: Any) -> bool:
    """Whether a start is a known integer and not negative (JAX counts those from the end)."""
    return isinstance(start, int | np.integer) and bool(start >= 0)


def _extent(index: Any) -> int:
    return (index.size - 1) * index.stride + 1 if index.size else 0


def _is_full(at: Any) -> bool:
    return all(
        _is_slice(i) and _is_known(i.start) and (i.start, i.size, i.stride) == (0, n, 1)
        for n, i in zip(at.shape, at.indices, strict=True)
    )


def _cast(x: Value, dtype: Any) -> Value:
    if x.dtype.itemsize != np.dtype(dtype).itemsize:
        raise NotDifferentiable(
            "derivative of a program with mutable references",
            f"a reference of dtype {x.dtype} is viewed as {dtype}, which has another element size",
            "",
            "read the reference, and convert the value",
        )
    return lax.bitcast_convert_type(x, dtype)


# For each kind of transform: a function that reads, and one that replaces the elements.
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
        lambda x, t: _cast(x, t.dtype),
        lambda x, t, value: _cast(value, x.dtype),
    ),
}
