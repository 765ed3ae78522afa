"""`unpool`, the backward pass of max pooling: a primitive of xform.

It adds the cotangent of each window to the largest (for min pooling, the smallest) element of the
window. XLA has an operation for this, select-and-scatter, which TPUs run directly. The compilers
for CPUs and GPUs expand it into large arrays of indices, a reduction and a scatter, which take a
dozen times the bytes of the pooled array. On CPUs and GPUs `unpool` takes two steps instead. It
computes the *place* of the largest element in each window: the element's number within the window,
in row-major order, as int8. Then it computes for each element of the input the sum of the
cotangents of the windows that chose it.

Compilers for CPUs and GPUs need this, with JAX 0.10.2 to 0.12.0.1. The switch is `unpools` of
`xform.steering`: without it, convolutions with max pooling took 2.9 times the temporary bytes on a
CPU and 1.5 times on an H100 (`experiments/steering`; `experiments/pooling` has times).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xform._jax import JaxprEqn, Primitive, ad, batching, jax_primitives, jit, mlir
from xform._jax.contexts import no_mesh, wide_if_needed
from xform._jax.symbolic import is_symbolic
from xform.program.dimensions import has_elements
from xform.program.ir import Program, trace
from xform.steering.barrier import lowered_plainly, plain
from xform.steering.materialize import materialize
from xform.steering.settings import steering

Sizes = Sequence[int]

# The largest window, in elements. With larger windows the program would be long.
# `experiments/pooling` measures windows of up to 49 elements.
_LARGEST = 64
# The place of an element that is outside the window. It stays negative if places along other axes
# are added.
_OUTSIDE = -(2**10)

unpool_p = Primitive("xform_unpool")
unpool_p.def_abstract_eval(lambda ct, x, **_: x.update(weak_type=False))


def unpool(ct: Any, x: Any, **windows: Any) -> Any:
    """Return the cotangent of `x`: `ct`, added to the largest (smallest) element of each window.

    At a tie the first element gets it. `windows` are `select_prim` (`lax.ge_p` or `lax.le_p`),
    `window_dimensions`, `window_strides` and `padding`, as in JAX's primitive.
    """
    if ct.dtype != x.dtype:  # a custom rule chose another dtype for the cotangent
        wide = max(np.dtype(np.float32), ct.dtype, x.dtype, key=lambda dtype: dtype.itemsize)
        out = unpool(*(lax.convert_element_type(a, wide) for a in (ct, x)), **windows)
        return lax.convert_element_type(out, ct.dtype)
    is_large = math.prod(windows["window_dimensions"]) > _LARGEST
    known_padding = not any(map(is_symbolic, itertools.chain(*windows["padding"])))
    known = known_padding and has_elements((*ct.shape, *x.shape))
    if is_large or not known or not steering().unpools:
        return jax_primitives.select_and_scatter_add_p.bind(ct, x, **windows)
    return unpool_p.bind(ct, x, **windows)


def gather(t: Any, x: Any, *, base_dilation: Sizes = (), window_dilation: Sizes = (),
           **windows: Any) -> Any:  # fmt: skip
    """Return the element of `t` at which `x` is largest (smallest), for each window.

    `unpool` is the transpose.
    """
    ones = (1,) * x.ndim
    base, spread = base_dilation or ones, window_dilation or ones
    gather_p = jax_primitives.select_and_gather_add_p
    return gather_p.bind(t, x, base_dilation=base, window_dilation=spread, **windows)


def worst_value(select_prim: Any, dtype: Any) -> np.ndarray:
    """Return the smallest number of a dtype if the largest is selected, else the largest number."""
    sign = -1 if select_prim is lax.ge_p else 1
    worst = np.asarray(sign * np.inf, dtype)
    return worst if np.isinf(worst) else np.asarray(sign * jax.numpy.finfo(dtype).max, dtype)


def _unpool(ct: Any, x: Any, *, select_prim: Any, window_dimensions: Sizes, window_strides: Sizes,
            padding: Any) -> Any:  # fmt: skip
    """Return the cotangent of `x`, by other operations than select-and-scatter."""
    sizes, strides = window_dimensions, window_strides
    chosen = materialize(_chosen_places(x, ct.shape, select_prim, sizes, strides, padding))
    lows = [low for low, _ in padding]
    # Windows overlap if they are larger than the stride. An element is in the last window that
    # begins before it, and perhaps in windows that begin one or more strides earlier.
    counts = (-(-size // stride) for size, stride in zip(sizes, strides, strict=True))
    terms = [_from_window(ct, chosen, x.shape, earlier, sizes, strides, lows)
             for earlier in np.ndindex(*counts)]  # fmt: skip
    return functools.reduce(lax.add, terms)


def lowered(eqn: JaxprEqn) -> Program | None:
    """Return the program that CPU and GPU compilers get in place of an equation of `unpool_p`.

    None if the types are sharded over a mesh.
    """
    types: list[Any] = [v.aval for v in eqn.invars]
    if any(axis is not None for t in types for axis in t.sharding.spec):
        return None
    with no_mesh(), wide_if_needed(types):
        types = plain(types)
        return trace(lambda ct, x: [_unpool(ct, x, **eqn.params)], *types)


def _chosen_places(x: Any, windows: Sizes, select_prim: Any, sizes: Sizes, strides: Sizes,
                   padding: Any) -> Any:  # fmt: skip
    """Return the place of the largest (smallest) element in each window, as int8.

    `windows` is the shape of the pooled array, `sizes` the shape of a window.
    """
    padded = _pad(x, worst_value(select_prim, x.dtype), padding)

    def elements_at(place: Sizes) -> Any:
        """Return the element at a place, for all windows."""
        axes = zip(place, windows, strides, strict=True)
        return lax.slice(padded, place, [i + (n - 1) * step + 1 for i, n, step in axes], strides)

    best, *others = map(elements_at, np.ndindex(*sizes))
    chosen = lax.full(windows, 0, np.int8)
    for i, other in enumerate(others, 1):
        stays = select_prim.bind(best, other)
        best = lax.select(stays, best, other)
        chosen = lax.select(stays, chosen, lax.full_like(chosen, i))
    return chosen


def _from_window(ct: Any, chosen: Any, shape: Sizes, earlier: Sizes, sizes: Sizes, strides: Sizes,
                 lows: Sizes) -> Any:  # fmt: skip
    """Return for each element the cotangent of one of its windows if the window chose it, else 0.

    The window begins `earlier` strides, along each axis, before the last window that begins at or
    before the element. `shape` is the shape of the input, `lows` the padding before it.
    """
    starts = [q * stride - low for q, stride, low in zip(earlier, strides, lows, strict=True)]

    def of_window(y: Any, fill: int) -> Any:
        """Return for each element the value of `y` for its window, or `fill` if it has none."""
        for axis, stride in enumerate(strides):
            if stride > 1:
                rows = (*y.shape[: axis + 1], stride, *y.shape[axis + 1 :])
                y = lax.broadcast_in_dim(y, rows, [a for a in range(len(rows)) if a != axis + 1])
                y = lax.collapse(y, axis, axis + 2)
        axes = zip(starts, y.shape, shape, strict=True)
        return _pad(y, np.asarray(fill, y.dtype), [(i, n - i - m) for i, m, n in axes])

    place = lax.full(shape, 0, np.int32)  # of each element in its window
    for axis, (n, size, stride, start) in enumerate(
        zip(shape, sizes, strides, starts, strict=True)
    ):
        if size == stride == 1:
            continue
        known = not is_symbolic(n)
        numpy: Any = np if known else jnp
        along_axis = earlier[axis] * stride + (numpy.arange(n) - start) % stride
        row_major = along_axis * math.prod(sizes[axis + 1 :])
        along_axis = numpy.where(along_axis < size, row_major, _OUTSIDE)
        if not known or along_axis.any():
            part = lax.broadcast_in_dim(along_axis.astype(np.int32), shape, (axis,))
            place = lax.add(place, part)
    is_chosen = lax.eq(lax.convert_element_type(of_window(chosen, -1), np.int32), place)
    return lax.select(is_chosen, of_window(ct, 0), lax.full(shape, 0, ct.dtype))


def _pad(x: Any, value: np.ndarray, padding: Sequence[tuple[int, int]]) -> Any:
    if not np.any(padding):
        return x
    return lax.pad(x, value, [(low, high, 0) for low, high in padding])


# JAX's rules for the primitive: `vmap`, forward mode, and transposition.


def _batch(args: Sequence[Any], dims: Sequence[Any], **windows: Any):
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    ct, x = (batching.bdim_at_front(x, d, size) for x, d in zip(args, dims, strict=True))
    batch_axis = {"window_dimensions": 1, "window_strides": 1, "padding": (0, 0)}
    return unpool(ct, x, **windows | {k: (v, *windows[k]) for k, v in batch_axis.items()}), 0


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **windows: Any):
    dct, y = tangents[0], unpool_p.bind(*primals, **windows)
    zero = isinstance(dct, ad.Zero)
    return y, ad.Zero(y.aval) if zero else unpool_p.bind(dct, primals[1], **windows)


_NAMES = ("select_prim", "window_dimensions", "window_strides", "padding")
_compiled = jit(unpool_p.bind, static_argnames=_NAMES)


@unpool_p.def_impl
def _impl(ct: Any, x: Any, **windows: Any) -> Any:
    """Run the primitive eagerly, compiled: like JAX's primitives, even under `jax_disable_jit`."""
    with jax.disable_jit(False):
        return _compiled(ct, x, **windows)


mlir.register_lowering(unpool_p, lowered_plainly(_unpool, several=False))
mlir.register_lowering(
    unpool_p,
    lowered_plainly(jax_primitives.select_and_scatter_add_p.bind, several=False),
    platform="tpu",
)
batching.primitive_batchers[unpool_p] = _batch
ad.primitive_jvps[unpool_p] = _jvp
ad.primitive_transposes[unpool_p] = lambda y, ct, x, **windows: [gather(y, x, **windows), None]
