"""Replacements for functions that JAX differentiates wrongly: reductions as loops in Python.

JAX's own derivatives of `reduce` and generic `reduce_window` ignore the initial value. Its
derivatives of `ldexp` and `frexp` are zero in forward over reverse mode through a scan.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xform._jax import match_weak_type


def ldexp(x: Any, n: Any) -> Any:
    """`jnp.ldexp`."""
    made = x * 2.0 ** jnp.asarray(n, jnp.result_type(x))
    return match_weak_type(made, jax.eval_shape(lambda: jnp.ldexp(x, n)))


def frexp(x: Any) -> Any:
    """`jnp.frexp`."""
    n = jnp.frexp(lax.stop_gradient(x))[1]
    return match_weak_type(ldexp(x, -n), jax.eval_shape(lambda: jnp.frexp(x)[0])), n


def reduce(x: Any, start: Any, f: Callable[..., Any], dimensions: Sequence[int]) -> Any:
    """`lax.reduce`, also of several operands if `x` is a tuple."""
    types = jax.eval_shape(lambda: lax.reduce(x, start, f, dimensions))
    return jax.tree.map(match_weak_type, _reduced(x, start, f, dimensions), types)


def _reduced(x: Any, start: Any, f: Callable[..., Any], dimensions: Sequence[int]) -> Any:
    if isinstance(x, tuple):
        xs = [_in_front(y, dimensions) for y in x]
        first = tuple(jnp.full(y.shape[1:], s, y.dtype) for y, s in zip(xs, start, strict=True))
        return functools.reduce(f, zip(*xs, strict=True), first)
    rows = _in_front(x, dimensions)
    return functools.reduce(f, rows, jnp.full(rows.shape[1:], start, rows.dtype))


def _in_front(x: Any, dimensions: Sequence[int]) -> Any:
    x = jnp.asarray(x)
    x = jnp.moveaxis(x, dimensions, range(len(dimensions)))
    return x.reshape(-1, *x.shape[len(dimensions) :])


def reduce_window(x: Any, start: Any, f: Callable[..., Any], sizes: Any, strides: Any, padding: Any,
                  base: Any = None, window: Any = None) -> Any:  # fmt: skip
    """`lax.reduce_window`, which ignores elements outside or in a hole."""
    options = sizes, strides, padding, base, window
    type_ = jax.eval_shape(lambda: lax.reduce_window(x, start, f, *options))
    x = jnp.asarray(x)
    base, window = base or (1,) * x.ndim, window or (1,) * x.ndim
    wide = tuple((n - 1) * d + 1 for n, d in zip(x.shape, base, strict=True))
    spread = tuple((n - 1) * d + 1 for n, d in zip(sizes, window, strict=True))
    if isinstance(padding, str):
        padding = lax.padtype_to_pads(wide, spread, strides, padding)
    steps = [
        range((n + low + high - m) // s + 1)
        for n, m, s, (low, high) in zip(wide, spread, strides, padding, strict=True)
    ]
    out = []
    for corner in itertools.product(*steps):
        total = jnp.asarray(start, x.dtype)
        for offset in np.ndindex(*sizes):
            place = [
                c * s + o * w - low
                for c, s, o, w, (low, _) in zip(
                    corner, strides, offset, window, padding, strict=True
                )
            ]
            inside = all(
                p % b == 0 and 0 <= p < n for p, b, n in zip(place, base, wide, strict=True)
            )
            if inside:
                total = f(total, x[tuple(p // b for p, b in zip(place, base, strict=True))])
        out.append(total)
    return match_weak_type(jnp.stack(out).reshape(tuple(map(len, steps))), type_)
