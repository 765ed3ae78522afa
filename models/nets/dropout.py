"""Dropout by a key: without one nothing is dropped."""

from __future__ import annotations

import jax
from flax import nnx


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zero each element with probability `rate`, and make the others larger by as much."""
    return x if key is None else nnx.Dropout(rate)(x, rngs=key)
