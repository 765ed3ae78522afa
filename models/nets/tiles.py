"""Run a layer that treats each token alone for a few tokens at a time.

Source: Bekman et al., "Arctic Long Sequence Training", arXiv:2506.13996, section 3.2 (TiledMLP).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

import xform
from models.nets.axes import constrained, context_devices


def by_tokens(f: Callable[[jax.Array], jax.Array], x: jax.Array, chunk: int) -> jax.Array:
    """Apply `f` to `chunk` tokens of each sequence at a time, and recompute it for its derivative.

    If devices share each sequence, each takes `chunk` of its own tokens at a time.

    Args:
      f: maps `[B, ..., D]` to the same shape, and treats each token alone.
      x: `[B, T, D]`.
      chunk: the number of tokens; 0 for all.

    Returns:
      `f(x)`, whose intermediate values exist for `chunk` tokens only.
    """
    batch, tokens, width = x.shape
    devices = context_devices()
    if tokens % devices:
        devices = 1
    local = tokens // devices
    if not 0 < chunk < local:
        return f(x)
    x = x.reshape(batch, devices, local, width)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, -local % chunk), (0, 0)))
    tiles = jnp.moveaxis(x.reshape(batch, devices, -1, chunk, width), 2, 0)
    tiles = constrained(tiles, None, "batch", "sequence", None, None)
    recomputed = xform.remat(lambda tile: f(tile))
    _, y = jax.lax.scan(lambda _, tile: (None, recomputed(tile)), None, tiles)
    y = jnp.moveaxis(y, 0, 2).reshape(batch, devices, -1, width)[:, :, :local]
    return constrained(y.reshape(batch, tokens, width), "batch", "sequence", None)
