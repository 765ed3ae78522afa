"""While loops with pushed tangents, or with no derivative."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import xform
from tests.reference import close, grads_agree
from tests.rules.programs import X, bend

pytestmark = pytest.mark.usefixtures("x64")


def newton(x):
    return lax.while_loop(
        lambda s: s[0] < 5, lambda s: (s[0] + 1, 0.5 * (s[1] + x / s[1]), s[2]), (0, 1.0 + x, 2.0)
    )[1]


def late(x):
    """A loop with a carry that starts from a constant and becomes active."""
    return lax.while_loop(
        lambda s: s[0] < 3, lambda s: (s[0] + 1, s[2], bend(s[2]) + x), (0, x * 0 + 1, 0.3 + 0 * x)
    )[1]


@pytest.mark.parametrize(
    "f", [newton, late, lambda x: lax.fori_loop(0, jnp.int32(x[0] + 2), lambda i, c: c * x, x)]
)
def test_while_in_forward_mode(f) -> None:
    x, dx = abs(X), np.cos(X)
    want = jax.jvp(f, (x,), (dx,))
    for way in (lambda f: f, jax.jit):
        close(way(lambda x: xform.jvp(f, (x,), (dx,)))(x), want)
        close(way(lambda x: xform.linearize(f, x)[1](dx))(x), want[1])
    close(jax.jit(xform.jacfwd(xform.jacfwd(f)))(x), jax.jit(jax.jacfwd(jax.jacfwd(f)))(x))
    close(
        jax.vmap(lambda s: xform.jvp(f, (x * s,), (dx,))[1])(jnp.array([1.0, 2.0])),
        jax.vmap(lambda s: jax.jvp(f, (x * s,), (dx,))[1])(jnp.array([1.0, 2.0])),
    )


def test_a_while_that_carries_no_derivative_may_stand_in_reverse_mode() -> None:
    def f(x, n):
        steps = lax.while_loop(lambda i: i < n, lambda i: i + 1, 0)
        frozen = lax.while_loop(
            lambda y: jnp.sum(y) < 9, lambda y: y * 2, lax.stop_gradient(abs(x))
        )
        return jnp.sum(x * steps * frozen)

    grads_agree(f, X, np.int32(4))


def test_fori_loop_with_static_bounds_is_reversed() -> None:
    grads_agree(lambda x: jnp.sum(lax.fori_loop(0, 4, lambda i, c: bend(c) * x + i, x)), X)
