"""The slopes of atan2 and atan, p = b / (a² + b²) and 1 / (1 + x²), with accurate derivatives.

Let q = a / (a² + b²) and w = p - i q. Then w = 1 / (b + i a), so its derivative is -w² in b and
-i w² in a. The derivative of w² is -2 w³ in b and -2 i w³ in a. The real and imaginary parts are

    w² = p² - q² - 2 i p q
    2 w³ = c(p, q) + i c(q, p), with c(p, q) = 2 p (p² - 3 q²)

So these are the derivatives of the functions in this file:

              in a        in b
    p         -2 p q      q² - p²
    2 p q     c(p, q)     c(q, p)
    q² - p²   -c(q, p)    c(p, q)
"""

from __future__ import annotations

from jax import lax

from xform.program.arithmetic import Value, constant_like
from xform.rules.slopes import derivative

C = constant_like  # C(x, c): the scalar c in the dtype of x


def _larger_first(a: Value, b: Value) -> tuple[Value, Value, Value]:
    """Return the larger of two values, the other one, and larger / (a² + b²).

    No square over- or underflows. Source: R. L. Smith, "Algorithm 116: complex division", 1962.
    """
    a_is_large = lax.gt(lax.abs(a), lax.abs(b))
    large, small = lax.select(a_is_large, a, b), lax.select(a_is_large, b, a)
    ratio = lax.div(small, large)
    return large, small, lax.div(C(a, 1), lax.mul(large, lax.add(C(a, 1), lax.square(ratio))))


def _cubic(p: Value, q: Value) -> Value:
    """Return c(p, q)."""
    squares = lax.sub(lax.square(p), lax.mul(C(p, 3), lax.square(q)))
    return lax.mul(lax.mul(C(p, 2), p), squares)


def _p_and_q(a: Value, b: Value) -> tuple[Value, Value]:
    """Return p and q."""
    return over_squares(a, b), over_squares(b, a)


@derivative(lambda y, a, b: _cubic(*_p_and_q(a, b)), lambda y, a, b: _cubic(*_p_and_q(b, a)))
def _two_p_q(a: Value, b: Value) -> Value:
    """Return 2 p q."""
    large, small, large_over_squares = _larger_first(a, b)
    twice_small_over_squares = lax.mul(lax.div(lax.mul(C(a, 2), small), large), large_over_squares)
    return lax.mul(twice_small_over_squares, large_over_squares)


@derivative(
    lambda y, a, b: lax.neg(_cubic(*_p_and_q(b, a))), lambda y, a, b: _cubic(*_p_and_q(a, b))
)
def _q2_minus_p2(a: Value, b: Value) -> Value:
    """Return q² - p² as (a - b) (a + b) / (a² + b²)²."""
    large, _, large_over_squares = _larger_first(a, b)
    difference, total = (
        lax.mul(lax.div(x, large), large_over_squares) for x in (lax.sub(a, b), lax.add(a, b))
    )
    return lax.mul(difference, total)


@derivative(lambda p, a, b: lax.neg(_two_p_q(a, b)), lambda p, a, b: _q2_minus_p2(a, b))
def over_squares(a: Value, b: Value) -> Value:
    """Return p, which is b / (a² + b²)."""
    large, small, large_over_squares = _larger_first(a, b)
    small_over_squares = lax.mul(lax.div(small, large), large_over_squares)
    a_is_large = lax.gt(lax.abs(a), lax.abs(b))
    return lax.select(a_is_large, small_over_squares, large_over_squares)


@derivative(lambda y, x: (over_squares(lax.full_like(x, 1), x), lax.mul(C(x, -2), y)))
def atan_slope(x: Value) -> Value:
    """Return 1 / (1 + x²)."""
    return lax.div(C(x, 1), lax.add(C(x, 1), lax.square(x)))
