"""Rules of reductions over sliding windows, and of the select-and-scatter operations.

The derivative of a sum is a sum over windows again. The derivative of a maximum or minimum goes to
one element of the window, at a tie to the first, as in JAX (`select_and_gather_add` in forward
mode, `select_and_scatter_add` in reverse mode). For a generic `reduce_window` whose reducer is
associative and commutative, xform differentiates an equivalent program: it combines the elements
of all windows one after the other, axis by axis. This works in reverse mode too, where JAX has no
rule.

A window may be dilated, that is, have holes between its elements. So may the operand. A function
such as `_sum_transpose(ct, x, ...)` returns the cotangent of the input from that of the output.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from xform._jax import JaxprEqn, jax_primitives
from xform._jax.symbolic import is_symbolic, larger
from xform.errors import UnsupportedParam
from xform.interpret import cost
from xform.interpret.pullback import pullback
from xform.program.arrays import zeros
from xform.program.dimensions import product, shape
from xform.program.ir import program, trace
from xform.registry.dependence import (
    AxisLink,
    Links,
    axis_by_axis,
    index_rows,
    nonzero_rows,
    window_indices,
)
from xform.registry.ends import Ends
from xform.registry.table import declare
from xform.registry.traits import Traits
from xform.registry.words import composite, linear
from xform.rules.reduce import Combine, elementwise, jvp_of_definition
from xform.rules.reducers import Reduction
from xform.rules.unpool import gather, lowered, unpool, unpool_p, worst_value

Sizes = Sequence[int]


def _flops(eqn: JaxprEqn) -> int:
    """Return the FLOPs of combining all elements of each window."""
    combine = cost.flops(program(eqn.params["jaxpr"])) if "jaxpr" in eqn.params else 1
    windows = min(cost.operand_size(eqn), cost.size(eqn.outvars[0]))
    return windows * product(eqn.params["window_dimensions"]) * combine


def _dependence(eqn: JaxprEqn) -> list[list[Links]]:
    """Return the dependence: an output depends on the elements in its window.

    All outputs depend on an initial value, which is a scalar.
    """
    p, ys = eqn.params, shape(eqn.outvars[0])
    ones = (1,) * len(ys)
    links: list[list[Links]] = []
    for xs in map(shape, eqn.invars):
        if len(xs) != len(ys):
            links.append([(None,) * len(ys)])
            continue
        sizes = zip(xs, ys, p["window_dimensions"], p["window_strides"], p["padding"],
                    p.get("base_dilation", ones), p.get("window_dilation", ones),
                    strict=True)  # fmt: skip
        windows = [window_indices(n, m, size, stride, low, base, spread)
                   for n, m, size, stride, (low, _), base, spread in sizes]  # fmt: skip
        links.append([tuple(AxisLink(i, index_rows(w)) for i, w in enumerate(windows))])
    return links


def _ends(eqn: JaxprEqn) -> list[Ends]:
    """An axis stays if its window has size 1, and no stride, dilation or padding."""
    p, ndim = eqn.params, len(eqn.params["window_dimensions"])
    names = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    sizes = [p.get(name) or (1,) * ndim for name in names]
    pads = [(low, high) for low, high in p["padding"]]
    stays = [n == (1, 1, 1, 1) and pad == (0, 0)
             for n, pad in zip(zip(*sizes, strict=True), pads, strict=True)]  # fmt: skip
    return [tuple(i if stays[i] else None for i in range(ndim)) if len(s) == ndim else ()
            for s in map(shape, eqn.invars)]  # fmt: skip


WINDOW = Traits(flops=_flops, dependence=axis_by_axis(_dependence), ends=_ends)
_POOL = dataclasses.replace(WINDOW, pools=True)


def _extent(size: int, dilation: int) -> int:
    """Return the length of an axis with `dilation - 1` holes between its elements."""
    return larger(0, (size - 1) * dilation + 1)


def fold_windows(combine: Combine, xs: list[Any], inits: Sequence[Any], window_dimensions: Sizes,
                 window_strides: Sizes, padding: Any, base_dilation: Sizes,
                 window_dilation: Sizes) -> list[Any]:  # fmt: skip
    """Reduce windows of `xs` with `combine`, as XLA does, in `sum(window_dimensions)` steps.

    `inits` are the initial values. Each is combined once into each window. Padding and holes are
    never combined, so the initial value need not be neutral.
    """
    not_empty: dict[int, np.ndarray] = {}  # for each axis, which windows have an element
    for axis, size in enumerate(window_dimensions):
        low, high = padding[axis]
        if size == window_strides[axis] == base_dilation[axis] == 1 and not (low or high):
            continue  # each window has one element
        if any(map(is_symbolic, (xs[0].shape[axis], low, high))):
            raise UnsupportedParam(
                "derivative of reduce_window with a function of your own",
                f"its windows move along an axis of symbolic length {xs[0].shape[axis]}",
                "",
                "use lax.max, lax.min or lax.add as the function, or export known sizes",
            )
        extent = _extent(xs[0].shape[axis], base_dilation[axis])
        last_start = low + extent + high - _extent(size, window_dilation[axis])
        starts = np.arange(max(0, last_start // window_strides[axis] + 1)) * window_strides[axis]
        position = starts + np.arange(size)[:, None] * window_dilation[axis] - low
        exists = (position >= 0) & (position < extent) & (position % base_dilation[axis] == 0)
        not_empty[axis] = exists.any(0)
        xs = _fold_axis(combine, xs, position // base_dilation[axis], exists, axis)
    ys = combine([lax.broadcast(c, x.shape) for c, x in zip(inits, xs, strict=True)], xs)
    for axis, full in not_empty.items():
        if not full.all():
            shape = list(ys[0].shape)
            shape[axis] = np.sum(~full)
            ys = _merge([([lax.broadcast(c, shape) for c in inits], ~full), (ys, full)], axis)
    return ys


# A *row* is the part of an array at one index of an axis.


def _fold_axis(combine: Combine, xs: list[Any], index: np.ndarray, exists: np.ndarray, axis: int):
    """Combine rows of `xs` for each window: its element `i` is row `index[i, window]`.

    An element counts only if `exists[i, window]` is True. Returns one row for each window that has
    an element.
    """
    started, total = exists[0], _rows(xs, index[0][exists[0]], axis)
    for rows, on in zip(index[1:], exists[1:], strict=True):
        row_of = np.cumsum(started) - 1  # the row of each window in the total
        both, old, new = started & on, started & ~on, on & ~started
        combined = combine(_rows(total, row_of[both], axis), _rows(xs, rows[both], axis))
        parts = [
            (combined, both),
            (_rows(total, row_of[old], axis), old),
            (_rows(xs, rows[new], axis), new),
        ]
        started = started | on
        total = _merge(
            [(part, mask[started]) for part, mask in parts if mask.any()] or parts[:1], axis
        )
    return total


def _rows(xs: list[Any], index: np.ndarray, axis: int) -> list[Any]:
    """Return the rows of each array at the indices; by a slice, if they are equally spaced."""
    steps = np.diff(index)
    if len(index) and len(index) == xs[0].shape[axis] and np.all(steps == 1):
        return xs
    if not len(index) or (np.all(steps == steps[:1]) and np.all(steps > 0)):
        start, step = (int(index[0]), int([*steps, 1][0])) if len(index) else (0, 1)
        stop = int(index[-1]) + 1 if len(index) else 0
        return [lax.slice_in_dim(x, start, stop, step, axis) for x in xs]
    return [_gather_rows(x, index, axis) for x in xs]


def _gather_rows(x: Any, index: np.ndarray, axis: int) -> Any:
    """Return the rows of an array at any indices.

    `jnp.take` is not used, because it makes a call, and rules transpose this function.
    """
    others = tuple(a for a in range(x.ndim) if a != axis)
    numbers = lax.GatherDimensionNumbers(others, (axis,), (axis,))
    sizes = tuple(1 if a == axis else n for a, n in enumerate(x.shape))
    indices = index[:, None].astype(np.int32)
    return lax.gather(x, indices, numbers, sizes, mode="promise_in_bounds")


def _merge(parts: Sequence[tuple[list[Any], np.ndarray]], axis: int) -> list[Any]:
    """Merge rows along an axis. Each part has arrays, and a mask that says where its rows go."""
    if len(parts) == 1:
        return parts[0][0]
    order = np.argsort(np.concatenate([np.flatnonzero(mask) for _, mask in parts]))
    joined = [lax.concatenate(xs, axis) for xs in zip(*(xs for xs, _ in parts), strict=True)]
    return _rows(joined, order, axis)


def _reduce_window(*operands: Any, jaxpr: Any, consts: Sequence[Any], window_dimensions: Sizes,
                   window_strides: Sizes, padding: Any, base_dilation: Sizes,
                   window_dilation: Sizes):  # fmt: skip
    n = len(operands) // 2
    return fold_windows(elementwise(jaxpr), list(operands[:n]), operands[n:], window_dimensions,
                        window_strides, padding, base_dilation, window_dilation)  # fmt: skip


def _reduce_window_by(reducer: Combine, operands: list[Any], inits: list[Any], *,
                      window_dimensions: Sizes, window_strides: Sizes, padding: Any,
                      base_dilation: Sizes, window_dilation: Sizes):  # fmt: skip
    """Reduce windows by another reducer, in XLA's order."""
    return lax.reduce_window(operands, inits, reducer, window_dimensions, window_strides, padding,
                             base_dilation, window_dilation)  # fmt: skip


_FORMULAS = jvp_of_definition(_reduce_window), _reduce_window_by
declare(Reduction, "reduce_window", "structured", _FORMULAS, WINDOW)


def _sum_transpose(ct: Any, x: Any, *, window_dimensions: Sizes, window_strides: Sizes,
                   padding: Any, base_dilation: Sizes, window_dilation: Sizes):  # fmt: skip
    # The cotangent of an element of x is the sum of `ct` over the windows that contain the element.
    # It is a sum over sliding windows of `ct`, with holes for the strides.
    config = []
    for i, (low, _) in enumerate(padding):
        before = _extent(window_dimensions[i], window_dilation[i]) - 1 - low
        length = _extent(ct.shape[i], window_strides[i])
        after = _extent(x.shape[i], base_dilation[i]) + low - length
        config.append((before, after, window_strides[i] - 1))
    ones = (1,) * ct.ndim
    return jax_primitives.reduce_window_sum_p.bind(
        lax.pad(ct, np.zeros((), ct.dtype), config),
        window_dimensions=window_dimensions,
        window_strides=base_dilation,
        padding=((0, 0),) * ct.ndim,
        base_dilation=ones,
        window_dilation=window_dilation,
    )


linear("reduce_window_sum", _sum_transpose, traits=_POOL)


def _window_extremum(name: str, select_prim: Any):
    """Return the jvp of `reduce_window_max` or `reduce_window_min`."""

    def push(xs: Any, dxs: Any, *, window_dimensions: Sizes, window_strides: Sizes, padding: Any,
             base_dilation: Sizes, window_dilation: Sizes):  # fmt: skip
        (x,), (dx,) = xs, dxs
        windows = {
            "window_dimensions": window_dimensions,
            "window_strides": window_strides,
            "padding": padding,
            "base_dilation": base_dilation,
            "window_dilation": window_dilation,
        }
        y = getattr(jax_primitives, name + "_p").bind(x, **windows)
        if dx is None:
            return [y], [None]
        return [y], [gather(dx, x, select_prim=select_prim, **windows)]

    return push


composite("reduce_window_max", _window_extremum("reduce_window_max", lax.ge_p), traits=_POOL)
composite("reduce_window_min", _window_extremum("reduce_window_min", lax.le_p), traits=_POOL)


# `select_and_gather_add` takes from each window of `t` the element at which `x` is largest
# (smallest). `select_and_scatter_add`, its transpose, adds a value to that element for each window.
# `unpool` is xform's primitive that does the same in less memory.


def _gather_transpose(ct: Any, t: Any, x: Any, *, select_prim: Any, window_dimensions: Sizes,
                      window_strides: Sizes, padding: Any, base_dilation: Sizes,
                      window_dilation: Sizes):  # fmt: skip
    worst = worst_value(select_prim, x.dtype)
    if any(d != 1 for d in window_dilation):  # XLA's scatter has no dilated windows

        def combine(a: list[Any], b: list[Any]) -> list[Any]:
            a_is_better = select_prim.bind(a[0], b[0])
            return [lax.select(a_is_better, u, v) for u, v in zip(a, b, strict=True)]

        def select_and_gather(t: Any) -> list[Any]:
            inits = [worst, np.zeros((), t.dtype)]
            return fold_windows(combine, [x, t], inits, window_dimensions, window_strides, padding,
                                base_dilation, window_dilation)[1:]  # fmt: skip

        # The function is linear, so its pullback is the same at any point.
        point = zeros(jax.typeof(t))
        prog = trace(select_and_gather, point)
        return pullback(prog, (True,), (True,), [point], linear=True)[1]([ct])[0]
    holes = tuple((0, 0, d - 1) for d in base_dilation)
    dilated = any(d != 1 for d in base_dilation)
    out = unpool(
        ct,
        lax.pad(x, worst, holes) if dilated else x,
        select_prim=select_prim,
        window_dimensions=window_dimensions,
        window_strides=window_strides,
        padding=padding,
    )
    return lax.slice(out, (0,) * out.ndim, out.shape, base_dilation) if dilated else out


def _scatter_transpose(ct: Any, source: Any, x: Any, *, select_prim: Any, window_dimensions: Sizes,
                       window_strides: Sizes, padding: Any):  # fmt: skip
    return gather(ct, x, select_prim=select_prim, window_dimensions=window_dimensions,
                  window_strides=window_strides, padding=padding)  # fmt: skip


linear("select_and_gather_add", _gather_transpose, argnums=(0,), traits=WINDOW)


def _scatter_dependence(eqn: JaxprEqn) -> list[list[Links]]:
    """Return the dependence of a scatter: an element may get the value of each of its windows."""
    p, (source, xs) = eqn.params, map(shape, eqn.invars)
    sizes = zip(xs, source, p["window_dimensions"], p["window_strides"], p["padding"], strict=True)
    links: list[AxisLink] = []
    for i, (n, m, size, stride, (low, _)) in enumerate(sizes):
        elements = window_indices(n, m, size, stride, low)
        windows = np.broadcast_to(np.arange(m)[:, None], elements.shape)
        contains = np.zeros((n, m), bool)
        contains[elements[elements >= 0], windows[elements >= 0]] = True
        links.append(AxisLink(i, nonzero_rows(contains)))
    return [[tuple(links)], []]


_SCATTER = dataclasses.replace(WINDOW, dependence=axis_by_axis(_scatter_dependence))
_UNPOOL = dataclasses.replace(_SCATTER, lowered=lowered)
linear("select_and_scatter_add", _scatter_transpose, argnums=(0,), traits=_SCATTER)
linear(unpool_p, _scatter_transpose, argnums=(0,), traits=_UNPOOL)
