"""Modules of Flax NNX with every kind of state, and a comparison of two libraries on them."""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import xform

X = jnp.sin(jnp.arange(12.0).reshape(4, 3))
GRAPH = {"graph": True, "graph_updates": False}
TREE = {"graph": False}
MODES = pytest.mark.parametrize("modes", [{}, GRAPH, TREE], ids=["updates", "graph", "tree"])


class Mlp(nnx.Module):
    """A module with every kind of state: parameters, statistics, and optional random counters."""

    def __init__(self, *, norm: bool = True, dropout: float = 0.0, seed: int = 0):
        rngs = nnx.Rngs(seed)
        self.enter = nnx.Linear(3, 5, rngs=rngs)
        self.norm = nnx.BatchNorm(5, rngs=rngs) if norm else None
        self.dropout = nnx.Dropout(dropout, rngs=rngs) if dropout else None
        self.leave = nnx.Linear(5, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jnp.tanh(self.enter(x))
        x = x if self.norm is None else self.norm(x)
        x = x if self.dropout is None else self.dropout(x)
        return self.leave(x)


class Tied(nnx.Module):
    """One Param with two owners, and one submodule with two."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Linear(3, 3, rngs=rngs)
        self.again = self.embed
        self.head = nnx.Linear(3, 3, use_bias=False, rngs=rngs)
        self.head.kernel = self.embed.kernel

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(jnp.tanh(self.again(jnp.sin(self.embed(x)))))


class Plain(nnx.Module):
    """A module whose Variables are all floats, so trees of it can be differentiated."""

    def __init__(self):
        self.w = nnx.Param(jnp.arange(3.0))
        self.calls = nnx.BatchStat(jnp.float32(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] += 1
        return jnp.tanh(x @ self.w[...]) * self.calls[...]


def loss(model: nnx.Module, x: jax.Array) -> jax.Array:
    return jnp.mean(model(x) ** 2)


def same(actual: Any, expected: Any) -> None:
    """Check equal structure, types and values; keys by their data, float0 by its shape."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)

    def data(x: Any) -> Any:
        if jax.dtypes.issubdtype(
            jnp.asarray(x).dtype if x is None else x.dtype, jax.dtypes.prng_key
        ):
            return jax.random.key_data(x)
        return np.zeros(np.shape(x), np.bool_) if x.dtype == jax.dtypes.float0 else x

    chex.assert_trees_all_close(
        jax.tree.map(data, actual), jax.tree.map(data, expected), rtol=1e-5, atol=1e-6
    )


def compare(door: str, f: Callable[..., Any], build: Callable[[], Any], **options: Any) -> Any:
    """Run `xform.flax.<door>` and `nnx.<door>` twice; compare results and state."""
    ours, theirs = build(), build()
    for _ in range(2):
        actual = getattr(xform.flax, door)(f, **options)(*ours)
        expected = getattr(nnx, door)(f, **options)(*theirs)
        same(actual, expected)
        same(nnx.state(ours), nnx.state(theirs))
    return actual
