"""Implicit differentiation: the derivative of a solution, without the iterations that lead to it.

`x(a)` solves `x = tanh(a x + b)`. Whatever iteration finds it, its derivative follows from the
equation alone: `dx = (1 - df/dx)^-1 df`. A `custom_vjp` implements this. It solves a linear system
with the transpose of a linearization: one `xform.vjp`, applied repeatedly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import xform

Map = Callable[[Any, jax.Array], jax.Array]


def f(params: Any, x: jax.Array) -> jax.Array:
    """A contraction."""
    a, b = params
    return jnp.tanh(a @ x + b)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def fixed_point(f: Map, params: Any, x: jax.Array) -> jax.Array:
    """Solve `x = f(params, x)`, from a start."""
    moved = lambda state: jnp.max(jnp.abs(state[1] - state[0])) > 1e-12
    step = lambda state: (state[1], f(params, state[1]))
    return jax.lax.while_loop(moved, step, (x, f(params, x)))[1]


def forward(f: Map, params: Any, x: jax.Array) -> Any:
    """Return the solution, which is the only residual."""
    found = fixed_point(f, params, x)
    return found, (params, found)


def backward(f: Map, kept: Any, ct: jax.Array) -> Any:
    """Solve `u = ct + (df/dx)ᵀ u` as a fixed point too, then pull `u` back to the parameters."""
    params, x = kept
    _, pull = xform.vjp(f, params, x)
    adjoint = lambda ct, u: ct + pull(u)[1]
    u = fixed_point(adjoint, ct, ct)
    return pull(u)[0], jnp.zeros_like(x)


fixed_point.defvjp(forward, backward)


def main() -> float:
    """Return the relative difference from finite differences, in float64."""
    with jax.enable_x64():
        n = 6
        a = jax.random.normal(jax.random.key(0), (n, n), jnp.float64) / (3 * n**0.5)
        b = jnp.linspace(-1.0, 1.0, n)
        loss = lambda a: jnp.sum(fixed_point(f, (a, b), jnp.zeros(n)) ** 2)
        got, by = jax.jit(xform.grad(loss))(a), 1e-6
        unit = lambda k: by * jnp.zeros(n * n).at[k].set(1.0).reshape(n, n)
        want = jnp.stack([(loss(a + unit(k)) - loss(a - unit(k))) / (2 * by) for k in range(n * n)])
        error = float(jnp.max(jnp.abs(got.ravel() - want)) / jnp.max(jnp.abs(want)))
    print(f"the gradient is within {error:.0e} of finite differences")
    return error


if __name__ == "__main__":
    main()
