"""Attention of queries `[B, T, H, E]` to keys and values `[B, S, K, E]` in bounded memory.

B is the batch, T and S are numbers of tokens, H and K numbers of heads, and E is the width of a
head. H / K query heads share a head of keys and values. On a GPU, cuDNN's kernel is used if it
supports the case. It never stores the scores. Elsewhere, also on TPUs,
`jax.nn.dot_product_attention` is plain XLA and makes float32 scores `[B, H, T, S]`. To bound their
memory, it is called for a few queries (a chunk) at a time, and the backward pass recomputes the
scores.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

import xform


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    causal: bool,
    positions: jax.Array | None = None,
    segments: jax.Array | None = None,
    window: int | None = None,
    chunk: int = 256,
) -> jax.Array:
    """Compute the mean of the values, weighted by the softmax of `query . key / sqrt(E)`.

    Args:
      query: `[B, T, H, E]`.
      key: `[B, S, K, E]`, where K divides H.
      value: `[B, S, K, E]`.
      causal: whether a query sees only keys up to its own position.
      positions: `[B, T]`, the index of each query among the keys; 0 to T - 1 if None.
      segments: `[B, T]`, where T = S. A query sees only keys of its own segment.
      window: a causal query sees only the last `window` keys, its own among them; None for all.
      chunk: number of queries whose scores are in memory at once, if cuDNN's kernel is not used.

    Returns:
      `[B, T, H, E]`.
    """
    if positions is None and segments is None and window is None and _has_kernel(query):
        return jax.nn.dot_product_attention(
            query, key, value, is_causal=causal, implementation="cudnn"
        )
    batch, tokens = query.shape[:2]
    if positions is None and causal:
        positions = jnp.broadcast_to(jnp.arange(tokens), (batch, tokens))
    attend_chunk = functools.partial(_attend_chunk, key_segments=segments, window=window)
    if tokens <= chunk:
        return attend_chunk(key, value, query, positions, segments)

    def chunks(x: jax.Array) -> jax.Array:  # [B, T, ...] to [n, B, chunk, ...]
        rest = [(0, 0)] * (x.ndim - 2)
        x = jnp.pad(x, [(0, 0), (0, -tokens % chunk), *rest], mode="edge")
        return jnp.moveaxis(x.reshape(batch, -1, chunk, *x.shape[2:]), 1, 0)

    recomputed = xform.remat(attend_chunk)
    step = lambda _, queries: (None, recomputed(key, value, *queries))
    _, out = jax.lax.scan(step, None, jax.tree.map(chunks, (query, positions, segments)))
    return jnp.moveaxis(out, 0, 1).reshape(batch, -1, *query.shape[2:])[:, :tokens]


def _attend_chunk(
    key: jax.Array,
    value: jax.Array,
    query: jax.Array,
    positions: jax.Array | None,
    segments: jax.Array | None,
    key_segments: jax.Array | None,
    window: int | None,
) -> jax.Array:
    """Compute the attention of a chunk of queries to all keys.

    `segments` are the segments of the queries.
    """
    masks: list[jax.Array] = []
    if positions is not None:
        distance = positions[:, None, :, None] - jnp.arange(key.shape[1])
        masks.append(distance >= 0)
        if window is not None:
            masks.append(distance < window)
    if segments is not None and key_segments is not None:
        masks.append(segments[:, None, :, None] == key_segments[:, None, None, :])
    mask = functools.reduce(jnp.logical_and, masks) if masks else None
    dtype = query.dtype
    if dtype == jnp.float16:  # XLA on CPU does not accumulate float16 products in float32
        query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
    out = jax.nn.dot_product_attention(query, key, value, mask=mask, implementation="xla")
    return out.astype(dtype)


def _has_kernel(query: jax.Array) -> bool:
    """Return whether cuDNN's kernel supports these queries on the default backend."""
    fits_kernel = query.dtype in (jnp.bfloat16, jnp.float16) and query.shape[-1] % 8 == 0
    return fits_kernel and query.shape[-1] <= 128 and jax.default_backend() == "gpu"
