"""What a decoder is told of rows into which several documents are packed."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def unpacked(marked: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Tokens, and options of a decoder's loss by which each document is read as if it were alone.

    Args:
      marked: integers `[B, T + 1]`; a token that begins a document is there as `~token`. Of an
        unsigned type there are no marks, and no options: a row is one document.

    Returns:
      Tokens `[B, T + 1]`, int32. And `segments` and `positions`, `[B, T]`, of those that are read:
        positions count from 0 in each document; and `weights` `[B, T]`, float32: 0 where the next
        token begins a document, and is not to be predicted.
    """
    if jnp.issubdtype(marked.dtype, jnp.unsignedinteger):
        return marked.astype(jnp.int32), {}
    begins = marked < 0
    read = begins[:, :-1]
    places = jnp.broadcast_to(jnp.arange(read.shape[1], dtype=jnp.int32), read.shape)
    starts = jax.lax.cummax(jnp.where(read, places, 0), axis=1)
    options = {
        "segments": jnp.cumsum(read, axis=1, dtype=jnp.int32),
        "positions": places - starts,
        "weights": 1.0 - begins[:, 1:].astype(jnp.float32),
    }
    return jnp.where(begins, ~marked, marked).astype(jnp.int32), options
