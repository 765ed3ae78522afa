"""Transformers in Flax Linen, Equinox and Haiku, with names that were added by hand."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import haiku as hk  # pyright: ignore[reportMissingImports]
import jax
import jax.numpy as jnp
from flax import linen
from jax.ad_checkpoint import checkpoint_name

from experiments.names.decoders import BATCH, DEPTH, LENGTH, UNROLLED_DEPTH, WIDTH, Model

X = jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), jnp.float32)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, heads: int = 4) -> jax.Array:
    """Return attention of `[B, T, D]`."""
    split = lambda x: x.reshape(*x.shape[:-1], heads, -1)
    return jax.nn.dot_product_attention(*map(split, (q, k, v)), is_causal=True).reshape(q.shape)


class LinenBlock(linen.Module):
    """A transformer layer, called as the body of a scan."""

    @linen.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        norm = linen.LayerNorm()(x)
        q, k, v = (
            checkpoint_name(linen.Dense(WIDTH)(norm), f"{name}_proj")
            for name in ("query", "key", "value")
        )
        x = x + checkpoint_name(linen.Dense(WIDTH)(attend(q, k, v)), "out_proj")
        up = checkpoint_name(linen.Dense(4 * WIDTH)(linen.LayerNorm()(x)), "mlpwi")
        return x + linen.Dense(WIDTH)(linen.gelu(up)), None


def flax() -> Model:
    """Return a Linen transformer, scanned by `nn.scan` with `nn.remat`."""

    def model(policy: Any) -> Any:
        block = linen.remat(LinenBlock, policy=policy, prevent_cse=False)
        in_axes: Any = linen.broadcast
        scanned = linen.scan(
            block, {"params": 0}, split_rngs={"params": True}, in_axes=in_axes, length=DEPTH
        )
        return scanned()

    def gradient(params: Any, x: Any, policy: Any) -> Any:
        loss = lambda params: jnp.mean(model(policy).apply(params, x, None)[0] ** 2)
        return jax.grad(loss)(params)

    params = jax.eval_shape(lambda x: model(None).init(jax.random.key(0), x, None), X)
    return Model(gradient, (params, X), unrolled=False)


class EquinoxBlock(eqx.Module):
    """A gated MLP layer with a residual connection."""

    gate: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    norm: eqx.nn.LayerNorm

    def __init__(self, key: jax.Array):
        keys = jax.random.split(key, 3)
        self.gate, self.up = (eqx.nn.Linear(WIDTH, 2 * WIDTH, key=k) for k in keys[:2])
        self.down = eqx.nn.Linear(2 * WIDTH, WIDTH, key=keys[2])
        self.norm = eqx.nn.LayerNorm(WIDTH)

    def __call__(self, x: jax.Array) -> jax.Array:
        each = lambda f, x: jax.vmap(jax.vmap(f))(x)
        norm = each(self.norm, x)
        gate = checkpoint_name(each(self.gate, norm), "mlpwi_0")
        up = checkpoint_name(each(self.up, norm), "mlpwi_1")
        return x + checkpoint_name(each(self.down, jax.nn.silu(gate) * up), "mlpwo")


def equinox() -> Model:
    """Return a stack of Equinox layers, unrolled, with `eqx.filter_checkpoint`."""
    keys = [*jax.random.split(jax.random.key(0), UNROLLED_DEPTH)]
    blocks = eqx.filter_eval_shape(lambda: [EquinoxBlock(key) for key in keys])

    def gradient(blocks: Any, x: Any, policy: Any) -> Any:
        def loss(blocks: Any) -> Any:
            y = x
            for block in blocks:
                y = eqx.filter_checkpoint(lambda b, y: b(y), policy=policy)(block, y)
            return jnp.mean(y**2)

        return jax.grad(loss)(blocks)

    return Model(gradient, (blocks, X), unrolled=True)


def haiku() -> Model:
    """Return a Haiku transformer, unrolled, with `hk.remat`."""

    def block(x: jax.Array) -> jax.Array:
        norm = hk.LayerNorm(-1, True, True)(x)
        q, k, v = (
            checkpoint_name(hk.Linear(WIDTH)(norm), f"{name}_proj")
            for name in ("query", "key", "value")
        )
        x = x + checkpoint_name(hk.Linear(WIDTH)(attend(q, k, v)), "out_proj")
        up = checkpoint_name(hk.Linear(4 * WIDTH)(hk.LayerNorm(-1, True, True)(x)), "mlpwi")
        return x + hk.Linear(WIDTH)(jax.nn.gelu(up))

    def model(policy: Any) -> Any:
        def run(x: jax.Array) -> jax.Array:
            for _ in range(UNROLLED_DEPTH):
                x = hk.remat(block, policy=policy)(x)
            return jnp.mean(x**2)

        return hk.without_apply_rng(hk.transform(run))

    def gradient(params: Any, x: Any, policy: Any) -> Any:
        return jax.grad(model(policy).apply)(params, x)

    params = jax.eval_shape(model(None).init, jax.random.key(0), X)
    return Model(gradient, (params, X), unrolled=True)
