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
    if not any(map(_many, at.indices)):
        return _cut(x, at)
    starts, sizes, index = _split(x, at)
    return (_box(x, starts, sizes) if starts else x)[index]


def _indexed(x: Value, at: Any, value: Value, add: bool = False) -> Value:
    """`x` with a value put, or added, where an indexer points."""
    if _whole(at):
        return lax.add(x, value) if add else value
    if not any(map(_many, at.indices)) and all(_stride(i) == 1 for i in at.indices):
        starts, sizes = _corner(at)
        part = lax.reshape(value, sizes)
        if add:
            part = lax.add(_box(x, starts, sizes), part)
        return lax.dynamic_update_slice(x, part, _indices(starts))
    starts, sizes, index = _split(x, at)
    part = jnp.asarray(_box(x, starts, sizes) if starts else x)
    part = part.at[index].add(value) if add else part.at[index].set(value)
    return lax.dynamic_update_slice(x, part, _indices(starts)) if starts else part


def _cut(x: Value, at: Any) -> Value:
    """A box out of `x`, without the axes that one integer indexes."""
    starts, sizes = _corner(at)
    ends = [s + n if isinstance(s, int) else s for s, n in zip(starts, sizes, strict=True)]
    if all(isinstance(s, int) for s in starts):
        box = lax.slice(x, starts, ends, [_stride(i) for i in at.indices])
    else:
        box = _box(x, starts, sizes)
        if any(_stride(i) > 1 for i in at.indices):
            box = lax.slice(box, [0] * box.ndim, box.shape, [_stride(i) for i in at.indices])
    return lax.squeeze(box, [k for k, i in enumerate(at.indices) if not _is_slice(i)])


def _box(x: Value, starts: Sequence[Any], sizes: Sequence[int]) -> Value:
    return lax.dynamic_slice(x, _indices(starts), sizes)


def _indices(starts: Sequence[Any]) -> list[Value]:
    return [lax.convert_element_type(s, np.int32) for s in starts]


def _corner(at: Any) -> tuple[list[Any], list[int]]:
    """Where the box of an indexer starts, and how far it reaches."""
    starts = [i.start if _is_slice(i) else i for i in at.indices]
    sizes = [_reach(i) if _is_slice(i) else 1 for i in at.indices]
    return [int(s) if _static(s) else s for s in starts], sizes


def _split(x: Value, at: Any) -> tuple[list[Any], list[int], Any]:
    """A box that cuts the slices of unknown start, or nothing, and the index within it."""
    starts, sizes, index = [], [], []
    moving = False
    for n, i in zip(x.shape, at.indices, strict=True):
        dynamic = _is_slice(i) and not _static(i.start)
        moving = moving or dynamic
        starts.append(i.start if dynamic else 0)
        sizes.append(_reach(i) if dynamic else n)
        start = 0 if dynamic else i.start if _is_slice(i) else None
        index.append(i if start is None else slice(start, start + _reach(i), i.stride))
    return starts if moving else [], sizes, tuple(index)


def _is_slice(index: Any) -> bool:
    return hasattr(index, "stride")


def _many(index: Any) -> bool:
    return not _is_slice(index) and np.ndim(index) > 0


def _static(start: Any) -> bool:
    return isinstance(start, int | np.integer)


def _stride(index: Any) -> int:
    return index.stride if _is_slice(index) else 1


def _reach(index: Any) -> int:
    return (index.size - 1) * index.stride + 1 if index.size else 0


def _whole(at: Any) -> bool:
    return all(
        _is_slice(i) and _static(i.start) and (i.start, i.size, i.stride) == (0, n, 1)
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
