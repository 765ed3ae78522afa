"""A training step of a Llama, written for JAX alone: fsdp over eight devices, scanned or unrolled.

Parameters and both moments of AdamW are float32 and sharded over all devices. The computation is in
bfloat16. `differentiate` is `jax.value_and_grad` or `xform.value_and_grad` with a policy. For JAX
each layer may be a remat region.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from models.nets.attention import attend
from models.nets.loss import cross_entropy

DEVICES, DEPTH, WIDTH, HEADS, KEY_HEADS, HIDDEN, VOCAB = 8, 6, 2048, 16, 4, 5632, 32_000
# Sequences of a batch on all devices, and tokens of a sequence.
BATCH, TOKENS = 16, 2048
# Wraps a layer in a remat region, or returns it.
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]

MESH = AbstractMesh((DEVICES,), ("fsdp",), axis_types=(AxisType.Auto,))
ADAMW = optax.adamw(3e-4, weight_decay=0.1)
_HEAD = WIDTH // HEADS
_SHAPES = {
    "norm": (WIDTH,),
    "query": (WIDTH, HEADS * _HEAD),
    "key": (WIDTH, KEY_HEADS * _HEAD),
    "value": (WIDTH, KEY_HEADS * _HEAD),
    "out": (HEADS * _HEAD, WIDTH),
    "mlp_norm": (WIDTH,),
    "gate": (WIDTH, HIDDEN),
    "up": (WIDTH, HIDDEN),
    "down": (HIDDEN, WIDTH),
}


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-5)
    return (y * scale).astype(x.dtype)


def _rotated(x: jax.Array) -> jax.Array:
    """Return vectors `[B, T, H, E]` with rotary positions."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 10_000.0 ** -(jnp.arange(half) / half)
    cos, sin = (f(angles)[:, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _layer(weights: Any, x: jax.Array) -> jax.Array:
    batch, tokens, _ = x.shape
    w = {name: value.astype(x.dtype) for name, value in weights.items()}
    h = _norm(x, weights["norm"])
    split = lambda y: y.reshape(batch, tokens, -1, _HEAD)
    query, key, value = (split(h @ w[name]) for name in ("query", "key", "value"))
    mixed = attend(_rotated(query), _rotated(key), value, causal=True)
    x = x + mixed.reshape(batch, tokens, -1) @ w["out"]
    h = _norm(x, weights["mlp_norm"])
    return _by_example(x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"])


@jax.custom_vjp
def _tie(weights: Any, x: jax.Array) -> tuple[Any, jax.Array]:
    """Return the arguments; the cotangent of `x` waits at a barrier for those of the weights."""
    return weights, x


_tie.defvjp(
    lambda weights, x: ((weights, x), None), lambda _, cts: tuple(jax.lax.optimization_barrier(cts))
)


def tied(layer: Callable[..., Any]) -> Callable[..., Any]:
    """Compute the gradients of a layer before the backward pass of the layer before it."""
    return lambda weights, x: layer(*_tie(weights, x))


def _by_example(x: jax.Array) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, NamedSharding(MESH, P("fsdp")))


def loss(params: Any, tokens: jax.Array, wrap: Wrap = lambda layer: layer) -> jax.Array:
    """Return the mean loss; `params["layers"]` is a list of layers, or a dict of stacks."""
    with jax.sharding.use_abstract_mesh(MESH):
        x = _by_example(params["embed"].astype(jnp.bfloat16)[tokens[:, :-1]])
        layer, layers = wrap(_layer), params["layers"]
        if isinstance(layers, dict):
            x, _ = jax.lax.scan(lambda x, weights: (layer(weights, x), None), x, layers)
        else:
            for weights in layers:
                x = layer(weights, x)
        return cross_entropy(_norm(x, params["norm"]), params["head"], tokens[:, 1:])


def types(scanned: bool) -> tuple[Any, Any, Any]:
    """Return the types of parameters, optimizer state and tokens, sharded over `MESH`."""

    def weight(name: str, *shape: int) -> jax.ShapeDtypeStruct:
        of_layers = len(shape) - len(_SHAPES[name]) if name in _SHAPES else 0
        spec = P(*[None] * of_layers, "fsdp")
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(MESH, spec))

    stack = (DEPTH,) if scanned else ()
    layer = lambda: {name: weight(name, *stack, *shape) for name, shape in _SHAPES.items()}
    params = {
        "embed": weight("embed", VOCAB, WIDTH),
        "layers": layer() if scanned else [layer() for _ in range(DEPTH)],
        "norm": weight("final", WIDTH),
        "head": weight("head", WIDTH, VOCAB),
    }
    place = lambda x, like: x.update(sharding=like.sharding)
    state = optax.tree.map_params(
        ADAMW,
        place,
        jax.eval_shape(ADAMW.init, params),
        params,
        transform_non_params=lambda x: x.update(sharding=NamedSharding(MESH, P())),
    )
    tokens = jax.ShapeDtypeStruct((BATCH, TOKENS + 1), jnp.int32)
    return params, state, tokens.update(sharding=NamedSharding(MESH, P("fsdp")))


def step(
    differentiate: Callable[..., Any], wrap: Wrap, params: Any, state: Any, tokens: jax.Array
) -> Any:
    """Return new parameters, the new state of AdamW, and the loss."""
    value, grads = differentiate(functools.partial(loss, wrap=wrap))(params, tokens)
    shardings = jax.tree.map(lambda x: x.sharding, types(isinstance(params["layers"], dict))[0])
    grads = jax.lax.with_sharding_constraint(grads, shardings)
    updates, state = ADAMW.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value
