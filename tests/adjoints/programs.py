"""Functions with named values in them, for the tests of this folder."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import xform

Tap = Callable[[Any, str], Any]
X = np.array([0.3, -0.7, 1.1])
W = np.linspace(-0.8, 0.9, 9).reshape(3, 3)


@jax.custom_vjp
def straight(x):
    """A function whose custom rule is not the derivative of its body."""
    return jnp.round(x * 4) / 4


straight.defvjp(lambda x: (straight(x), None), lambda _, ct: (2.0 * ct,))


def plain(tap: Tap, x: Any) -> Any:
    h = tap(jnp.sin(x), "h")
    return jnp.sum(h * h + jnp.exp(h) * x)


def jitted(tap: Tap, x: Any) -> Any:
    inner = jax.jit(lambda x: tap(jnp.sin(x), "h") * 2.0)
    return jnp.sum(jax.jit(lambda x: inner(x) ** 2)(x))


def region(tap: Tap, x: Any) -> Any:
    inner = jax.checkpoint(lambda x: jnp.cos(tap(jnp.sin(x), "h") ** 2))
    return jnp.sum(inner(x) * straight(x))


def placed(tap: Tap, x: Any) -> Any:
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    inner = jax.jit(lambda x: tap(jnp.sin(x), "h") ** 2, in_shardings=here, out_shardings=here)
    return jnp.sum(inner(x))


def branch(tap: Tap, x: Any) -> Any:
    odd, even = (lambda x: tap(x * 2.0, "h") ** 3), (lambda x: jnp.cos(x))
    return jnp.sum(lax.switch(1, [even, odd, even], x) * x)


def not_run(tap: Tap, x: Any) -> Any:
    odd, even = (lambda x: tap(x * 2.0, "h") ** 3), (lambda x: jnp.cos(x))
    return jnp.sum(lax.switch(0, [even, odd, even], x) * x)


def after_a_rule(tap: Tap, x: Any) -> Any:
    return jnp.sum(straight(tap(jnp.sin(x), "h")) ** 2)


def before_a_rule(tap: Tap, x: Any) -> Any:
    return jnp.sum(tap(straight(x), "h") ** 2)


def vmapped(tap: Tap, x: Any) -> Any:
    return jnp.sum(jax.vmap(lambda x: tap(jnp.sin(x), "h") ** 2 * x)(x))


def gathered(tap: Tap, x: Any) -> Any:
    h = tap(W @ x, "h")
    return h[1] * jnp.sort(h)[0] + jnp.max(h) + lax.stop_gradient(h).sum()


def through_complex(tap: Tap, x: Any) -> Any:
    z = tap(jnp.fft.fft(x), "h")
    return jnp.sum(jnp.abs(z) ** 2 + (z * z).real)


def scalar(tap: Tap, x: Any) -> Any:
    return tap(x.sum(), "h")


PROGRAMS = [plain, jitted, region, placed, branch, not_run, after_a_rule, before_a_rule, vmapped,
            gathered, through_complex, scalar]  # fmt: skip


def recurrent(w: Any, x: Any, taps: Any) -> Any:
    """A loop of four iterations that adds scanned values to h and s."""

    def step(carry: Any, t: Any) -> Any:
        h = xform.adjoints.name(jnp.tanh(w @ carry + t[0]), "h") + t[1]
        s = xform.adjoints.name(jnp.sum(h**2), "s") + t[2]
        return h, s * h

    h, ys = lax.scan(step, x, (jnp.arange(4.0), *taps))
    return jnp.sum(h) + jnp.sum(ys)


TAPS = np.zeros((4, 3)), np.zeros(4)


def block(x: Any, cut: Callable[[Any, int], Any] = lambda h, use: h) -> Any:
    """A function in which four equations read h; `cut` may cut each read."""
    h = xform.adjoints.name(jnp.sin(x), "h")
    a = jnp.exp(cut(h, 0))
    b = xform.adjoints.name(a * cut(h, 1), "b")
    c = xform.adjoints.name(jax.nn.silu(cut(h, 2)), "c")
    return jnp.sum(b * c) + jnp.sum(cut(h, 3) ** 2) + jnp.sum(a)
