"""Second and third derivatives of elementwise functions do not lose their digits."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from jax import lax
from mpmath import mp

import xform

pytestmark = pytest.mark.usefixtures("x64")


def nth(f: Callable[..., Any], order: int) -> Callable[..., Any]:
    for _ in range(order):
        f = xform.grad(lambda x, f=f: jnp.sum(f(x)))
    return f


def sigmoid(x: Any) -> Any:
    return 1 / (1 + mp.exp(-x))


SMALL, USUAL = [1e-7, -1e-4, 3e-3], [-2.3, 0.4, 1.7]
ENDS = [1 - 1e-6, -1 + 1e-4, 0.3]
# By name: the function, the same in mpmath, and where its higher derivatives used to cancel.
CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any], list[float]]] = {
    "tanh": (lax.tanh, mp.tanh, SMALL + USUAL),
    "logistic": (lax.logistic, sigmoid, [*SMALL, *USUAL, -30.0, 30.0]),
    "silu": (jax.nn.silu, lambda x: x * sigmoid(x), SMALL + USUAL),
    "softplus": (jax.nn.softplus, lambda x: mp.log(1 + mp.exp(x)), SMALL + USUAL),
    "log_sigmoid": (jax.nn.log_sigmoid, lambda x: mp.log(sigmoid(x)), SMALL + USUAL),
    "gelu": (lambda x: jax.nn.gelu(x, False), lambda x: x * mp.ncdf(x), SMALL + USUAL),
    "soft_sign": (jax.nn.soft_sign, lambda x: x / (1 + abs(x)), SMALL + USUAL),
    "softmax": (lambda x: jax.nn.softmax(jnp.stack([x, jnp.zeros_like(x)]), 0)[0], sigmoid, USUAL),
    "erf": (lax.erf, mp.erf, [*SMALL, *USUAL, 5.0, 9.0]),
    "erf_inv": (lax.erf_inv, mp.erfinv, [1e-7, 0.3, -0.9]),
    "asin": (lax.asin, mp.asin, SMALL + ENDS),
    "acos": (lax.acos, mp.acos, SMALL + ENDS),
    "atan": (lax.atan, mp.atan, [*SMALL, *USUAL, 1e70, -1e60]),
    "atanh": (lax.atanh, mp.atanh, SMALL + ENDS),
    "asinh": (lax.asinh, mp.asinh, [*SMALL, *USUAL, 1e50]),
    "acosh": (lax.acosh, mp.acosh, [1 + 1e-6, 1.4, 1e70]),
    "expm1": (lax.expm1, mp.expm1, SMALL + USUAL),
    "log1p": (lax.log1p, mp.log1p, [*SMALL, 0.4, 1.7, -1 + 1e-6]),
    "cbrt": (lax.cbrt, mp.cbrt, [1e-20, 0.4, 1e20]),
    "tan": (lax.tan, mp.tan, [1e-7, 0.4, 1.2]),
    "digamma": (lax.digamma, mp.digamma, [-2.3, -0.4, 0.6, 1e9]),
    "bessel_i1e": (lax.bessel_i1e, lambda x: mp.besseli(1, x) * mp.exp(-abs(x)), [1e-7, 0.4]),
    "x ** 7": (lambda x: x**7, lambda x: x**7, [*USUAL, 1e-50]),
    "x ** -1": (lambda x: x**-1, lambda x: x**-1, [*USUAL, 1e-70]),
}  # fmt: skip
# JAX writes these by a custom rule with exp(x - softplus(x)).
DIGITS = {"softplus": 1e-8, "log_sigmoid": 1e-8}


@pytest.mark.parametrize("name", CASES)
def test_derivatives_to_the_third_order_are_accurate(name: str) -> None:
    f, exact, points = CASES[name]
    for order in (1, 2, 3):
        with mpmath.workdps(120):
            step = lambda x: abs(mp.mpf(x)) * mp.mpf(10) ** -25
            want = [float(mpmath.diff(exact, mp.mpf(x), order, h=step(x))) for x in points]
        found = jax.jit(nth(f, order))(np.array(points))
        np.testing.assert_allclose(found, want, rtol=DIGITS.get(name, 1e-12), err_msg=str(order))


def test_highest_accuracy_tanh_has_accurate_slopes_where_it_rounds_to_1() -> None:
    f = lambda x: lax.tanh(x, accuracy=lax.AccuracyMode.HIGHEST)
    x = np.array([19.0, 25.0, -300.0, 1e-7, 0.4])
    with mpmath.workdps(400):
        slopes = [mp.sech(mp.mpf(v)) ** 2 for v in x]
        want = [slopes, [-2 * s * mp.tanh(mp.mpf(v)) for s, v in zip(slopes, x, strict=True)]]
        want = np.array(want, float)
    for order in (1, 2):
        found = jax.jit(nth(f, order))(x)
        np.testing.assert_allclose(found, want[order - 1], rtol=1e-13)
    np.testing.assert_allclose(jax.grad(lambda x: jnp.sum(f(x)))(x), want[0], rtol=1e-13)


def test_slopes_at_infinity_are_zero() -> None:
    x = np.array([np.inf, -np.inf])
    atan2 = lambda x: lax.atan2(x, lax.full_like(x, 2))
    for f, order in ((lax.atan, 1), (lax.atan, 2), (atan2, 1)):
        np.testing.assert_array_equal(np.abs(nth(f, order)(x)), 0)


def test_the_slope_of_tanh_shares_no_square_with_a_loss() -> None:
    """XLA would merge both squares and keep the result; so the loss takes no more than in JAX."""
    w, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 32), (1024, 64)))
    loss = lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)
    ours, theirs = (
        jax.jit(transform(loss)).lower(w, x).compile().memory_analysis().temp_size_in_bytes
        for transform in (xform.value_and_grad, jax.value_and_grad)
    )
    assert ours <= 1.02 * theirs


@pytest.mark.parametrize(
    "f",
    [
        lambda x: lax.atan2(0.527, x),
        lambda x: lax.atan2(x, 0.527),
        lambda x: lax.pow(0.527, x),
        lambda x: lax.pow(x, 2.5),
        lambda x: lax.rem(x, 0.527),
    ],
)
def test_an_operand_may_be_a_literal(f: Callable[..., Any]) -> None:
    """In a staged program a Python number is a literal, which has no `ndim` in JAX 0.12."""
    got, want = (jax.jit(lib.grad(f))(1.3) for lib in (xform, jax))
    np.testing.assert_allclose(got, want, rtol=1e-6)
