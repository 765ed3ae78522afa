"""Reinforcement learning: values learned from constant targets (`stop_gradient`).

A walker on a line of 19 places steps left or right at random. The right end pays 1, the left end
nothing. Semi-gradient TD(0) learns a linear value function: the target `r + v(next)` is a
number, not a function of the weights, so no gradient flows through it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

import xform

PLACES, STEPS, RATE = 19, 100_000, 0.05


def value(w: jax.Array, place: jax.Array) -> jax.Array:
    """Return the expected pay from a place; 0 beyond the ends, where the walk is over."""
    inside = (place >= 0) & (place < PLACES)
    return jnp.where(inside, w[jnp.clip(place, 0, PLACES - 1)], 0.0)


def td_loss(w: jax.Array, place: jax.Array, after: jax.Array) -> jax.Array:
    """Compute half the squared distance to the target, which is held constant."""
    pay = jnp.where(after == PLACES, 1.0, 0.0)
    target = jax.lax.stop_gradient(pay + value(w, after))
    return 0.5 * (value(w, place) - target) ** 2


@jax.jit
def learned(key: jax.Array) -> jax.Array:
    """Return the weights after many steps of walks that begin in the middle."""

    def step(state: tuple[jax.Array, jax.Array], key: jax.Array):
        w, place = state
        after = place + jnp.where(jax.random.bernoulli(key), 1, -1)
        w = w - RATE * xform.grad(td_loss)(w, place, after)
        over = (after < 0) | (after >= PLACES)
        return (w, jnp.where(over, PLACES // 2, after)), w

    start = jnp.full(PLACES, 0.5), jnp.asarray(PLACES // 2)
    _, ws = jax.lax.scan(step, start, jax.random.split(key, STEPS))
    return ws[STEPS // 2 :].mean(0)


def main() -> float:
    """Return the root mean square error against the true values."""
    found = learned(jax.random.key(0))
    true = jnp.arange(1, PLACES + 1) / (PLACES + 1)
    error = float(jnp.sqrt(jnp.mean((found - true) ** 2)))
    print(f"values are off by {error:.3f}")
    return error


if __name__ == "__main__":
    main()
