"""Slopes of elementwise functions that are written with a derivative of their own.

Differentiating a formula gives a sum of terms that may cancel, such as (1 - x) - (1 + x), or
overflow although the sum does not. So the functions here state their derivative. It calls functions
of this file again, so derivatives of all orders are accurate.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xform._jax.one_minus_square import one_minus_square_p
from xform.program.arithmetic import Value, add, as_jax_value, constant_like, scale

C = constant_like  # C(x, c): the scalar c in the dtype of x
Partial = Callable[..., Any]


def real_valued(x: Value) -> bool:
    """Return whether the dtype of `x` is not complex."""
    return not jnp.issubdtype(x.dtype, np.complexfloating)


def derivative(*partials: Partial | None) -> Callable[[Callable[..., Value]], Any]:
    """Return a decorator that gives a function of arrays the partial derivatives `di(y, *x)`.

    `di` is the derivative in argument i, in the form that `pointwise` takes: a tuple is a product.
    None: this argument is a function of another one, whose derivative includes its own.
    """

    def decorate(f: Callable[..., Value]) -> Any:
        slope = jax.custom_jvp(f)

        @slope.defjvp
        def _(primals: Any, tangents: Any) -> tuple[Value, Value]:
            xs, dxs = [list(map(as_jax_value, values)) for values in (primals, tangents)]
            y = slope(*xs)
            pairs = zip(partials, dxs, strict=True)
            return y, add([scale(dx, d(y, *xs)) for d, dx in pairs if d is not None])

        return slope

    return decorate


def in_32_bits(f: Callable[..., Value]) -> Callable[..., Value]:
    """Return a function that computes `f` in float32 if real arguments have fewer than 32 bits."""

    @functools.wraps(f)
    def wide(*xs: Value) -> Value:
        dtype = xs[0].dtype
        if not real_valued(xs[0]) or jnp.finfo(dtype).bits >= 32:
            return f(*xs)
        y = f(*(lax.convert_element_type(x, np.float32) for x in xs))
        return lax.convert_element_type(y, dtype)

    return wide


def one_minus_square(x: Value) -> Value:
    """Return 1 - x², with all digits as |x| goes to 1."""
    return one_minus_square_p.bind(x)


@derivative(
    lambda y, x: lax.div(lax.div(lax.mul(C(x, 2), x), one_minus_square(x)), one_minus_square(x))
)
def over_one_minus_square(x: Value) -> Value:
    """Return 1 / (1 - x²), the slope of atanh."""
    return lax.div(C(x, 1), one_minus_square(x))


def logistic_slope(accuracy: Any) -> Callable[[Value, Value], Value]:
    """Return the slope y (1 - y) of the logistic function, as a function of its value y and of x.

    1 - y, which is logistic(-x), would lose all digits as y goes to 1. The second derivative
    contains 1 - 2 y, which is -tanh(x / 2).
    """

    @derivative(None, lambda slope, y, x: (slope, lax.neg(lax.tanh(lax.mul(C(x, 0.5), x)))))
    def slope(y: Value, x: Value) -> Value:
        return lax.mul(y, lax.logistic(lax.neg(x), accuracy=accuracy))

    return slope


def tanh_slope(x: Value, accuracy: Any) -> Value:
    """Return the slope of tanh, 4 times the slope of the logistic function at 2 x."""
    twice = lax.mul(C(x, 2), x)
    logistic = lax.logistic(twice, accuracy=accuracy)
    return lax.mul(C(x, 4), logistic_slope(accuracy)(logistic, twice))


def power(c: float, n: int) -> Callable[[Value], Value]:
    """Return the function c x^n, n >= 0. No power underflows on the way if the result does not."""

    @derivative(lambda y, x: power(c * n, n - 1)(x) if n else C(x, 0))
    def term(x: Value) -> Value:
        if n == 0:
            return lax.full_like(x, c)
        return lax.mul(lax.mul(C(x, c), x), lax.integer_pow(x, n - 1))

    return term


# Inverse hyperbolic functions: slopes of the form 1 / sqrt(quadratic).


@in_32_bits
def _acosh_curvature(x: Value) -> Value:
    """Return the derivative of `acosh_slope`: -inf at 1, where x² - 1 is +0."""
    square_minus_one = lax.mul(lax.sub(x, C(x, 1)), lax.add(x, C(x, 1)))
    return lax.div(lax.mul(lax.neg(x), acosh_slope(x)), square_minus_one)


@derivative(lambda y, x: _acosh_curvature(x))
def acosh_slope(x: Value) -> Value:
    """Return 1 / (sqrt(x + 1) sqrt(x - 1)).

    There are two roots, because for complex x 1 / sqrt(x² - 1) lies on another branch. For real x
    below -1, where acosh is NaN, the result is 1 / sqrt(x² - 1), as in JAX.
    """
    x = lax.abs(x) if real_valued(x) else x
    return lax.mul(lax.rsqrt(lax.add(x, C(x, 1))), lax.rsqrt(lax.sub(x, C(x, 1))))


def _over_root(x: Value) -> tuple[Value, Value]:
    """Return 1 and `x`, each over sqrt(1 + x²), also if the square of a real `x` overflows.

    For a large `x` the root is computed as |x| sqrt(1 + 1 / x²).
    """
    root = lambda x: lax.rsqrt(lax.add(C(x, 1), lax.square(x)))
    if not real_valued(x):
        return root(x), lax.mul(x, root(x))
    large = lax.gt(lax.abs(x), C(x, 1))
    size = lax.select(large, lax.abs(x), lax.full_like(x, 1))
    over_root = root(lax.select(large, lax.div(C(x, 1), size), x))
    return lax.div(over_root, size), lax.mul(lax.select(large, lax.sign(x), x), over_root)


@derivative(lambda y, x: lax.mul(lax.neg(_over_root(x)[1]), lax.square(y)))
def asinh_slope(x: Value) -> Value:
    """Return 1 / sqrt(1 + x²)."""
    return _over_root(x)[0]


@derivative(lambda y, x: (lax.integer_pow(x, -1), lax.neg(y)))
def log2_slope(x: Value) -> Value:
    """Return y = 1 / (x log 2). Its derivative is written as -y x^-1.

    XLA rewrites y / x as (1 / log 2) / x², and x² may over- or underflow.
    """
    return lax.div(C(x, 1 / math.log(2)), x)


@derivative(None, lambda slope, y, x: lax.div(lax.mul(C(x, -2 / 3), slope), x))
def cbrt_slope(y: Value, x: Value) -> Value:
    """Return y / (3 x), the slope of the cube root y of x; infinity at 0."""
    numerator = lax.select(lax.eq(x, C(x, 0)), lax.full_like(x, 1), lax.abs(y))  # 1 / 0 at 0
    return lax.mul(C(x, 1 / 3), lax.div(numerator, lax.abs(x)))
