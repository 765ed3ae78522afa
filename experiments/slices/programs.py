"""Losses whose peak is in large intermediate values, and the bytes that slices should reach."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments.unmodified import programs as unmodified

MIB = 2**20
# Makes a loss and its arguments; the first argument is differentiated.
Made = tuple[Callable[..., Any], tuple[Any, ...]]


class Program(NamedTuple):
    """A program, and how much memory its gradient may take.

    Attributes:
      make: makes the loss and its arguments, from a folder of other people's programs.
      bar: what slices should reach, as text.
      share: the budget of the temporary bytes, as a share of jax.grad's.
      total: the budget of all bytes, instead of `share`.
      foreign: whether `make` needs the folder.
    """

    make: Callable[[Path], Made]
    bar: str
    share: float | None = None
    total: float | None = None
    foreign: bool = False


def normal(*shape: int, seed: int = 0) -> Any:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), "float32")


def energy(_: Path) -> Made:
    """Return the energy of 800 particles, a sum over pairs."""

    def loss(x: Any) -> Any:
        r2 = jnp.sum((x[:, None] - x[None]) ** 2, -1) + jnp.eye(len(x))
        return jnp.sum(1 / r2**3 - 1 / r2) / 2

    return loss, (3 * normal(800, 3),)


def kernel(_: Path) -> Made:
    """Return the squared norm of a Gaussian kernel of 1024 and 1024 points, times a vector."""

    def loss(w: Any, x: Any, y: Any) -> Any:
        pair = lambda a, b: jnp.exp(-jnp.sum((a - b) ** 2))
        return jnp.sum((jax.vmap(lambda a: jax.vmap(lambda b: pair(a, b))(y))(x) @ w) ** 2)

    return loss, (normal(1024, seed=2), normal(1024, 8), normal(1024, 8, seed=1))


def patches(_: Path) -> Made:
    """Return a loss of 8192 windows of a signal, which overlap."""

    def loss(w: Any, x: Any) -> Any:
        windows = x[jnp.arange(8192)[:, None] + jnp.arange(64)]
        return jnp.mean(jnp.tanh(windows @ w).sum(-1) ** 2)

    return loss, (normal(64, 64) / 8, normal(8192 + 63))


def gpt(_: Path, scanned: bool) -> Made:
    """Return a transformer of six layers of width 256 with dropout, and 16384 words."""
    layers, words, width, heads, batch, length = 6, 16_384, 256, 4, 8, 256

    def norm(x: Any) -> Any:
        x = x - x.mean(-1, keepdims=True)
        return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)

    def dropout(x: Any, key: Any) -> Any:
        return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0)

    def layer(h: Any, w: Any, key: Any) -> Any:
        keys = jax.random.split(key, 3)
        x = norm(h) @ w["qkv"]
        q, k, v = jnp.split(x.reshape(batch, length, 3 * heads, width // heads), 3, 2)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (width // heads) ** -0.5
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
        probabilities = dropout(jax.nn.softmax(scores, -1), keys[0])
        x = jnp.einsum("bhqk,bkhd->bqhd", probabilities, v).reshape(batch, length, width)
        h = h + dropout(x @ w["o"], keys[1])
        return h + dropout(jax.nn.gelu(norm(h) @ w["up"]) @ w["down"], keys[2])

    def loss(p: Any, tokens: Any, key: Any) -> Any:
        h, keys = p["words"][tokens[:, :-1]], jax.random.split(key, layers)
        if scanned:
            h = lax.scan(lambda h, at: (layer(h, *at), None), h, (p["layers"], keys))[0]
        else:
            for i in range(layers):
                h = layer(h, jax.tree.map(lambda w, i=i: w[i], p["layers"]), keys[i])
        logits = norm(h) @ p["words"].T
        picked = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)

    shapes = {"qkv": (width, 3 * width), "o": (width, width), "up": (width, 4 * width),
              "down": (4 * width, width)}  # fmt: skip
    stacks = {name: normal(layers, *shape, seed=i) / 20
              for i, (name, shape) in enumerate(shapes.items())}  # fmt: skip
    tokens = jax.random.randint(jax.random.key(1), (batch, length + 1), 0, words)
    return loss, ({"words": normal(words, width) / 16, "layers": stacks}, tokens, jax.random.key(2))


# Some budgets are smaller than the bars, because the default already reaches these.
PROGRAMS = {
    "energy of 800 particles": Program(energy, "1.5 MiB in all", total=1.5 * MIB),
    "pairwise kernel": Program(kernel, "5 MiB in all", total=MIB),
    "overlapping patches": Program(patches, "0.5", share=0.5),
    "GPT, six layers": Program(functools.partial(gpt, scanned=False), "0.35", share=0.35),
    "GPT, six scanned layers": Program(functools.partial(gpt, scanned=True), "0.35", share=0.35),
    "Flax gemma": Program(unmodified.gemma, "0.35", share=0.35, foreign=True),
    "Flax lm1b": Program(unmodified.lm1b, "0.35", share=0.35, foreign=True),
    "Flax vae": Program(unmodified.vae, "0.7", share=0.6, foreign=True),
    "Haiku transformer": Program(unmodified.haiku, "0.6", share=0.25, foreign=True),
    "Equinox BERT": Program(unmodified.bert, "0.6", share=0.35, foreign=True),
}
