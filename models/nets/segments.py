"""Read rows of tokens that hold several packed documents.

A row marks the first token of each document. From these marks, `unpacked` computes the segment
(document) and the position of each token. With them, the model keeps the documents independent.
"""

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
    input_begins = begins[:, :-1]
    indices = jnp.arange(input_begins.shape[1], dtype=jnp.int32)
    indices = jnp.broadcast_to(indices, input_begins.shape)
    starts = jax.lax.cummax(jnp.where(input_begins, indices, 0), axis=1)
    options = {
        "segments": jnp.cumsum(input_begins, axis=1, dtype=jnp.int32),
        "positions": indices - starts,
        "weights": 1.0 - begins[:, 1:].astype(jnp.float32),
    }
    return jnp.where(begins, ~marked, marked).astype(jnp.int32), options
