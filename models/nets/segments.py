"""Segments, positions and weights of rows that hold several packed documents."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def unpacked(marked: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the tokens, and options of `Decoder.loss` that keep documents independent.

    Args:
      marked: integers `[B, T + 1]`, where the first token of a document is stored as `~token`.
        An unsigned dtype has no marks: each row is one document, and there are no options.

    Returns:
      The tokens, int32 `[B, T + 1]`, and a dictionary with:
        `segments`, int32 `[B, T]`: the number of each input token's document in its row;
        `positions`, int32 `[B, T]`: the position of each input token in its document, from 0;
        `weights`, float32 `[B, T]`: 0 where the next token begins a document, else 1.
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
