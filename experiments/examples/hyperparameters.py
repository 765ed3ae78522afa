"""Hyperparameter gradients: the validation loss, differentiated by a penalty through training.

The model is ridge regression, trained by 300 steps of gradient descent. Gradient steps on the
logarithm of the penalty go through all of training. The best penalty of a fine grid is the
reference.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

import xform

STEPS, RATE, UPDATES = 300, 0.1, 60


def data(key: jax.Array) -> tuple[jax.Array, ...]:
    """Return a few noisy rows for training, and others for validation."""
    keys = jax.random.split(key, 4)
    truth = jax.random.normal(keys[0], (20,)) * (jnp.arange(20) < 5)
    x, held = jax.random.normal(keys[1], (25, 20)), jax.random.normal(keys[2], (200, 20))
    y = x @ truth + 1.5 * jax.random.normal(keys[3], (25,))
    return x, y, held, held @ truth


def validation(log_penalty: jax.Array, x: jax.Array, y: jax.Array, held: jax.Array,
               wanted: jax.Array) -> jax.Array:  # fmt: skip
    """Compute the error on held-out rows of weights that were trained under a penalty."""

    def train(w: jax.Array) -> jax.Array:
        return jnp.mean((x @ w - y) ** 2) + jnp.exp(log_penalty) * jnp.sum(w**2)

    step = lambda w, _: (w - RATE * xform.grad(train)(w), None)
    w, _ = jax.lax.scan(step, jnp.zeros(20), None, length=STEPS)
    return jnp.mean((held @ w - wanted) ** 2)


def main() -> tuple[float, float]:
    """Return the held-out error at the penalty found, and at the best of a grid."""
    rows = data(jax.random.key(0))
    step = jax.jit(xform.value_and_grad(validation))
    log_penalty = jnp.asarray(-4.0)
    for _ in range(UPDATES):
        _, slope = step(log_penalty, *rows)
        log_penalty = log_penalty - 2.0 * jnp.clip(slope, -0.2, 0.2)
    found = float(step(log_penalty, *rows)[0])
    grid = jax.jit(jax.vmap(validation, (0, None, None, None, None)))
    best = float(grid(jnp.linspace(-6.0, 2.0, 161), *rows).min())
    print(f"penalty {float(jnp.exp(log_penalty)):.3f}: held error {found:.4f}, best {best:.4f}")
    return found, best


if __name__ == "__main__":
    main()
