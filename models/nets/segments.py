"""Read rows of tokens that hold several packed documents.

A row marks the first token of each document. From these marks, `unpacked` computes the segment
(document) and the position of each token. With them, the model keeps the documents independent.

If several devices share each row, it is cut into blocks in zigzag order (`models.zigzag`).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from models.zigzag import zigzag_order


def unpacked(marked: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the tokens, and options of `Decoder.loss` that keep documents independent.

    Args:
      marked: integers `[B, T + 1]`, or blocks `[B, 2n, T / 2n + 1]`, where the first token of a
        document is stored as `~token`. An unsigned dtype has no marks: each row is one document.

    Returns:
      The tokens, int32 like `marked`, and a dictionary with:
        `segments`, int32 `[B, T]`: the number of each input token's document in its row;
        `positions`, int32 `[B, T]`: the position of each input token in its document, from 0;
        `weights`, float32 `[B, T]`: 0 where the next token begins a document, else 1.
      Rows without marks have no options, or in blocks only `positions`.
    """
    flat = lambda x: x.reshape(len(x), -1)
    blocks = marked if marked.ndim == 3 else marked[:, None]
    places = _places(blocks.shape)
    if jnp.issubdtype(marked.dtype, jnp.unsignedinteger):
        return marked.astype(jnp.int32), {} if marked.ndim == 2 else {"positions": flat(places)}
    begins = blocks < 0
    inputs = begins[..., :-1]
    segments = _running(jnp.cumsum, jnp.add, inputs.astype(jnp.int32))
    starts = _running(jax.lax.cummax, jnp.maximum, jnp.where(inputs, places, 0))
    options = {
        "segments": flat(segments),
        "positions": flat(places - starts),
        "weights": flat(1.0 - begins[..., 1:].astype(jnp.float32)),
    }
    return jnp.where(marked < 0, ~marked, marked).astype(jnp.int32), options


def _order(blocks: int) -> np.ndarray:
    """Return the number of each block of a row, in zigzag order."""
    return np.array(zigzag_order(blocks // 2) if blocks > 1 else [0])


def _places(shape: tuple[int, ...]) -> jax.Array:
    """Return the place of each input token in its row, int32, for blocks `[B, n, t + 1]`."""
    batch, blocks, size = shape[0], shape[1], shape[2] - 1
    places = _order(blocks)[:, None] * size + np.arange(size)
    return jnp.broadcast_to(jnp.asarray(places, jnp.int32), (batch, blocks, size))


def _running(
    accumulate: Callable[..., jax.Array],
    combine: Callable[[jax.Array, jax.Array], jax.Array],
    x: jax.Array,
) -> jax.Array:
    """Accumulate numbers >= 0 along rows `[B, n, t]` of blocks, which are not in their order.

    Each block is accumulated by itself, and then combined with the result of all earlier blocks.
    """
    within, order = accumulate(x, axis=2), _order(x.shape[1])
    ends = accumulate(within[:, np.argsort(order), -1], axis=1)
    before = jnp.pad(ends, [(0, 0), (1, 0)])[:, :-1][:, order, None]
    return combine(within, before)
