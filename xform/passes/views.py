"""Compose views: operations that only move, reverse or repeat the elements of one array.

A view is described by its axes: for each, the size, and the stride, which is how many positions
apart two neighbours along the axis are in the array that the view is of. 0: the axis repeats one
element. So a chain of transpositions, reshapes, slices, reversals and broadcasts is a view again.
For example, `jnp.transpose(x[None], (2, 0, 1))[:, 0].T` has the axes of `x` itself.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax import lax

from xform._jax import JaxprEqn, Literal, primitive_named
from xform._jax.meshes import has_explicit_axis
from xform.program.ir import Atom

# The size and the stride of each axis of a view.
Axes = list[tuple[int, int]]
# A function of one array that binds one operation.
Movement = functools.partial[Any]
# Every view is simplified together with the views that it reads, so longer chains are rare.
_LONGEST_CHAIN = 6


def simplest_view(
    eqn: JaxprEqn, producers: Mapping[Any, JaxprEqn]
) -> tuple[Atom, list[Movement]] | None:
    """Return an array and fewer operations that make the result of a view from it.

    `producers` maps each value to the equation that makes it. The operations replace `eqn` and some
    views that it reads. The result is None if there are no such operations.
    """
    chain, best = [eqn], None
    while True:
        (x,) = chain[-1].invars[:1]
        movements = _movements(chain)
        if movements is not None and len(movements) < (len(best[1]) if best else len(chain)):
            best = x, movements
        inner = None if isinstance(x, Literal) else producers.get(x)
        if inner is None or inner.primitive not in VIEWS or len(chain) == _LONGEST_CHAIN:
            return best
        chain.append(inner)


def _movements(chain: Sequence[JaxprEqn]) -> list[Movement] | None:
    """Return few operations that do the same as a chain of views, of which the last comes first.

    The result is None if no such operations are known.
    """
    base = _type(chain[-1].invars[0])
    types = [base, *(_type(eqn.outvars[0]) for eqn in chain)]
    if not all(isinstance(n, int) for t in types for n in t.shape):
        return None  # symbolic dimensions
    axes: Axes | None = [*zip(base.shape, _row_major(base.shape), strict=True)]
    for eqn in reversed(chain):
        axes = _VIEWS[eqn.primitive](axes, eqn)
        if axes is None:
            return None
    movements = _rebuild(base.shape, axes)
    # JAX may not know the sharding of a value that is reshaped or broadcast.
    unknown = has_explicit_axis(base) and any(
        move.func in (lax.reshape, lax.broadcast_in_dim) for move in movements or ()
    )
    return None if unknown else movements


def _rebuild(base: tuple[int, ...], axes: Axes) -> list[Movement] | None:
    """Return at most four operations that make a view from an array of the shape `base`.

    The result is None if the view does not contain each element of the array. Only broadcasts may
    repeat elements.
    """
    shape = tuple(n for n, _ in axes)
    if 0 in base:
        return [] if base == shape else None
    # The axes of the view that are axes of the array, in the order of the array.
    ordered = [i for i, (n, stride) in enumerate(axes) if n > 1 and stride]
    by_position = sorted(ordered, key=lambda i: -abs(axes[i][1]))
    sizes = tuple(shape[i] for i in by_position)
    strides = tuple(abs(axes[i][1]) for i in by_position)
    if math.prod(sizes) != math.prod(base) or strides != _row_major(sizes):
        return None
    backwards = [at for at, i in enumerate(by_position) if axes[i][1] < 0]
    if ordered == by_position and not backwards and math.prod(shape) == math.prod(base):
        return [] if shape == base else [Movement(lax.reshape, new_sizes=shape)]
    movements: list[Movement] = []
    if base != sizes:
        movements.append(Movement(lax.reshape, new_sizes=sizes))
    if backwards:
        movements.append(Movement(lax.rev, dimensions=backwards))
    if ordered != by_position:
        permutation = [by_position.index(i) for i in ordered]
        movements.append(Movement(lax.transpose, permutation=permutation))
    if len(ordered) < len(shape):
        dims = tuple(ordered)
        movements.append(Movement(lax.broadcast_in_dim, shape=shape, broadcast_dimensions=dims))
    return movements


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of an array of this shape in row-major order."""
    products = itertools.accumulate(reversed(shape[1:]), operator.mul, initial=1)
    return tuple(reversed([*products])) if shape else ()


def _type(atom: Any) -> Any:
    return atom.aval


# What each operation makes of a view: the axes of another view, or None if that is not one.


def _transpose(axes: Axes, eqn: JaxprEqn) -> Axes:
    return [axes[i] for i in eqn.params["permutation"]]


def _squeeze(axes: Axes, eqn: JaxprEqn) -> Axes:
    return [axis for i, axis in enumerate(axes) if i not in eqn.params["dimensions"]]


def _reverse(axes: Axes, eqn: JaxprEqn) -> Axes:
    reversed_axes = eqn.params["dimensions"]
    return [(n, -step if i in reversed_axes else step) for i, (n, step) in enumerate(axes)]


def _slice(axes: Axes, eqn: JaxprEqn) -> Axes | None:
    """Slice whole axes, and axes that repeat one element; there the start does not matter."""
    sizes = _type(eqn.outvars[0]).shape
    pairs = [*zip(sizes, axes, strict=True)]
    known = all(size == n or not stride for size, (n, stride) in pairs)
    return [(size, stride) for size, (_, stride) in pairs] if known else None


def _broadcast(axes: Axes, eqn: JaxprEqn) -> Axes | None:
    shape, dims = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    if len(eqn.invars) > 1 or eqn.params.get("sharding") is not None:
        return None
    strides = {i: stride for i, (n, stride) in zip(dims, axes, strict=True) if n == shape[i]}
    return [(n, strides.get(i, 0)) for i, n in enumerate(shape)]


def _reshape(axes: Axes, eqn: JaxprEqn) -> Axes | None:
    """Merge the axes of a view, and split the merged axes, where the strides allow that."""
    params, shape = eqn.params, _type(eqn.outvars[0]).shape
    if params["dimensions"] is not None or params.get("sharding") is not None:
        return None
    if 0 in shape:
        return [*zip(shape, _row_major(shape), strict=True)]
    merged: Axes = []
    for n, stride in axes:
        if n > 1 and merged and merged[-1][1] == n * stride:
            merged[-1] = merged[-1][0] * n, stride
        elif n > 1:
            merged.append((n, stride))
    split: Axes = []
    left, stride = 1, 0  # what is left of the merged axis that is being split
    for n in reversed(shape):
        if n > 1 and left == 1:
            left, stride = merged.pop()
        if left % n:
            return None
        split.append((n, stride if n > 1 else 0))
        left, stride = left // n, stride * n
    return split[::-1]


def _stack(axes: Axes, eqn: JaxprEqn) -> Axes | None:
    """Stack one array: add an axis of length one."""
    at = eqn.params["axis"]
    return [*axes[:at], (1, 0), *axes[at:]] if len(eqn.invars) == 1 else None


def _tile(axes: Axes, eqn: JaxprEqn) -> Axes | None:
    """Repeat axes of length one, or nothing."""
    repeats = [*zip(axes, eqn.params["reps"], strict=True)]
    known = all(k == 1 or n == 1 for (n, _), k in repeats)
    return [axis if k == 1 else (k, 0) for axis, k in repeats] if known else None


_VIEWS: dict[Any, Callable[[Axes, JaxprEqn], Axes | None]] = {
    lax.transpose_p: _transpose,
    lax.squeeze_p: _squeeze,
    lax.rev_p: _reverse,
    lax.slice_p: _slice,
    lax.dynamic_slice_p: _slice,
    lax.broadcast_in_dim_p: _broadcast,
    lax.reshape_p: _reshape,
    # Primitives of newer versions of JAX; None if there are none.
    primitive_named("stack"): _stack,
    primitive_named("tile"): _tile,
}
VIEWS = frozenset(p for p in _VIEWS if p is not None)
