"""Small programs, at least one for each switch of `xform.steering`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import xform
from xform import policies

# A gradient and its arguments.
Program = tuple[Callable[..., Any], tuple[Any, ...]]
f32 = lambda *shape: jax.ShapeDtypeStruct(shape, "float32")
MESH = AbstractMesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
KEY = jax.eval_shape(lambda: jax.random.key(0))


def residual(x: Any, ws: Any) -> Any:
    """One residual layer of a perceptron."""
    up, down = ws
    return x + jax.nn.gelu(x @ up) @ down


def layers(layer: Callable[..., Any], ws: Any, x: Any) -> Any:
    """The mean square after all layers."""
    for w in ws:
        x = layer(x, w)
    return jnp.mean(x**2)


def perceptron(layer: Callable[..., Any], policy: Any = None) -> Program:
    """The gradient of eight residual layers."""
    loss = functools.partial(layers, layer)
    weights = [(f32(256, 1024), f32(1024, 256))] * 8
    return xform.grad(loss, policy=policy), (weights, f32(2048, 256))


def normalized() -> Program:
    """The gradient of residual layers with a normalization before each product."""

    def layer(x: Any, ws: Any) -> Any:
        y = x - x.mean(-1, keepdims=True)
        y = y * lax.rsqrt((y**2).mean(-1, keepdims=True) + 1e-5)
        return x + jax.nn.gelu(y @ ws[0]) @ ws[1]

    return perceptron(layer)


def chain() -> Program:
    """The gradient of layers without residual connections. A policy saves every other layer."""

    def loss(w: Any, x: Any) -> Any:
        for i in range(12):
            x = jax.ad_checkpoint.checkpoint_name(jnp.tanh(x @ w), f"h{i}")
        return jnp.sum(x)

    policy = policies.save_any_names_but_these(*(f"h{i}" for i in range(0, 12, 2)))
    return xform.grad(loss, policy=policy), (f32(256, 256), f32(4096, 256))


def cross_entropy(policy: Any = None) -> Program:
    """The gradient of a loss with large logits, as trainers of language models write it."""

    def loss(ws: Any, x: Any, head: Any, labels: Any) -> Any:
        for w in ws:
            x = x + jax.nn.gelu(x @ w)
        weights = (labels > 0).astype(x.dtype)
        right = jnp.where(labels[:, None] == jnp.arange(head.shape[1]), 0.9, 0.1 / head.shape[1])
        losses = -jnp.sum(right * jax.nn.log_softmax(x @ head), -1)
        return jnp.sum(losses * weights) / jnp.sum(weights)

    labels = jax.ShapeDtypeStruct((8192,), "int32")
    args = [f32(256, 256)] * 2, f32(8192, 256), f32(256, 8192), labels
    return xform.grad(loss, (0, 2), policy=policy), args


def decoder() -> Program:
    """The gradient of a decoder that saves nothing: its last product is recomputed at once."""

    def loss(v: Any, w: Any, x: Any) -> Any:
        return jnp.mean(jax.nn.log_sigmoid(jax.nn.relu(x @ v) @ w))

    gradient = xform.value_and_grad(loss, (0, 1), policy=policies.save_nothing)
    return gradient, (f32(64, 512), f32(512, 784), f32(4096, 64))


def dropout() -> Program:
    """The gradient of layers with dropout."""

    def loss(ws: Any, x: Any, key: Any) -> Any:
        for w, k in zip(ws, jax.random.split(key, len(ws)), strict=True):
            h = jnp.tanh(x @ w)
            x = jnp.where(jax.random.bernoulli(k, 0.5, h.shape), 2 * h, 0)
        return jnp.mean(x**2)

    return xform.grad(loss), ([f32(256, 256)] * 8, f32(2048, 256), KEY)


def leaky() -> Program:
    """The gradient of layers whose activation depends on a sign."""

    def loss(w: Any, x: Any) -> Any:
        for _ in range(8):
            y = x @ w
            x = jnp.where(y > 0, y * 0.5, y * 2.0)
        return jnp.sum(x)

    return xform.grad(loss), (f32(256, 256), f32(8192, 256))


def pooled(activation: Callable[..., Any], pool: Callable[..., Any], init: float) -> Program:
    """The gradient of convolutions with pooling."""

    def loss(ws: Any, x: Any) -> Any:
        for w in ws:
            dims = ("NHWC", "HWIO", "NHWC")
            x = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=dims)
            windows = (1, 2, 2, 1)
            x = lax.reduce_window(activation(x), init, pool, windows, windows, "VALID")
        return jnp.mean(x**2)

    return xform.grad(loss), (
        [f32(3, 3, 3, 32), f32(3, 3, 32, 32), f32(3, 3, 32, 32)],
        f32(16, 64, 64, 3),
    )


def kernels() -> Program:
    """The gradient of convolutions with many features on small images."""

    def loss(ws: Any, x: Any) -> Any:
        for w in ws:
            x = jnp.tanh(lax.conv(x, w, (1, 1), "SAME"))
        return jnp.mean(x**2)

    return xform.grad(loss), ([f32(256, 256, 3, 3)] * 6, f32(4, 256, 8, 8))


def attention() -> Program:
    """The gradient of scanned attention layers in bfloat16, with grouped heads."""
    kv_heads, group, size, tokens = 2, 4, 32, 512
    width = kv_heads * group * size

    def layer(h: Any, p: Any) -> Any:
        q = jnp.einsum("tm,mkgd->tkgd", h, p["q"])
        k, v = jnp.einsum("tm,nmkd->ntkd", h, p["kv"])
        weights = jax.nn.softmax(jnp.einsum("tkgd,skd->kgts", q, k))
        return h + jnp.einsum("kgts,skd,kgdm->tm", weights, v, p["o"]), None

    def loss(params: Any, x: Any) -> Any:
        return jnp.mean(lax.scan(layer, x, params)[0].astype(jnp.float32) ** 2)

    shapes = {"q": (width, kv_heads, group, size), "kv": (2, width, kv_heads, size),
              "o": (kv_heads, group, size, width)}  # fmt: skip
    params = {n: jax.ShapeDtypeStruct((8, *s), jnp.bfloat16) for n, s in shapes.items()}
    x = jax.ShapeDtypeStruct((tokens, width), jnp.bfloat16)
    return xform.grad(loss, policy="save_everything"), (params, x)


def microbatches() -> Program:
    """The gradient of scanned layers, summed over scanned microbatches."""

    def loss(ws: Any, xs: Any) -> Any:
        layer = lambda h, w: (jnp.tanh(h @ w), None)
        part = lambda total, x: (total + jnp.mean(lax.scan(layer, x, ws)[0] ** 2), None)
        return lax.scan(part, 0.0, xs)[0]

    return xform.grad(loss), (f32(12, 256, 256), f32(8, 64, 256))


def sharded() -> Program:
    """The gradient of residual layers, with the batch and the weights on eight devices."""
    split = NamedSharding(MESH, PartitionSpec("fsdp"))

    def loss(ws: Any, x: Any) -> Any:
        ws, x = jax.tree.map(lambda a: lax.with_sharding_constraint(a, split), (ws, x))
        return layers(residual, ws, x)

    return xform.grad(loss), ([(f32(512, 2048), f32(2048, 512))] * 8, f32(32768, 512))
