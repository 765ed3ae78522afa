"""Train an LSTM through 10,000 steps, in a twentieth of the memory of saving everything.

The task is to decide at the end which of two marks came first, thousands of steps before. So
gradients have to pass through all steps. A budget stores some states; the others are recomputed.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import xform

STEPS, WIDTH, BATCH = 10_000, 32, 8


def init(key: jax.Array) -> dict[str, jax.Array]:
    """Return weights. Forget gates start open, and stay open over all steps."""
    keys = jax.random.split(key, 3)
    bias = jnp.zeros(4 * WIDTH).at[WIDTH : 2 * WIDTH].set(9.0)
    return {
        "x": jax.random.normal(keys[0], (2, 4 * WIDTH)),
        "h": jax.random.normal(keys[1], (WIDTH, 4 * WIDTH)) / WIDTH,
        "b": bias,
        "out": jax.random.normal(keys[2], (WIDTH,)) / WIDTH**0.5,
    }


def loss(p: dict[str, jax.Array], xs: jax.Array, labels: jax.Array) -> jax.Array:
    """Compute the logistic loss of the first mark's kind."""

    def step(state: Any, x: jax.Array) -> tuple[Any, None]:
        h, c = state
        i, f, g, o = jnp.split(x @ p["x"] + h @ p["h"] + p["b"], 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i - 4) * jnp.tanh(g)
        return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

    zero = jnp.zeros((BATCH, WIDTH))
    (h, _), _ = jax.lax.scan(step, (zero, zero), xs)
    return jnp.mean(jnp.logaddexp(0.0, -labels * (h @ p["out"])))


def main() -> tuple[float, float]:
    """Return the bytes relative to saving everything, and the largest relative difference."""
    labels = jnp.where(jnp.arange(BATCH) % 2 == 0, 1.0, -1.0)
    xs = jnp.zeros((STEPS, BATCH, 2)).at[100, :, 0].set(labels).at[STEPS // 2, :, 1].set(1.0)
    args = init(jax.random.key(0)), xs, labels
    everything = xform.plan(loss, *args, policy=xform.policies.save_everything)
    budget = xform.policies.budget(everything.saved_bytes // 20, of="saved")
    plan = xform.plan(loss, *args, policy=budget)
    ours, theirs = (jax.jit(xform.grad(loss, policy=p))(*args) for p in (plan, everything))
    apart = max(
        float(jnp.abs(a - b).max() / jnp.abs(b).max())
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    )
    share = (plan.compiled_bytes or 0) / (everything.compiled_bytes or 1)
    print(f"{share:.3f} of {everything.compiled_bytes:,} bytes; gradients within {apart:.0e}")
    return share, apart


if __name__ == "__main__":
    main()
