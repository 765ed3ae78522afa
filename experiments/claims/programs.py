"""The programs whose derivatives are measured: losses of weights and a batch, in plain JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Loss = Callable[[Any, Any], jax.Array]
Made = tuple[Loss, tuple[Any, Any]]


def normal(*shape: int, seed: int = 0) -> jax.Array:
    """Return random numbers of a size that keeps activations near 1."""
    fan = 1 if len(shape) < 2 else shape[-2] if len(shape) == 2 else shape[0] * shape[1] * shape[2]
    return jax.random.normal(jax.random.key(seed), shape) * fan**-0.5


def mlp(width: int = 256, depth: int = 4, batch: int = 128) -> Made:
    """Return dense layers of one width."""
    ws = [normal(width, width, seed=i) for i in range(depth)]

    def loss(ws: Sequence[jax.Array], x: jax.Array) -> jax.Array:
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    return loss, (ws, normal(batch, width, seed=99))


def cnn(width: int = 32, depth: int = 4, batch: int = 8, size: int = 32) -> Made:
    """Return three by three convolutions."""
    ws = [normal(3, 3, width, width, seed=i) for i in range(depth)]
    names = ("NHWC", "HWIO", "NHWC")

    def loss(ws: Sequence[jax.Array], x: jax.Array) -> jax.Array:
        for w in ws:
            x = jax.nn.relu(lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=names))
        return jnp.mean(x**2)

    return loss, (ws, jax.random.normal(jax.random.key(9), (batch, size, size, width)))


HEADS = 4


def attended(x: jax.Array, p: dict[str, jax.Array]) -> jax.Array:
    """Compute causal attention of normalized rows `[B, T, D]`."""
    rows = (normed(x) @ p["qkv"]).reshape(*x.shape[:2], HEADS, -1)
    q, k, v = jnp.split(rows, 3, -1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e30))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ p["out"]


def normed(x: jax.Array) -> jax.Array:
    """Divide rows by their root mean square."""
    return x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def scanned(mark: str = "none") -> Loss:
    """Return a scanned transformer; `mark` puts `jax.checkpoint` around blocks or attention."""
    attention = jax.checkpoint(attended) if mark == "attention" else attended

    def block(x: jax.Array, p: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        x = x + attention(x, p)
        return x + jax.nn.gelu(normed(x) @ p["up"]) @ p["down"], None

    body = jax.checkpoint(block) if mark == "block" else block
    return lambda p, x: jnp.mean(lax.scan(body, x, p)[0] ** 2)


def scanned_inputs(width: int, depth: int, batch: int, length: int) -> tuple[Any, jax.Array]:
    """Return the weights of all layers, stacked, and a batch."""
    parts = {"qkv": (width, 3 * width), "out": (width, width),
             "up": (width, 4 * width), "down": (4 * width, width)}  # fmt: skip
    layers = {n: jnp.stack([normal(*s, seed=i) for i in range(depth)]) for n, s in parts.items()}
    return layers, normal(batch, length, width, seed=99)


def transformer(width: int = 128, depth: int = 2, batch: int = 4, length: int = 128) -> Made:
    """Return the same transformer with its inputs."""
    return scanned(), scanned_inputs(width, depth, batch, length)


def elementwise(size: int = 2**18) -> Made:
    """Return functions of one element, with a weight for each."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        for _ in range(4):
            x = jnp.sin(x * w)
        return jnp.sum(x)

    return loss, (jnp.linspace(0.5, 1.5, size), jnp.linspace(-1.0, 1.0, size))


def total_bytes(compiled: Any) -> int:
    """Return the bytes of arguments, results and temporary buffers of a compiled program."""
    memory = compiled.memory_analysis()
    sizes = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return sizes + memory.temp_size_in_bytes - memory.alias_size_in_bytes


def types(tree: Any) -> Any:
    """Return the shapes and dtypes of arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


PROGRAMS: dict[str, Callable[[], Made]] = {
    "MLP": mlp,
    "CNN": cnn,
    "transformer": transformer,
    "elementwise": elementwise,
}
