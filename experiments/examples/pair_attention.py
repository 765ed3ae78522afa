"""Attention on pairs, as in models of proteins: cubic memory, under a budget.

Each of N x N pairs attends to the N pairs in its row, so scores take N³ numbers for each head. The
budget keeps the peak below half of `jax.grad`'s.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import xform

SIZE, WIDTH, HEADS, LAYERS = 64, 32, 4, 4
SHARE = 0.4


def init(key: jax.Array) -> dict[str, jax.Array]:
    """Return the weights of all layers."""
    shapes = {"qkv": (WIDTH, 3 * WIDTH), "bias": (WIDTH, HEADS), "out": (WIDTH, WIDTH),
              "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}  # fmt: skip
    keys = jax.random.split(key, len(shapes))
    return {name: jax.random.normal(k, (LAYERS, *s)) / s[0] ** 0.5
            for k, (name, s) in zip(keys, shapes.items(), strict=True)}  # fmt: skip


def normed(z: jax.Array) -> jax.Array:
    """Divide each pair by its root mean square."""
    return z * jax.lax.rsqrt(jnp.mean(z**2, -1, keepdims=True) + 1e-6)


def layer(z: jax.Array, p: dict[str, jax.Array]) -> tuple[jax.Array, None]:
    """Apply attention along the rows of pairs `[N, N, D]`, biased by the third side, and an MLP."""
    y = normed(z)
    q, k, v = jnp.split((y @ p["qkv"]).reshape(SIZE, SIZE, HEADS, -1), 3, -1)
    scores = jnp.einsum("ijhd,ikhd->hijk", q, k) / q.shape[-1] ** 0.5
    bias = jnp.einsum("jkd,dh->hjk", y, p["bias"])[:, None]
    weights = jax.nn.softmax(scores + bias)
    z = z + jnp.einsum("hijk,ikhd->ijhd", weights, v).reshape(z.shape) @ p["out"]
    return z + jax.nn.gelu(normed(z) @ p["up"]) @ p["down"], None


def loss(params: Any, z: jax.Array) -> jax.Array:
    """Compute a number from all pairs."""
    return jnp.mean(jax.lax.scan(layer, z, params)[0] ** 2)


def main() -> tuple[float, float]:
    """Return the plan's bytes relative to `jax.grad`'s, and its recomputed work."""
    args = init(jax.random.key(0)), jax.random.normal(jax.random.key(1), (SIZE, SIZE, WIDTH))
    usual = xform.memory_analysis(jax.value_and_grad(loss), *args).total_bytes
    plan = xform.plan(loss, *args, policy=xform.policies.budget(int(SHARE * usual)))
    share, again = (plan.compiled_bytes or 0) / usual, plan.recompute_flops / plan.forward_flops
    ours, theirs = (jax.jit(g)(*args) for g in (xform.grad(loss, policy=plan), jax.grad(loss)))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert jnp.allclose(a, b, rtol=1e-3, atol=1e-6)
    print(f"{share:.2f} of {usual:,} bytes, {again:.2f} of a forward pass more")
    return share, again


if __name__ == "__main__":
    main()
