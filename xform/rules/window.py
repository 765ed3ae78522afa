"""Reductions over sliding windows, and the selections that transpose them.

At a tie, `reduce_window_max` and `reduce_window_min` choose the first element of the window, as JAX
does. The derivative of a generic `reduce_window` is that of a fold of its reducer over the places
of the window, axis by axis. This works in reverse mode too, where JAX has no rule.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from xform._jax import JaxprEqn, jax_primitives, zeros
from xform.interpret import cost
from xform.interpret.cost import shape
from xform.interpret.pullback import pullback
from xform.program.ir import program, trace
from xform.registry.dependence import (
    AxisLink,
    Links,
    axis_by_axis,
    index_rows,
    nonzero_rows,
    window_indices,
)
from xform.registry.traits import Traits
from xform.registry.words import composite, linear
from xform.rules.reduce import Combine, elementwise, jvp_of_definition
from xform.rules.unpool import gather, lowered, unpool, unpool_p

Sizes = Sequence[int]


def _flops(eqn: JaxprEqn) -> int:
    """Return the FLOPs of combining all elements of each window."""
    inside = cost.flops(program(eqn.params["jaxpr"])) if "jaxpr" in eqn.params else 1
    elements = min(cost.operand_size(eqn), cost.size(eqn.outvars[0]))
    return elements * math.prod(eqn.params["window_dimensions"]) * inside


def _dependence(eqn: JaxprEqn) -> list[list[Links]]:
    """Link an output to the elements in its windows; all outputs read an initial value."""
    p, ys = eqn.params, shape(eqn.outvars[0])
    ones = (1,) * len(ys)
    ways: list[list[Links]] = []
    for xs in map(shape, eqn.invars):
        if len(xs) != len(ys):
            ways.append([(None,) * len(ys)])
            continue
        sizes = zip(xs, ys, p["window_dimensions"], p["window_strides"], p["padding"],
                    p.get("base_dilation", ones), p.get("window_dilation", ones),
                    strict=True)  # fmt: skip
        windows = [window_indices(n, m, size, stride, low, base, spread)
                   for n, m, size, stride, (low, _), base, spread in sizes]  # fmt: skip
        ways.append([tuple(AxisLink(i, index_rows(at)) for i, at in enumerate(windows))])
    return ways


WINDOW = Traits(flops=_flops, dependence=axis_by_axis(_dependence))
_POOL = dataclasses.replace(WINDOW, pools=True)


def _extent(size: int, dilation: int) -> int:
    """Return the length of an axis with `dilation - 1` holes between its elements."""
    return max(0, (size - 1) * dilation + 1)


def fold_windows(combine: Combine, xs: list[Any], inits: Sequence[Any], window_dimensions: Sizes,
                 window_strides: Sizes, padding: Any, base_dilation: Sizes,
                 window_dilation: Sizes) -> list[Any]:  # fmt: skip
    """Reduce windows of `xs` with `combine`, as XLA does, in `sum(window_dimensions)` steps.

    The initial value is combined once into each window. Padding and holes are never combined. So
    the initial value need not be neutral.
    """
    filled: list[np.ndarray] = []
    for axis, size in enumerate(window_dimensions):
        low, high = padding[axis]
        extent = _extent(xs[0].shape[axis], base_dilation[axis])
        reach = low + extent + high - _extent(size, window_dilation[axis])
        windows = np.arange(max(0, reach // window_strides[axis] + 1)) * window_strides[axis]
        at = windows + np.arange(size)[:, None] * window_dilation[axis] - low
        there = (at >= 0) & (at < extent) & (at % base_dilation[axis] == 0)
        filled.append(there.any(0))
        xs = _fold(combine, xs, at // base_dilation[axis], there, axis)
    ys = combine([lax.broadcast(c, x.shape) for c, x in zip(inits, xs, strict=True)], xs)
    for axis, full in enumerate(filled):
        if not full.all():
            shape = list(ys[0].shape)
            shape[axis] = np.sum(~full)
            ys = _merged([([lax.broadcast(c, shape) for c in inits], ~full), (ys, full)], axis)
    return ys


def _fold(combine: Combine, xs: list[Any], at: np.ndarray, there: np.ndarray, axis: int):
    """Combine rows of `xs`: element i of window n is row `at[i, n]`, if `there` is True.

    Return one row for each window that has an element.
    """
    full, total = there[0], _rows(xs, at[0][there[0]], axis)
    for places, on in zip(at[1:], there[1:], strict=True):
        of = np.cumsum(full) - 1  # the row of each window in the total
        both, old, new = full & on, full & ~on, on & ~full
        combined = combine(_rows(total, of[both], axis), _rows(xs, places[both], axis))
        parts = [
            (combined, both),
            (_rows(total, of[old], axis), old),
            (_rows(xs, places[new], axis), new),
        ]
        full = full | on
        total = _merged(
            [(rows, mask[full]) for rows, mask in parts if mask.any()] or parts[:1], axis
        )
    return total


def _rows(xs: list[Any], at: np.ndarray, axis: int) -> list[Any]:
    """Return some rows along an axis."""
    steps = np.diff(at)
    if len(at) and len(at) == xs[0].shape[axis] and np.all(steps == 1):
        return xs
    if not len(at) or (np.all(steps == steps[:1]) and np.all(steps > 0)):
        start, step = (int(at[0]), int([*steps, 1][0])) if len(at) else (0, 1)
        stop = int(at[-1]) + 1 if len(at) else 0
        return [lax.slice_in_dim(x, start, stop, step, axis) for x in xs]
    return [_taken(x, at, axis) for x in xs]


def _taken(x: Any, at: np.ndarray, axis: int) -> Any:
    """Return rows at any places, not by `jnp.take`, a call: a rule may pull this back."""
    others = tuple(a for a in range(x.ndim) if a != axis)
    numbers = lax.GatherDimensionNumbers(others, (axis,), (axis,))
    sizes = tuple(1 if a == axis else n for a, n in enumerate(x.shape))
    places = at[:, None].astype(np.int32)
    return lax.gather(x, places, numbers, sizes, mode="promise_in_bounds")


def _merged(parts: Sequence[tuple[list[Any], np.ndarray]], axis: int) -> list[Any]:
    """Merge rows along an axis: each part's mask says where its rows go."""
    if len(parts) == 1:
        return parts[0][0]
    order = np.argsort(np.concatenate([np.flatnonzero(mask) for _, mask in parts]))
    together = [lax.concatenate(xs, axis) for xs in zip(*(xs for xs, _ in parts), strict=True)]
    return _rows(together, order, axis)


def _reduce_window(*operands: Any, jaxpr: Any, consts: Sequence[Any], window_dimensions: Sizes,
                   window_strides: Sizes, padding: Any, base_dilation: Sizes,
                   window_dilation: Sizes):  # fmt: skip
    n = len(operands) // 2
    return fold_windows(elementwise(jaxpr), list(operands[:n]), operands[n:], window_dimensions,
                        window_strides, padding, base_dilation, window_dilation)  # fmt: skip


composite("reduce_window", jvp_of_definition(_reduce_window), WINDOW)


def _sum_transpose(ct: Any, x: Any, *, window_dimensions: Sizes, window_strides: Sizes,
                   padding: Any, base_dilation: Sizes, window_dilation: Sizes):  # fmt: skip
    # Sums of the cotangent with holes, over the windows that contain a given element of x.
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


composite("reduce_window_max", _window_extremum("reduce_window_max", lax.ge_p), _POOL)
composite("reduce_window_min", _window_extremum("reduce_window_min", lax.le_p), _POOL)


# select_and_gather_add takes the element of `t` from each window where `x` is largest (smallest).
# select_and_scatter_add and `unpool` add to that element.


def _gather_transpose(ct: Any, t: Any, x: Any, *, select_prim: Any, window_dimensions: Sizes,
                      window_strides: Sizes, padding: Any, base_dilation: Sizes,
                      window_dilation: Sizes):  # fmt: skip
    worst = np.asarray(-np.inf if select_prim is lax.ge_p else np.inf, x.dtype)
    if any(d != 1 for d in window_dilation):  # XLA's scatter has no dilated windows

        def combine(a: list[Any], b: list[Any]) -> list[Any]:
            first = select_prim.bind(a[0], b[0])
            return [lax.select(first, u, v) for u, v in zip(a, b, strict=True)]

        def gathered(t: Any) -> list[Any]:
            inits = [worst, np.zeros((), t.dtype)]
            return fold_windows(combine, [x, t], inits, window_dimensions, window_strides, padding,
                                base_dilation, window_dilation)[1:]  # fmt: skip

        # It is linear, so the point of the pullback does not matter, and `t` may be only a type.
        at = zeros(jax.typeof(t))
        return pullback(trace(gathered, at), (True,), (True,), [at], linear=True)[1]([ct])[0]
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


linear("select_and_gather_add", _gather_transpose, over=(0,), traits=WINDOW)


def _dependence_back(eqn: JaxprEqn) -> list[list[Links]]:
    """Link each element of the source to the elements of its window, any of which may get it."""
    p, (source, xs) = eqn.params, map(shape, eqn.invars)
    sizes = zip(xs, source, p["window_dimensions"], p["window_strides"], p["padding"], strict=True)
    links: list[AxisLink] = []
    for i, (n, m, size, stride, (low, _)) in enumerate(sizes):
        at = window_indices(n, m, size, stride, low)
        seen = np.zeros((n, m), bool)
        windows = np.broadcast_to(np.arange(m)[:, None], at.shape)
        seen[at[at >= 0], windows[at >= 0]] = True
        links.append(AxisLink(i, nonzero_rows(seen)))
    return [[tuple(links)], []]


_BACK = dataclasses.replace(WINDOW, dependence=axis_by_axis(_dependence_back))
linear("select_and_scatter_add", _scatter_transpose, over=(0,), traits=_BACK)
linear(unpool_p, _scatter_transpose, over=(0,), traits=dataclasses.replace(_BACK, lowered=lowered))
