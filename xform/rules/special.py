"""Rules of special functions: gamma, zeta, beta, the error function, Bessel functions.

All are elementwise, and declared by their partial derivatives. Source: M. Abramowitz and I. Stegun,
Handbook of Mathematical Functions (1964), sections 6 (gamma), 7 (error function), 9 (Bessel), 23
and 26 (zeta, beta).
"""

from __future__ import annotations

import math

import jax
from jax import lax

from xform.errors import NotDifferentiable
from xform.program.arithmetic import Value, constant_like
from xform.registry.traits import EXPENSIVE, PLAIN
from xform.registry.words import pointwise
from xform.rules.slopes import derivative, in_32_bits

C = constant_like  # C(x, c): the scalar c in the dtype of x


def no_partial(primitive: str, name: str):
    """Return a function in place of a partial derivative without closed form. It raises an error.

    `name` is the input that the primitive has no derivative in.
    """

    def refuse(y: Value, *x: Value) -> Value:
        raise NotDifferentiable(
            f"derivative of {primitive} in {name}",
            "it has no closed form, and no primitive of JAX computes it",
            "",
            f"hold {name} constant (jax.lax.stop_gradient), or give the call a jax.custom_jvp",
        )

    return refuse


# The gamma and beta functions. Their traits are `PLAIN` where XLA computes them by an iteration,
# which it does not fuse with other elementwise operations.


@in_32_bits
def _gamma_density(a: Value, x: Value) -> Value:
    """Return x^(a-1) exp(-x) / Γ(a), the derivative of igamma with respect to x."""
    power = lax.mul(lax.sub(a, C(a, 1)), lax.log(x))
    return lax.exp(lax.sub(lax.sub(power, x), lax.lgamma(a)))


@in_32_bits
def _beta_density(a: Value, b: Value, x: Value) -> Value:
    """Return x^(a-1) (1-x)^(b-1) / B(a, b), the derivative of the incomplete beta function."""
    log_beta = lax.sub(lax.add(lax.lgamma(a), lax.lgamma(b)), lax.lgamma(lax.add(a, b)))
    left = lax.mul(lax.sub(a, C(a, 1)), lax.log(x))
    right = lax.mul(lax.sub(b, C(b, 1)), lax.log1p(lax.neg(x)))
    return lax.exp(lax.sub(lax.add(left, right), log_beta))


def _cotangent(x: Value) -> Value:
    """Return cot(π x) for |x| <= 1/2; exactly 0 at 1/2."""
    sine = lambda x: lax.sin(lax.mul(C(x, math.pi), x))
    return lax.mul(lax.sign(x), lax.div(sine(lax.sub(C(x, 0.5), lax.abs(x))), sine(lax.abs(x))))


@derivative(lambda y, x: (lax.mul(C(x, -2 * math.pi), _cotangent(x)), y))
def _cosecant_square(x: Value) -> Value:
    """Return (π / sin(π x))² for |x| <= 1/2."""
    return lax.square(lax.div(C(x, math.pi), lax.sin(lax.mul(C(x, math.pi), x))))


@in_32_bits
def _trigamma(x: Value) -> Value:
    """Return the derivative of digamma, which is about 1 / x for x beyond the type's precision.

    lax.polygamma is NaN for negative x. They are reflected: ψ'(x) = (π / sin πx)² - ψ'(1 - x).
    """
    negative = lax.lt(x, C(x, 0))
    mirrored = lax.select(negative, lax.sub(C(x, 1), x), x)
    far = C(x, 1 / float(jax.numpy.finfo(x.dtype).eps))
    here = lax.polygamma(lax.full_like(x, 1), lax.min(mirrored, lax.full_like(x, far)))
    here = lax.select(lax.gt(mirrored, far), lax.div(C(x, 1), mirrored), here)
    fraction = lax.select(negative, lax.sub(x, lax.round(x)), lax.full_like(x, 0.5))
    return lax.select(negative, lax.sub(_cosecant_square(fraction), here), here)


pointwise("lgamma", lambda y, x: lax.digamma(x))
pointwise("digamma", lambda y, x: _trigamma(x), traits=PLAIN)
pointwise(
    "polygamma",
    no_partial("polygamma", "its order"),
    lambda y, m, x: lax.polygamma(lax.add(m, C(m, 1)), x),
    traits=PLAIN,
)
pointwise(
    "zeta",
    no_partial("zeta", "its exponent"),
    lambda y, s, q: lax.neg(lax.mul(s, lax.zeta(lax.add(s, C(s, 1)), q))),
    traits=PLAIN,
)
pointwise(
    "igamma",
    lambda y, a, x: lax.igamma_grad_a(a, x),
    lambda y, a, x: _gamma_density(a, x),
    traits=PLAIN,
)
pointwise(
    "igammac",
    lambda y, a, x: lax.neg(lax.igamma_grad_a(a, x)),
    lambda y, a, x: lax.neg(_gamma_density(a, x)),
    traits=PLAIN,
)
# igamma_grad_a is the derivative of igamma in a. Its derivative in x is d(gamma density)/da.
pointwise(
    "igamma_grad_a",
    no_partial("igamma_grad_a", "a"),
    lambda y, a, x: lax.mul(_gamma_density(a, x), lax.sub(lax.log(x), lax.digamma(a))),
    traits=PLAIN,
)
pointwise(
    "regularized_incomplete_beta",
    no_partial("regularized_incomplete_beta", "a"),
    no_partial("regularized_incomplete_beta", "b"),
    lambda y, a, b, x: _beta_density(a, b, x),
    traits=PLAIN,
)

# The error function and Bessel functions.


@derivative(lambda y, x: (y, lax.neg(x)))
def _bell(x: Value) -> Value:
    """Return exp(-x² / 2) for |x| <= 28, to full precision.

    exp turns the absolute rounding error of x² into a relative error of the result, which is large
    for large x. So x² is computed as the sum of two numbers: a rounded square, and a small rest,
    which is exact enough. Numbers of 16 bits are squared in 32 bits instead.
    """
    info = jax.numpy.finfo(x.dtype)
    half = C(x, 0.5)
    if info.bits < 32:
        return in_32_bits(lambda x: lax.exp(lax.mul(lax.square(x), C(x, -0.5))))(x)
    # The square of `short`, which has half the bits, is exact; x² - short² is a product.
    short = lax.reduce_precision(x, info.nexp, (info.nmant - 1) // 2)
    rounded = lax.reduce_precision(lax.square(x), info.nexp, info.nmant - 2)
    rest = lax.mul(lax.sub(x, short), lax.add(x, short))
    rest = lax.add(lax.sub(lax.square(short), rounded), rest)
    return lax.mul(lax.exp(lax.neg(lax.mul(rounded, half))), lax.sub(C(x, 1), lax.mul(rest, half)))


def _gauss(x: Value, c: float) -> Value:
    """Return c exp(-x²). For |x| >= 28 it and all its derivatives are 0 in every dtype.

    It is a product of two roots, so that no factor underflows if the product does not. The same
    holds for the terms of its derivatives.
    """
    root = _bell(lax.clamp(C(x, -28), x, C(x, 28)))
    return lax.mul(lax.mul(C(x, c), root), root)


@in_32_bits
def _exp_square(y: Value) -> Value:
    return lax.exp(lax.square(y))


# With w = 1 - I1 / I0, the derivative of i0e is -sign(x) w i0e. For large x, i1e - i0e has no right
# digits, and w is given by its expansion in 1 / x.
_EXPANSION = 1 / 2, 1 / 8, 1 / 8, 25 / 128, 13 / 32, 1073 / 1024
_LARGE = 25.0  # from here on the expansion is about as accurate as the difference, in float32


def _one_minus_ratio(x: Value) -> Value:
    """Return 1 - I1(x) / I0(x) for a large x."""
    inverse = lax.div(C(x, 1), x)
    total = lax.full_like(x, 0)
    for coefficient in reversed(_EXPANSION):
        total = lax.mul(lax.add(total, C(x, coefficient)), inverse)
    return total


def _large(x: Value) -> tuple[Value, Value]:
    """Return where |x| is large for the dtype of x, and |x| there, else a large number."""
    least = _LARGE if jax.numpy.finfo(x.dtype).bits <= 32 else 20 * _LARGE
    where = lax.gt(lax.abs(x), C(x, least))
    return where, lax.select(where, lax.abs(x), lax.full_like(x, least))


@in_32_bits
def _bessel_i0e(x: Value) -> Value:
    """Return i1e(x) - sign(x) i0e(x)."""
    is_large, large = _large(x)
    y = lax.bessel_i0e(x)
    slope = lax.sub(lax.bessel_i1e(x), lax.mul(lax.sign(x), y))
    expanded = lax.mul(lax.mul(lax.neg(lax.sign(x)), y), _one_minus_ratio(large))
    return lax.select(is_large, expanded, slope)


def _i1e_over_x(x: Value) -> Value:
    """Return i1e(x) / x for |x| <= 1, by the power series of I1(x) / x."""
    total, t = lax.full_like(x, 0), lax.mul(C(x, 0.25), lax.square(x))
    for k in reversed(range(10)):
        coefficient = 0.5 / (math.factorial(k) * math.factorial(k + 1))
        total = lax.add(lax.mul(total, t), C(x, coefficient))
    return lax.mul(total, lax.exp(lax.neg(lax.abs(x))))


@in_32_bits
def _bessel_i1e(x: Value) -> Value:
    """Return i0e(x) - sign(x) i1e(x) - i1e(x) / x."""
    y, one = lax.bessel_i1e(x), lax.full_like(x, 1)
    is_small, (is_large, large) = lax.lt(lax.abs(x), one), _large(x)
    small, other = lax.select(is_small, x, one), lax.select(is_small, one, x)
    quotient = lax.select(is_small, _i1e_over_x(small), lax.div(y, other))
    slope = lax.sub(lax.sub(lax.bessel_i0e(x), lax.mul(lax.sign(x), y)), quotient)
    w = _one_minus_ratio(large)  # i0e / i1e is 1 / (1 - w)
    growth = lax.sub(lax.div(w, lax.sub(C(x, 1), w)), lax.div(C(x, 1), large))
    return lax.select(is_large, lax.mul(lax.mul(lax.sign(x), y), growth), slope)


pointwise("erf", lambda y, x, *, accuracy=None: _gauss(x, 2 / math.sqrt(math.pi)), traits=EXPENSIVE)
pointwise(
    "erfc", lambda y, x, *, accuracy=None: _gauss(x, -2 / math.sqrt(math.pi)), traits=EXPENSIVE
)
pointwise(
    "erf_inv",
    lambda y, x: lax.mul(C(x, math.sqrt(math.pi) / 2), _exp_square(y)),
    traits=EXPENSIVE,
)
pointwise("bessel_i0e", lambda y, x: _bessel_i0e(x), traits=PLAIN)
pointwise("bessel_i1e", lambda y, x: _bessel_i1e(x), traits=PLAIN)
