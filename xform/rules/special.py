"""Rules of special functions: gamma, zeta, beta, the error function, Bessel functions.

All are elementwise, and declared by their partial derivatives. Source: M. Abramowitz and I. Stegun,
Handbook of Mathematical Functions (1964), sections 6 (gamma), 7 (error function), 9 (Bessel), 23
and 26 (zeta, beta).
"""

from __future__ import annotations

import math

import jax
import numpy as np
from jax import lax

from xform.errors import NotDifferentiable
from xform.program.arithmetic import Value, as_jax_value, constant_like
from xform.registry.traits import EXPENSIVE, PLAIN
from xform.registry.words import pointwise

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


def _gamma_density(a: Value, x: Value) -> Value:
    """Return x^(a-1) exp(-x) / Γ(a), the derivative of igamma with respect to x."""
    power = lax.mul(lax.sub(a, C(a, 1)), lax.log(x))
    return lax.exp(lax.sub(lax.sub(power, x), lax.lgamma(a)))


def _beta_density(a: Value, b: Value, x: Value) -> Value:
    """Return x^(a-1) (1-x)^(b-1) / B(a, b), the derivative of the incomplete beta function."""
    log_beta = lax.sub(lax.add(lax.lgamma(a), lax.lgamma(b)), lax.lgamma(lax.add(a, b)))
    left = lax.mul(lax.sub(a, C(a, 1)), lax.log(x))
    right = lax.mul(lax.sub(b, C(b, 1)), lax.log1p(lax.neg(x)))
    return lax.exp(lax.sub(lax.add(left, right), log_beta))


pointwise("lgamma", lambda y, x: lax.digamma(x))
pointwise("digamma", lambda y, x: lax.polygamma(C(x, 1), x), traits=PLAIN)
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


@jax.custom_jvp
def _exp_minus_square(x: Value) -> Value:
    """Return exp(-x²) for |x| <= 28, to full precision.

    exp turns the absolute rounding error of x² into a relative error of the result, which is large
    for large x. So x² is computed as the sum of two numbers: a rounded square, and a small rest,
    which is exact enough. Numbers of 16 bits are squared in 32 bits instead.
    """
    info = jax.numpy.finfo(x.dtype)
    if info.bits < 32:
        wide = lax.convert_element_type(x, np.float32)
        return lax.convert_element_type(lax.exp(lax.neg(lax.square(wide))), x.dtype)
    # The square of `short`, which has half the bits, is exact; x² - short² is a product.
    short = lax.reduce_precision(x, info.nexp, (info.nmant - 1) // 2)
    rounded = lax.reduce_precision(lax.square(x), info.nexp, info.nmant - 2)
    rest = lax.mul(lax.sub(x, short), lax.add(x, short))
    rest = lax.add(lax.sub(lax.square(short), rounded), rest)
    return lax.mul(lax.exp(lax.neg(rounded)), lax.sub(C(x, 1), rest))


@_exp_minus_square.defjvp
def _exp_minus_square_jvp(primals: tuple[Value], tangents: tuple[Value]) -> tuple[Value, Value]:
    x, dx = map(as_jax_value, (*primals, *tangents))
    y = _exp_minus_square(x)
    return y, lax.mul(dx, lax.mul(lax.mul(C(x, -2), x), y))


def _gauss(x: Value, c: float) -> Value:
    """Return c exp(-x²). For |x| >= 28 it and all its derivatives are 0 in every dtype."""
    return lax.mul(C(x, c), _exp_minus_square(lax.clamp(C(x, -28), x, C(x, 28))))


def _bessel_i1e(y: Value, x: Value) -> Value:
    """Return i0e(x) - y (sign x + 1/x). Close to 0, y / x is 0/0, and the limit is 1/2."""
    eps = C(x, float(jax.numpy.finfo(x.dtype).eps))
    not_tiny = lax.gt(lax.abs(x), eps)
    safe = lax.select(not_tiny, x, lax.full_like(x, eps))
    factor = lax.add(lax.sign(safe), lax.div(C(x, 1), safe))
    slope = lax.sub(lax.bessel_i0e(safe), lax.mul(y, factor))
    return lax.select(not_tiny, slope, lax.full_like(x, 0.5))


pointwise("erf", lambda y, x, *, accuracy=None: _gauss(x, 2 / math.sqrt(math.pi)), traits=EXPENSIVE)
pointwise(
    "erfc", lambda y, x, *, accuracy=None: _gauss(x, -2 / math.sqrt(math.pi)), traits=EXPENSIVE
)
pointwise(
    "erf_inv",
    lambda y, x: lax.mul(C(x, math.sqrt(math.pi) / 2), lax.exp(lax.square(y))),
    traits=EXPENSIVE,
)
pointwise(
    "bessel_i0e", lambda y, x: lax.sub(lax.bessel_i1e(x), lax.mul(lax.sign(x), y)), traits=PLAIN
)
pointwise("bessel_i1e", _bessel_i1e, traits=PLAIN)
