"""`unpool`: add each window's cotangent to the largest (smallest) element of the window.

XLA has an operation for this, select-and-scatter, which TPUs run directly. The compilers for CPUs
and GPUs expand it into the places of all elements, as one array for each axis, a reduction of them
all, and a scatter. This takes a dozen times the bytes of the pooled array. On CPUs and GPUs
`unpool` computes instead the place of the largest element in each window, and then, for each
element, the sum over the windows that chose it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from xform._jax import JaxprEqn, Primitive, ad, batching, jax_primitives, mlir
from xform.interpret.barrier import lowered_plainly, no_mesh, plain
from xform.interpret.materialize import materialize
from xform.program.ir import Program, trace

Sizes = Sequence[int]

# With larger windows the program would be long; `experiments/pooling` measures up to 49 places.
_LARGEST = 64
# The place of an element outside any window: it stays below 0 after additions of other axes.
_NOWHERE = -(2**10)

unpool_p = Primitive("xform_unpool")
unpool_p.def_abstract_eval(lambda ct, x, **_: x.update(weak_type=False))


def unpool(ct: Any, x: Any, **windows: Any) -> Any:
    """Return the cotangent of `x`: `ct`, added to the largest (smallest) element of each window.

    At a tie the first element gets it. `windows` are `select_prim` (`lax.ge_p` or `lax.le_p`),
    `window_dimensions`, `window_strides` and `padding`, as in JAX's primitive.
    """
    if math.prod(windows["window_dimensions"]) > _LARGEST or 0 in (*ct.shape, *x.shape):
        return jax_primitives.select_and_scatter_add_p.bind(ct, x, **windows)
    return unpool_p.bind(ct, x, **windows)


def gather(t: Any, x: Any, *, base_dilation: Sizes = (), window_dilation: Sizes = (),
           **windows: Any) -> Any:  # fmt: skip
    """Return `t` where `x` is largest (smallest) in each window; `unpool` is the transpose."""
    ones = (1,) * x.ndim
    base, spread = base_dilation or ones, window_dilation or ones
    gather_p = jax_primitives.select_and_gather_add_p
    return gather_p.bind(t, x, base_dilation=base, window_dilation=spread, **windows)


def _unpool(ct: Any, x: Any, *, select_prim: Any, window_dimensions: Sizes, window_strides: Sizes,
            padding: Any) -> Any:  # fmt: skip
    sizes, strides = window_dimensions, window_strides
    which = materialize(_which(x, ct.shape, select_prim, sizes, strides, padding))
    lows = [low for low, _ in padding]
    # An element is in the window that begins in its stride, and in some that begin earlier.
    counts = (-(-size // stride) for size, stride in zip(sizes, strides, strict=True))
    terms = [_back(ct, which, x.shape, q, sizes, strides, lows) for q in np.ndindex(*counts)]
    return functools.reduce(lax.add, terms)


def lowered(eqn: JaxprEqn) -> Program | None:
    """Return the program for CPU and GPU compilers; None if the types are sharded over a mesh."""
    types: list[Any] = [v.aval for v in eqn.invars]
    if any(axis is not None for t in types for axis in t.sharding.spec):
        return None
    with no_mesh():
        types = plain(types)
        return trace(lambda ct, x: [_unpool(ct, x, **eqn.params)], *types)


def _which(x: Any, windows: Sizes, select_prim: Any, sizes: Sizes, strides: Sizes, padding: Any
           ) -> Any:  # fmt: skip
    """Return the place of the largest (smallest) element in its window, row by row, as int8."""
    worst = np.asarray(-np.inf if select_prim is lax.ge_p else np.inf, x.dtype)
    filled = _padded(x, worst, padding)

    def at(place: Sizes) -> Any:
        ends = zip(place, windows, strides, strict=True)
        return lax.slice(filled, place, [a + (n - 1) * s + 1 for a, n, s in ends], strides)

    best, *others = map(at, np.ndindex(*sizes))
    which = lax.full(windows, 0, np.int8)
    for i, other in enumerate(others, 1):
        stays = select_prim.bind(best, other)
        best = lax.select(stays, best, other)
        which = lax.select(stays, which, lax.full_like(which, i))
    return which


def _back(ct: Any, which: Any, shape: Sizes, before: Sizes, sizes: Sizes, strides: Sizes,
          lows: Sizes) -> Any:  # fmt: skip
    """Return each element's part of the windows that begin `before` strides earlier."""
    starts = [q * stride - low for q, stride, low in zip(before, strides, lows, strict=True)]

    def spread(y: Any, fill: int) -> Any:
        """Return the value of `y` for that window, for each element."""
        for axis, stride in enumerate(strides):
            if stride > 1:
                rows = (*y.shape[: axis + 1], stride, *y.shape[axis + 1 :])
                y = lax.broadcast_in_dim(y, rows, [a for a in range(len(rows)) if a != axis + 1])
                y = lax.collapse(y, axis, axis + 2)
        ends = zip(starts, y.shape, shape, strict=True)
        return _padded(y, np.asarray(fill, y.dtype), [(a, n - a - m) for a, m, n in ends])

    place = lax.full(shape, 0, np.int32)
    for axis, (n, size, stride, start) in enumerate(
        zip(shape, sizes, strides, starts, strict=True)
    ):
        of_axis = before[axis] * stride + (np.arange(n) - start) % stride
        of_axis = np.where(of_axis < size, of_axis * math.prod(sizes[axis + 1 :]), _NOWHERE)
        if of_axis.any():
            row = lax.broadcast_in_dim(of_axis.astype(np.int32), shape, (axis,))
            place = lax.add(place, row)
    mine = lax.eq(lax.convert_element_type(spread(which, -1), np.int32), place)
    return lax.select(mine, spread(ct, 0), lax.full(shape, 0, ct.dtype))


def _padded(x: Any, value: np.ndarray, padding: Sequence[tuple[int, int]]) -> Any:
    if not np.any(padding):
        return x
    return lax.pad(x, value, [(low, high, 0) for low, high in padding])


def _batched(args: Sequence[Any], dims: Sequence[Any], **windows: Any):
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    ct, x = (batching.bdim_at_front(x, d, size) for x, d in zip(args, dims, strict=True))
    first = {"window_dimensions": 1, "window_strides": 1, "padding": (0, 0)}
    return unpool(ct, x, **windows | {k: (v, *windows[k]) for k, v in first.items()}), 0


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **windows: Any):
    dct, y = tangents[0], unpool_p.bind(*primals, **windows)
    zero = isinstance(dct, ad.Zero)
    return y, ad.Zero(y.aval) if zero else unpool_p.bind(dct, primals[1], **windows)


_NAMES = ("select_prim", "window_dimensions", "window_strides", "padding")
_compiled = jax.jit(unpool_p.bind, static_argnames=_NAMES)


@unpool_p.def_impl
def _impl(ct: Any, x: Any, **windows: Any) -> Any:
    """Compile the primitive also under `jax_disable_jit`, as JAX does with its own primitives."""
    with jax.disable_jit(False):
        return _compiled(ct, x, **windows)


mlir.register_lowering(unpool_p, lowered_plainly(_unpool, several=False))
mlir.register_lowering(
    unpool_p,
    lowered_plainly(jax_primitives.select_and_scatter_add_p.bind, several=False),
    platform="tpu",
)
batching.primitive_batchers[unpool_p] = _batched
ad.primitive_jvps[unpool_p] = _jvp
ad.primitive_transposes[unpool_p] = lambda y, ct, x, **windows: [gather(y, x, **windows), None]
