"""Training steps of six-layer models, unrolled and scanned, with AdamW and donated state.

Parameters are float32 and the arithmetic is bfloat16. The values `"mixed"` and `"hidden"` of a
layer are named, for `jax.checkpoint_policies.save_only_these_names`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

Layer = Callable[[Any, jax.Array, jax.Array], jax.Array]
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]

DEPTH, WIDTH, HIDDEN, HEADS, VOCAB, BATCH, LENGTH = 6, 512, 2048, 8, 16_384, 8, 512
CHANNELS, SIDE, IMAGES = 64, 64, 16
OPTIMIZER = optax.adamw(1e-4)


def _dropped(x: jax.Array, key: jax.Array, rate: float) -> jax.Array:
    if not rate:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-5)
    return (wide * (1 + scale)).astype(x.dtype)


def _feed_forward(w: Any, x: jax.Array, key: jax.Array, rate: float) -> jax.Array:
    y = jax.nn.gelu(checkpoint_name(_norm(x, w["norm"]) @ w["up"], "hidden"))
    return x + _dropped(y @ w["down"], key, rate)


def _attention(w: Any, x: jax.Array, key: jax.Array, rate: float) -> jax.Array:
    batch, length, width = x.shape
    heads = (_norm(x, w["norm"]) @ w["heads"]).reshape(batch, length, 3, HEADS, width // HEADS)
    query, keys, value = (heads[:, :, i] for i in range(3))
    mixed = jax.nn.dot_product_attention(query, keys, value, is_causal=True)
    mixed = checkpoint_name(mixed.reshape(x.shape), "mixed")
    return x + _dropped(mixed @ w["out"], key, rate)


def perceptron(w: Any, x: jax.Array, key: jax.Array, rate: float) -> jax.Array:
    """A residual layer of two products."""
    return _feed_forward(w, x, key, rate)


def gpt(w: Any, x: jax.Array, key: jax.Array, rate: float) -> jax.Array:
    """A layer of a GPT: attention, then two products."""
    first, second = jax.random.split(key)
    x = _attention(w["attention"], x, first, rate)
    return _feed_forward(w["feed_forward"], x, second, rate)


def convolution(w: Any, x: jax.Array, key: jax.Array, rate: float) -> jax.Array:
    """A residual layer of two 3 x 3 convolutions of images, channels last."""
    numbers = "NHWC", "HWIO", "NHWC"
    conv = lambda y, k: lax.conv_general_dilated(y, k, (1, 1), "SAME", dimension_numbers=numbers)
    y = jax.nn.silu(checkpoint_name(conv(_norm(x, w["norm"]), w["up"]), "hidden"))
    return x + _dropped(conv(y, w["down"]), key, rate)


def _shapes(layer: Any) -> Any:
    """Return the shapes of the parameters of one layer."""
    feed_forward = {"norm": (WIDTH,), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    attention = {"norm": (WIDTH,), "heads": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH)}
    kernel = 3, 3, CHANNELS, CHANNELS
    return {
        perceptron: feed_forward,
        gpt: {"attention": attention, "feed_forward": feed_forward},
        convolution: {"norm": (CHANNELS,), "up": kernel, "down": kernel},
    }[layer]


# Layers by name, with the rate of dropout. Each is measured unrolled and scanned.
LAYERS: dict[str, tuple[Any, float]] = {
    "perceptrons": (perceptron, 0.0),
    "perceptrons, dropout": (perceptron, 0.1),
    "GPT": (gpt, 0.0),
    "GPT, dropout": (gpt, 0.1),
    "convolutions": (convolution, 0.0),
    "convolutions, dropout": (convolution, 0.1),
}


def step_of(
    name: str, scanned: bool, value_and_grad: Any, around_layer: Wrap, around_loss: Wrap
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a training step, and the types of its arguments: state, batch, random key."""
    kind, rate = LAYERS[name]
    layer = around_layer(functools.partial(_cast, kind, rate))

    def loss(params: Any, batch: jax.Array, key: jax.Array) -> jax.Array:
        images = kind is convolution
        x = batch if images else params["embed"][batch[:, :-1]]
        x, keys = x.astype(jnp.bfloat16), jax.random.split(key, DEPTH)
        if scanned:
            x, _ = lax.scan(
                lambda x, wk: (layer(wk[0], x, wk[1]), None), x, (params["layers"], keys)
            )
        else:
            for i, w in enumerate(params["layers"]):
                x = layer(w, x, keys[i])
        if images:
            return jnp.mean(x.astype(jnp.float32) ** 2)
        logits = (x @ params["embed"].T.astype(x.dtype)).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    def step(state: Any, batch: jax.Array, key: jax.Array) -> tuple[Any, jax.Array]:
        params, moments = state
        value, grads = value_and_grad(around_loss(loss))(params, batch, key)
        updates, moments = OPTIMIZER.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return step, jax.eval_shape(functools.partial(_arguments, kind, scanned))


def _cast(kind: Any, rate: float, w: Any, x: jax.Array, key: jax.Array) -> jax.Array:
    """Run a layer with its parameters in the dtype of `x`."""
    return kind(jax.tree.map(lambda leaf: leaf.astype(x.dtype), w), x, key, rate)


def _arguments(kind: Any, scanned: bool) -> tuple[Any, ...]:
    """Return arguments of the step; traced for their types only."""
    zeros = lambda *stack: jax.tree.map(
        lambda shape: jnp.zeros((*stack, *shape)),
        _shapes(kind),
        is_leaf=lambda s: isinstance(s, tuple),
    )
    params: dict[str, Any] = {
        "layers": zeros(DEPTH) if scanned else [zeros() for _ in range(DEPTH)]
    }
    batch = jnp.zeros((IMAGES, SIDE, SIDE, CHANNELS))
    if kind is not convolution:
        params["embed"] = jnp.zeros((VOCAB, WIDTH))
        batch = jnp.zeros((BATCH, LENGTH + 1), jnp.int32)
    return (params, OPTIMIZER.init(params)), batch, jax.random.key(0)
