"""Special functions: gamma, zeta, beta, the error function, Bessel functions.

M. Abramowitz and I. Stegun, Handbook of Mathematical Functions (1964), sections 6 (gamma), 7 (erf),
9 (Bessel), 23 and 26 (zeta, beta).
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

C = constant_like


def no_partial(primitive: str, name: str):
    """Return a stand-in for a partial derivative without closed form, which raises an error."""

    def refuse(y: Value, *x: Value) -> Value:
        raise NotDifferentiable(
            f"derivative of {primitive} in {name}",
            "it has no closed form, and no primitive of JAX computes it",
            "",
            f"hold {name} constant (jax.lax.stop_gradient), or give the call a jax.custom_jvp",
        )

    return refuse


# The gamma family iterates inside, so a compiler does not fuse it into a loop over elements.


def _gamma_density(a: Value, x: Value) -> Value:
    """Return x^(a-1) exp(-x) / Γ(a), the derivative of igamma by x."""
    power = lax.mul(lax.sub(a, C(a, 1)), lax.log(x))
    return lax.exp(lax.sub(lax.sub(power, x), lax.lgamma(a)))


def _beta_density(a: Value, b: Value, x: Value) -> Value:
    """Return x^(a-1) (1-x)^(b-1) / B(a, b)."""
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
# The order of derivatives by a and x does not matter: this is the derivative of the density by a.
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
    """Return exp(-x²) for |x| <= 28.

    The rounding error of x², times x², would be the error of exp(-x²). Here x² is the sum of a
    rounded square and a small rest: the square of `x` with half its bits is exact, and x² - half²
    is a product. Numbers of 16 bits are squared in 32 bits instead.
    """
    info = jax.numpy.finfo(x.dtype)
    if info.bits < 32:
        wide = lax.convert_element_type(x, np.float32)
        return lax.convert_element_type(lax.exp(lax.neg(lax.square(wide))), x.dtype)
    half = lax.reduce_precision(x, info.nexp, (info.nmant - 1) // 2)
    rounded = lax.reduce_precision(lax.square(x), info.nexp, info.nmant - 2)
    rest = lax.mul(lax.sub(x, half), lax.add(x, half))
    rest = lax.add(lax.sub(lax.square(half), rounded), rest)
    return lax.mul(lax.exp(lax.neg(rounded)), lax.sub(C(x, 1), rest))


@_exp_minus_square.defjvp
def _minus_twice_x(primals: tuple[Value], tangents: tuple[Value]) -> tuple[Value, Value]:
    x, dx = map(as_jax_value, (*primals, *tangents))
    y = _exp_minus_square(x)
    return y, lax.mul(dx, lax.mul(lax.mul(C(x, -2), x), y))


def _gauss(x: Value, c: float) -> Value:
    """Return c exp(-x²). For |x| >= 28 it and all its derivatives are 0 in every dtype."""
    return lax.mul(C(x, c), _exp_minus_square(lax.clamp(C(x, -28), x, C(x, 28))))


def _bessel_i1e(y: Value, x: Value) -> Value:
    """Return i0e - y (sign x + 1/x), which near 0 is 0/0 with the limit 1/2."""
    eps = C(x, float(jax.numpy.finfo(x.dtype).eps))
    away = lax.gt(lax.abs(x), eps)
    safe = lax.select(away, x, lax.full_like(x, eps))
    slope = lax.add(lax.sign(safe), lax.div(C(x, 1), safe))
    slope = lax.sub(lax.bessel_i0e(safe), lax.mul(y, slope))
    return lax.select(away, slope, lax.full_like(x, 0.5))


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
