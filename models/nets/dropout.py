"""Dropout with an explicit random key."""

from __future__ import annotations

import jax
from flax import nnx


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zero each element with probability `rate`, and divide all other elements by `1 - rate`.

    Without a key, return `x` unchanged.
    """
    return x if key is None else nnx.Dropout(rate)(x, rngs=key)
