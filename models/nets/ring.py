"""Causal attention over a sequence that several devices share: keys and values go round a ring.

Each device has the queries, keys and values of its own part of a sequence. In each step it attends
to the keys that it holds, and sends them to the next device (Liu et al., "Ring Attention with
Blockwise Transformers for Near-Infinite Context", arXiv:2310.01889). The softmax is accumulated:
for each query a device holds the largest score so far, the sum of the weights and the weighted sum
of the values (Milakov and Gimelshein, "Online normalizer calculation for softmax",
arXiv:1805.02867). So a device needs memory for its own part, and for the scores of a few queries
and a few keys.

A query sees only the keys before it. If the parts were consecutive, the first device would have
almost nothing to do. So the sequence is cut into 2n blocks, and device i has the blocks i and
2n - 1 - i (`models.zigzag`). Two more blocks arrive in each step. Of the four pairs of a block
of queries and a block of keys, exactly two are visible, and only these are computed. So all devices
do the same work.

The derivative is xform's, through the loop. Its backward pass moves the keys back around the ring
instead of storing those of every step (`xform/rules/moved_carry.py`).
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import xform
from models.nets.axes import CONTEXT, context_devices, present_spec

# Less than any score. It is finite, so the difference of two such numbers is 0 and not NaN.
_LEAST = -1e30


class _Queries(NamedTuple):
    """Queries `[B, t, K, G, E]`, their places `[t]` in the sequence and segments `[B, t]`."""

    vectors: jax.Array
    places: jax.Array
    segments: jax.Array | None


class _Keys(NamedTuple):
    """Keys and values `[B, s, K, E]`, their places `[s]` in the sequence and segments `[B, s]`."""

    keys: jax.Array
    values: jax.Array
    places: jax.Array
    segments: jax.Array | None


class _Sums(NamedTuple):
    """The softmax of the keys so far, in float32.

    Attributes:
      values: `[B, t, K, G, E]`, the sum of the values, weighted by `exp(score - largest)`.
      weights: `[B, t, K, G]`, the sum of these weights.
      largest: `[B, t, K, G]`, the largest score.
    """

    values: jax.Array
    weights: jax.Array
    largest: jax.Array


def ring_attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    segments: jax.Array | None = None,
    window: int | None = None,
    chunk: int = 256,
) -> jax.Array:
    """Compute the causal attention of sequences that the mesh axis "context" shards.

    Call it under `jax.jit`, with a mesh whose axes are `Auto`. The tokens are in zigzag order.

    Args:
      query: `[B, T, H, E]`.
      key: `[B, T, K, E]`, where K divides H.
      value: `[B, T, K, E]`.
      segments: `[B, T]`. A query sees only keys of its own segment.
      window: a query sees only the last `window` keys, its own among them; None for all.
      chunk: number of queries, and of keys, whose scores are in memory at once.

    Returns:
      `[B, T, H, E]`.
    """
    batch, tokens, heads, _ = query.shape
    grouped = query.reshape(batch, tokens, key.shape[2], heads // key.shape[2], -1)
    of_queries = present_spec(grouped.shape, "batch", "sequence", "kv_heads", None, None)
    of_keys = present_spec(key.shape, "batch", "sequence", "kv_heads", None)
    given, specs = [grouped, key, value], [of_queries, of_keys, of_keys]
    if segments is not None:
        given.append(segments)
        specs.append(present_spec(segments.shape, "batch", "sequence"))
    here = functools.partial(_attend_here, n=context_devices(), window=window, chunk=chunk)
    mapped = jax.shard_map(here, in_specs=tuple(specs), out_specs=of_queries)
    return mapped(*given).reshape(query.shape)


def _attend_here(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: jax.Array | None = None,
    *,
    n: int,
    window: int | None,
    chunk: int,
) -> jax.Array:
    """Attend from the queries of one of `n` devices to the keys of all of them."""
    device, size = lax.axis_index(CONTEXT), query.shape[1] // 2

    def halves(x: jax.Array | None) -> list[Any]:
        return [None, None] if x is None else [x[:, :size], x[:, size:]]

    def places(device: jax.Array) -> list[jax.Array]:
        return [block * size + jnp.arange(size) for block in (device, 2 * n - 1 - device)]

    def keys_of(device: jax.Array, held: tuple[jax.Array | None, ...]) -> list[_Keys]:
        keys, values, segments = map(halves, held)
        return [_Keys(*each) for each in zip(keys, values, places(device), segments, strict=True)]

    update = functools.partial(_update, window=window, chunk=chunk)
    queries = zip(halves(query), places(device), halves(segments), strict=True)
    first_queries, last_queries = (_Queries(*each) for each in queries)
    held = key, value, segments
    first_keys, last_keys = keys_of(device, held)
    first = update(_nothing(first_queries), first_queries, first_keys)
    last = update(_nothing(last_queries), last_queries, first_keys)
    last = update(last, last_queries, last_keys)

    def step(state: tuple[tuple[jax.Array | None, ...], _Sums, _Sums], i: jax.Array) -> Any:
        held, first, last = state
        ring = [(source, (source + 1) % n) for source in range(n)]
        held = jax.tree.map(lambda x: lax.ppermute(x, CONTEXT, ring), held)
        source = (device - i) % n
        first_keys, last_keys = keys_of(source, held)
        last = update(last, last_queries, first_keys)
        # The other visible pair: both first blocks if those keys are earlier, else both last ones.
        choose = functools.partial(jax.tree.map, functools.partial(jnp.where, source < device))
        pair = choose(first_queries, last_queries), choose(first_keys, last_keys)
        chosen = update(choose(first, last), *pair)
        return (held, choose(chosen, first), choose(last, chosen)), None

    (_, first, last), _ = lax.scan(step, (held, first, last), jnp.arange(1, n))
    means = [sums.values / sums.weights[..., None] for sums in (first, last)]
    return jnp.concatenate(means, axis=1).astype(query.dtype)


def _nothing(queries: _Queries) -> _Sums:
    """Return the sums over no keys."""
    zeros = jnp.zeros_like(queries.vectors, jnp.float32)
    return _Sums(zeros, zeros[..., 0], zeros[..., 0] + _LEAST)


def _update(sums: _Sums, queries: _Queries, keys: _Keys, window: int | None, chunk: int) -> _Sums:
    """Add keys to the sums, for `chunk` queries and `chunk` keys at a time."""
    add = xform.remat(functools.partial(_add, window=window))
    size = queries.vectors.shape[1]
    if size <= chunk:
        return add(sums, queries, keys)
    cut = functools.partial(jax.tree.map, functools.partial(_chunks, chunk=chunk))
    key_chunks = cut(keys)

    @xform.remat
    def of_queries(sums: _Sums, queries: _Queries, key_chunks: _Keys) -> _Sums:
        step = lambda sums, keys: (add(sums, queries, keys), None)
        return lax.scan(step, sums, key_chunks)[0]

    def of_chunk(_: None, each: tuple[_Sums, _Queries]) -> tuple[None, _Sums]:
        return None, of_queries(*each, key_chunks)

    _, done = lax.scan(of_chunk, None, (cut(sums), cut(queries)))
    whole = lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])[:, :size]
    return jax.tree.map(whole, done)


def _chunks(x: jax.Array, chunk: int) -> jax.Array:
    """Cut `[B, t, ...]` into `[n, B, chunk, ...]`, or places `[t]` into `[n, chunk]`.

    The last chunk is filled up with zeros. Its places are after all others, so no query sees it.
    """
    if x.ndim == 1:
        after = jnp.iinfo(x.dtype).max
        return jnp.pad(x, (0, -len(x) % chunk), constant_values=after).reshape(-1, chunk)
    x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % chunk), *[(0, 0)] * (x.ndim - 2)])
    return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)


def _add(sums: _Sums, queries: _Queries, keys: _Keys, window: int | None) -> _Sums:
    """Add keys to the sums. The scores of all queries and keys are in memory at once.

    The result does not depend on `largest`, which only keeps the weights from overflowing, so it
    has no derivative.
    """
    q, k, v = queries.vectors, keys.keys, keys.values
    if q.dtype == jnp.float16:  # XLA on CPU does not accumulate float16 products in float32
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    scores = product("btkge,bske->btkgs", q, k) / math.sqrt(q.shape[-1])
    distance = queries.places[:, None] - keys.places
    visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    visible = visible[None]
    if queries.segments is not None and keys.segments is not None:
        visible &= queries.segments[..., None] == keys.segments[:, None]
    visible = visible[:, :, None, None]
    scores = jnp.where(visible, scores, _LEAST)
    largest = jnp.maximum(sums.largest, lax.stop_gradient(scores).max(-1))
    weights = jnp.where(visible, jnp.exp(scores - largest[..., None]), 0.0)
    shrunk = jnp.exp(sums.largest - largest)
    values = product("btkgs,bske->btkge", weights.astype(v.dtype), v)
    return _Sums(
        sums.values * shrunk[..., None] + values, sums.weights * shrunk + weights.sum(-1), largest
    )
