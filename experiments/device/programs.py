"""Training steps of two language models in plain JAX: a GPT-2, unrolled, and a Llama, scanned.

Parameters are float32 and the arithmetic is bfloat16. The optimizer is Optax's AdamW.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

Layer = Callable[[Any, jax.Array], jax.Array]
OPTIMIZER = optax.adamw(1e-4)


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of a model and of its batch.

    Attributes:
      vocab: number of tokens of the vocabulary.
      width: length of a token's vector.
      depth: number of layers.
      heads, kv_heads: heads of queries, and of keys and values.
      hidden: width of the feed-forward part.
      batch, length: sequences of a batch, and tokens of a sequence.
      gated: True for Llama's layer, in a scan over stacked parameters; False for GPT-2's, unrolled.
    """

    vocab: int
    width: int
    depth: int
    heads: int
    kv_heads: int
    hidden: int
    batch: int
    length: int
    gated: bool


SIZES = {
    "GPT-2 124M": Size(50_257, 768, 12, 12, 12, 3072, 16, 1024, gated=False),
    "Llama 1.1B": Size(32_000, 2048, 22, 32, 4, 5632, 4, 2048, gated=True),
    "GPT-2, tiny": Size(256, 64, 2, 2, 2, 256, 4, 64, gated=False),
    "Llama, tiny": Size(256, 64, 3, 4, 2, 176, 4, 64, gated=True),
}


def parameters(size: Size, key: jax.Array) -> Any:
    """Return random parameters. If the layers are scanned, their parameters are stacked."""
    d, kv = size.width, size.width // size.heads * size.kv_heads
    shapes: dict[str, tuple[int, ...]] = {
        "norm": (2, d),
        "query": (d, d),
        "key_value": (d, 2 * kv),
        "out": (d, d),
        "up": (d, (1 + size.gated) * size.hidden),
        "down": (size.hidden, d),
    }

    def normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return 0.02 * jax.random.normal(key, shape)

    def layer(key: jax.Array) -> dict[str, jax.Array]:
        keys = jax.random.split(key, len(shapes))
        return {name: normal(k, shapes[name]) for name, k in zip(shapes, keys, strict=True)}

    embed, positions, layers = jax.random.split(key, 3)
    keys = jax.random.split(layers, size.depth)
    return {
        "embed": normal(embed, (size.vocab, d)),
        "positions": normal(positions, (size.length, d)),
        "layers": jax.vmap(layer)(keys) if size.gated else [layer(k) for k in keys],
    }


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Return the RMS norm of `x`, computed in float32."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-5)
    return (wide * (1 + scale)).astype(x.dtype)


def layer_of(size: Size) -> Layer:
    """Return the function of one layer: attention, then a feed-forward part, each after a norm."""
    head = size.width // size.heads

    def layer(w: Any, x: jax.Array) -> jax.Array:
        w = jax.tree.map(lambda leaf: leaf.astype(x.dtype), w)
        batch, length, _ = x.shape
        y = norm(x, w["norm"][0])
        query = (y @ w["query"]).reshape(batch, length, size.heads, head)
        key, value = jnp.split(y @ w["key_value"], 2, axis=-1)
        key = key.reshape(batch, length, size.kv_heads, head)
        value = value.reshape(batch, length, size.kv_heads, head)
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        x = x + mixed.reshape(x.shape) @ w["out"]
        y = norm(x, w["norm"][1]) @ w["up"]
        if size.gated:
            gate, y = jnp.split(y, 2, axis=-1)
            y = jax.nn.silu(gate) * y
        else:
            y = jax.nn.gelu(y)
        return x + y @ w["down"]

    return layer


def loss_of(size: Size, remat: Callable[[Layer], Layer]) -> Callable[[Any, jax.Array], jax.Array]:
    """Return the mean cross-entropy of the next token. `remat` wraps the function of a layer."""
    layer = remat(layer_of(size))

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = (params["embed"][inputs] + params["positions"]).astype(jnp.bfloat16)
        if size.gated:
            x, _ = jax.lax.scan(lambda x, w: (layer(w, x), None), x, params["layers"])
        else:
            for w in params["layers"]:
                x = layer(w, x)
        logits = (x @ params["embed"].T.astype(x.dtype)).astype(jnp.float32)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, targets))

    return loss


def step_of(
    size: Size, value_and_grad: Any, remat: Callable[[Layer], Layer]
) -> Callable[[Any, jax.Array], tuple[Any, jax.Array]]:
    """Return a training step: state and tokens to the new state and the loss."""
    loss = loss_of(size, remat)

    def step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        params, moments = state
        value, grads = value_and_grad(loss)(params, tokens)
        updates, moments = OPTIMIZER.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return step


def state_and_tokens(size: Size) -> tuple[Any, jax.Array]:
    """Return parameters, moments of AdamW and a random batch. It can be traced for shapes."""
    one, other = jax.random.split(jax.random.key(0))
    params = parameters(size, one)
    tokens = jax.random.randint(other, (size.batch, size.length + 1), 0, size.vocab)
    return (params, OPTIMIZER.init(params)), tokens
