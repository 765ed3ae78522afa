"""Hessian-free optimization: Newton steps from products with the Hessian alone.

Martens, "Deep learning via Hessian-free optimization", 2010: the step solves `(H + λ) d = -g` by
conjugate gradients, and the damping `λ` follows how well the quadratic model predicted the loss.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

import xform

STEPS, ROWS = 60, 200


def main() -> tuple[float, float, float]:
    """Return the loss at the start, after Newton steps, and after equally expensive descent."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.uniform(keys[0], (ROWS, 2), minval=-2, maxval=2)
    y = jnp.sin(2 * x[:, 0]) * x[:, 1]
    params = [(jax.random.normal(keys[1], (2, 24)), jnp.zeros(24)),
              (jax.random.normal(keys[2], (24, 1)) / 5, jnp.zeros(1))]  # fmt: skip
    flat, unravel = ravel_pytree(params)

    def loss(flat: jax.Array) -> jax.Array:
        (w, b), (v, c) = unravel(flat)
        return jnp.mean(((jnp.tanh(x @ w + b) @ v + c)[:, 0] - y) ** 2)

    @jax.jit
    def newton(flat: jax.Array, damping: jax.Array) -> Any:
        value, g = xform.value_and_grad(loss)(flat)
        product = lambda d: xform.hvp(loss, (flat,), (d,)) + damping * d
        d, _ = jax.scipy.sparse.linalg.cg(product, -g, maxiter=50)
        # If the Hessian is not positive, the step may lead uphill. Then the gradient replaces it.
        d = jnp.where(g @ d < 0, d, -g)
        model = g @ d + 0.5 * d @ (product(d) - damping * d)
        after = loss(flat + d)
        ratio = (after - value) / model
        damping = damping * jnp.where(ratio > 0.75, 0.5, jnp.where(ratio > 0.25, 1.0, 4.0))
        better = after < value
        return jnp.where(better, flat + d, flat), jnp.clip(damping, 1e-6, 1e3), value

    @jax.jit
    def descended(flat: jax.Array) -> jax.Array:
        step = lambda f, _: (f - 0.05 * xform.grad(loss)(f), None)
        return jax.lax.scan(step, flat, None, length=52 * 2 * STEPS)[0]

    at, damping, first = flat, jnp.asarray(1.0), float(loss(flat))
    for _ in range(STEPS):
        at, damping, _ = newton(at, damping)
    last, plain = float(loss(at)), float(loss(descended(flat)))
    print(f"loss {first:.3f} -> {last:.2e}; by as many gradients of plain descent {plain:.2e}")
    return first, last, plain


if __name__ == "__main__":
    main()
