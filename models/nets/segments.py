"""What a decoder is told of rows into which several documents are packed."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def unpacked(segments: jax.Array) -> dict[str, jax.Array]:
    """Options of a decoder's loss, so that each document is read and judged as if it were alone.

    Args:
      segments: integers `[B, T + 1]`, the document of each token; those of one stand together.

    Returns:
      `segments` and `positions`, `[B, T]`, of the tokens that are read: positions count from 0 in
        each document. And `weights` `[B, T]`, float32: 1 where the next token is of the same
        document, 0 where another begins.
    """
    read, following = segments[:, :-1], segments[:, 1:]
    places = jnp.broadcast_to(jnp.arange(read.shape[1]), read.shape)
    begins = jnp.pad(read[:, 1:] != read[:, :-1], [(0, 0), (1, 0)])
    starts = jax.lax.cummax(jnp.where(begins, places, 0), axis=1)
    weights = (read == following).astype(jnp.float32)
    return {"segments": read, "positions": places - starts, "weights": weights}
