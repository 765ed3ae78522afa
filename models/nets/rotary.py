"""Rotary positions: the position of a token rotates pairs of elements of its query and its key.

A pair has a frequency, and its angle is the position times the frequency. `Stretch` is Llama 3.1's
scaling of the frequencies for longer contexts.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Stretch:
    """Llama 3.1's scaling of rotary frequencies.

    A frequency with fewer than `low` periods in `context` is divided by `factor`. One with more
    than `high` periods is unchanged. Between the two, the result is a linear blend. `context` is
    the context length of the original training. Source: "The Llama 3 Herd of Models",
    arXiv:2407.21783.
    """

    factor: float = 8.0
    low: float = 1.0
    high: float = 4.0
    context: int = 8192


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Rotary positions (arXiv:2104.09864).

    Attributes:
      base: pair i of E / 2 has the frequency `base ** (-2 i / E)`.
      stretch: the scaling of the frequencies, if any.
    """

    base: float = 10_000.0
    stretch: Stretch | None = None

    def angles(self, positions: jax.Array, head_width: int) -> jax.Array:
        """Map positions `[B, T]` to float32 angles `[B, T, E / 2]`, one per pair of elements."""
        frequencies = self.base ** -(jnp.arange(0, head_width, 2, dtype=jnp.float32) / head_width)
        if self.stretch is not None:
            s = self.stretch
            periods = s.context * frequencies / (2 * math.pi)
            unchanged = jnp.clip((periods - s.low) / (s.high - s.low), 0.0, 1.0)
            frequencies = frequencies * (unchanged + (1 - unchanged) / s.factor)
        return positions[..., None].astype(jnp.float32) * frequencies


def rotate(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Rotate the pairs (i, i + E/2) of `x` `[B, T, heads, E]` by `angles` `[B, T, E / 2]`."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles)[:, :, None, :], jnp.sin(angles)[:, :, None, :]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)
