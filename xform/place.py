"""Places in a reference: `ref[i, 2:5]`, `ref.at[...]`, and what is read or written there.

A place is a list of transforms, each of what the one before it shows. An indexer has one index for
each axis: a slice (`start`, `size`, `stride`, of which the start may be traced) or integers, which
follow NumPy's rules together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from xform.errors import NotDifferentiable

Value = Any


def content(x: Value, transforms: Sequence[Any]) -> Value:
    """What stands in a place of `x`."""
    for t in transforms:
        x = _KINDS[_kind(t)][0](x, t)
    return x


def replaced(x: Value, transforms: Sequence[Any], value: Value) -> Value:
    """`x` with `value` in a place."""
    if not transforms:
        return value
    first, *rest = transforms
    return _KINDS[_kind(first)][1](x, first, replaced(content(x, [first]), rest, value))


def accumulated(x: Value, transforms: Sequence[Any], value: Value) -> Value:
    """`x` with `value` added in a place; where indices repeat, each occurrence is added."""
    if not transforms:
        return lax.add(x, value)
    *outer, last = transforms
    inner = content(x, outer)
    if _kind(last) == "NDIndexer":
        return replaced(x, outer, _indexed(inner, last, value, add=True))
    return replaced(x, transforms, lax.add(content(inner, [last]), value))


def _kind(transform: Any) -> str:
    name = type(transform).__name__
    if name not in _KINDS:
        raise NotDifferentiable(
            "derivative of a program with mutable references",
            f"it looks at a reference through a {name}, which is not understood",
            "",
            "read the reference, and work on the value",
        )
    return name


def _index(x: Value, at: Any) -> Value:
    if _whole(at):
        return x
    if all(map(_is_slice, at.indices)) and not _moves(at):
        starts, sizes = _corner(at)
        ends = [s + n for s, n in zip(starts, sizes, strict=True)]
        return lax.slice(x, starts, ends, [i.stride for i in at.indices])
    if _is_box(at):
        starts, sizes = _corner(at)
        box = lax.dynamic_slice(x, _int32(starts), sizes)
        return lax.squeeze(box, [k for k, i in enumerate(at.indices) if not _is_slice(i)])
    return jnp.asarray(x)[_picks(at)]


def _indexed(x: Value, at: Any, value: Value, add: bool = False) -> Value:
    """`x` with a value put, or added, where an indexer points."""
    if _whole(at):
        return lax.add(x, value) if add else value
    if not _is_box(at):
        places = jnp.asarray(x).at[_picks(at)]
        return places.add(value) if add else places.set(value)
    starts, sizes = _corner(at)
    part = lax.reshape(value, sizes)
    if add:
        part = lax.add(lax.dynamic_slice(x, _int32(starts), sizes), part)
    return lax.dynamic_update_slice(x, part, _int32(starts))


# JAX reads a place in one of three ways, which differ for a start outside of the array: a negative
# one counts from the end; then a box is clamped to the array, and an index by itself is not.


def _is_box(at: Any) -> bool:
    """Whether an indexer shows neighbours: slices without strides, and single integers."""
    return all(i.stride == 1 if _is_slice(i) else np.ndim(i) == 0 for i in at.indices)


def _corner(at: Any) -> tuple[list[Any], list[int]]:
    """Where the box of an indexer starts, and how far it reaches."""
    starts = [i.start if _is_slice(i) else i for i in at.indices]
    return starts, [_reach(i) if _is_slice(i) else 1 for i in at.indices]


def _picks(at: Any) -> tuple[Any, ...]:
    """An indexer as an index of NumPy's: arrays for all axes if a slice's start is not `_fixed`."""
    if not _moves(at):
        return tuple(
            slice(i.start, i.start + _reach(i), i.stride) if _is_slice(i) else i for i in at.indices
        )
    integers = [k for k, i in enumerate(at.indices) if not _is_slice(i)]
    shape = np.broadcast_shapes(*(np.shape(at.indices[k]) for k in integers))
    # The axes of integers come where the integers stand, or first if they stand apart.
    apart = any(np.diff(integers) > 1)
    before = integers[0] if integers and not apart else 0
    ndim = len(at.indices) - len(integers) + len(shape)
    places: list[Any] = []
    axes = iter([*range(before), *range(before + len(shape), ndim)])
    for i in at.indices:
        if _is_slice(i):
            steps = lax.mul(lax.iota(np.int32, i.size), np.int32(i.stride))
            places.append(_followed(lax.add(steps, *_int32([i.start])), ndim - 1 - next(axes)))
        else:
            places.append(_followed(i, ndim - before - len(shape)))
    return tuple(places)


def _followed(x: Value, axes: int) -> Value:
    """An array followed by so many axes of one element."""
    return lax.expand_dims(x, range(np.ndim(x), np.ndim(x) + axes))


def _int32(starts: Sequence[Any]) -> list[Value]:
    return [lax.convert_element_type(s, np.int32) for s in starts]


def _moves(at: Any) -> bool:
    """Whether a slice has a start that is not `_fixed`."""
    return any(_is_slice(i) and not _fixed(i.start) for i in at.indices)


def _is_slice(index: Any) -> bool:
    return hasattr(index, "stride")


def _fixed(start: Any) -> bool:
    """Whether a start is known and inside of the array: JAX counts a negative one from the end."""
    return isinstance(start, int | np.integer) and bool(start >= 0)


def _reach(index: Any) -> int:
    return (index.size - 1) * index.stride + 1 if index.size else 0


def _whole(at: Any) -> bool:
    return all(
        _is_slice(i) and _fixed(i.start) and (i.start, i.size, i.stride) == (0, n, 1)
        for n, i in zip(at.shape, at.indices, strict=True)
    )


def _cast(x: Value, dtype: Any) -> Value:
    if x.dtype.itemsize != np.dtype(dtype).itemsize:
        raise NotDifferentiable(
            "derivative of a program with mutable references",
            f"it looks at a reference of dtype {x.dtype} as {dtype}, of another size",
            "",
            "read the reference, and convert the value",
        )
    return lax.bitcast_convert_type(x, dtype)


# For each kind of transform: what it shows, and the whole when that is replaced.
_KINDS: dict[str, tuple[Callable[[Value, Any], Value], Callable[[Value, Any, Value], Value]]] = {
    "NDIndexer": (_index, _indexed),
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
