"""Reductions over sliding windows, and the selections that transpose them.

At a tie `reduce_window_max` and `reduce_window_min` follow the first location of the window, as JAX
does. A generic `reduce_window` is differentiated as the fold of its reducer over the places of the
window, axis by axis: in reverse mode too, where JAX has no rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from xform import cost
from xform._jax import JaxprEqn, jax_primitives
from xform.interpret.pullback import pullback
from xform.ir import evaluate, program, trace
from xform.rules.reduce import defined_by
from xform.table import composite, linear
from xform.traits import Traits

Sizes = Sequence[int]


def _flops(eqn: JaxprEqn) -> int:
    inside = cost.flops(program(eqn.params["jaxpr"])) if "jaxpr" in eqn.params else 1
    elements = min(cost.operand_size(eqn), cost.size(eqn.outvars[0]))
    return elements * math.prod(eqn.params["window_dimensions"]) * inside


WINDOW = Traits(flops=_flops)


def _extent(size: int, dilation: int) -> int:
    """The length of an axis with `dilation - 1` holes between its elements."""
    return max(0, (size - 1) * dilation + 1)


def fold_windows(combine: Callable[[list[Any], list[Any]], list[Any]], xs: list[Any],
                 inits: Sequence[Any], window_dimensions: Sizes, window_strides: Sizes,
                 padding: Any, base_dilation: Sizes, window_dilation: Sizes):  # fmt: skip
    """Windows of `xs` reduced with `combine`, by slices: `sum(window_dimensions)` of them."""
    config = [(lo, hi, d - 1) for (lo, hi), d in zip(padding, base_dilation, strict=True)]
    xs = [lax.pad(x, init, config) for x, init in zip(xs, inits, strict=True)]
    for axis, size in enumerate(window_dimensions):
        stride, dilation = window_strides[axis], window_dilation[axis]
        reach = xs[0].shape[axis] - _extent(size, dilation) + 1
        places = [
            [lax.slice_in_dim(x, i * dilation, i * dilation + max(0, reach), stride, axis)
             for x in xs]
            for i in range(size)
        ]  # fmt: skip
        xs = places[0]
        for place in places[1:]:
            xs = combine(xs, place)
    return xs


def _reduce_window(*operands: Any, jaxpr: Any, consts: Sequence[Any], window_dimensions: Sizes,
                   window_strides: Sizes, padding: Any, base_dilation: Sizes,
                   window_dilation: Sizes):  # fmt: skip
    n = len(operands) // 2
    inits = list(operands[n:])

    def combine(a: list[Any], b: list[Any]) -> list[Any]:
        reducer = lambda *ab: evaluate(program(jaxpr), ab)
        for _ in range(a[0].ndim):
            reducer = jax.vmap(reducer)
        return reducer(*a, *b)

    ys = fold_windows(combine, list(operands[:n]), inits, window_dimensions, window_strides,
                      padding, base_dilation, window_dilation)  # fmt: skip
    return combine([lax.broadcast(c, ys[0].shape) for c in inits], ys)


composite("reduce_window", defined_by(_reduce_window), WINDOW)


def _sum_transpose(ct: Any, x: Any, *, window_dimensions: Sizes, window_strides: Sizes,
                   padding: Any, base_dilation: Sizes, window_dilation: Sizes):  # fmt: skip
    # Sums of the cotangent with holes, over the windows that hold a given element of x.
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


linear("reduce_window_sum", _sum_transpose, traits=WINDOW)


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
        gather_p = jax_primitives.select_and_gather_add_p
        return [y], [gather_p.bind(dx, x, select_prim=select_prim, **windows)]

    return push


composite("reduce_window_max", _window_extremum("reduce_window_max", lax.ge_p), WINDOW)
composite("reduce_window_min", _window_extremum("reduce_window_min", lax.le_p), WINDOW)


# select_and_gather_add takes from each window the element of `t` where `x` is largest (smallest);
# select_and_scatter_add adds it there.


def _gather_transpose(ct: Any, t: Any, x: Any, *, select_prim: Any, window_dimensions: Sizes,
                      window_strides: Sizes, padding: Any, base_dilation: Sizes,
                      window_dilation: Sizes):  # fmt: skip
    worst = np.asarray(-np.inf if select_prim is lax.ge_p else np.inf, x.dtype)
    if any(d != 1 for d in window_dilation):  # XLA's scatter knows no dilated windows

        def combine(a: list[Any], b: list[Any]) -> list[Any]:
            first = select_prim.bind(a[0], b[0])
            return [lax.select(first, u, v) for u, v in zip(a, b, strict=True)]

        def gather(t: Any) -> list[Any]:
            inits = [worst, np.zeros((), t.dtype)]
            return fold_windows(combine, [x, t], inits, window_dimensions, window_strides, padding,
                                base_dilation, window_dilation)[1:]  # fmt: skip

        return pullback(trace(gather, t), (True,), (True,), [t])[1]([ct])[0]
    holes = tuple((0, 0, d - 1) for d in base_dilation)
    dilated = any(d != 1 for d in base_dilation)
    out = jax_primitives.select_and_scatter_add_p.bind(
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
    ones = (1,) * ct.ndim
    return jax_primitives.select_and_gather_add_p.bind(
        ct,
        x,
        select_prim=select_prim,
        window_dimensions=window_dimensions,
        window_strides=window_strides,
        padding=padding,
        base_dilation=ones,
        window_dilation=ones,
    )


linear("select_and_gather_add", _gather_transpose, over=(0,), traits=WINDOW)
linear("select_and_scatter_add", _scatter_transpose, over=(0,), traits=WINDOW)
