"""Cross-entropy over large vocabularies, with the logits of a few positions at a time.

The backward pass recomputes the logits, also a few positions (a chunk) at a time. For 8192
positions and 128k tokens, all logits of one sequence would take 4 GiB, and their gradient as much
again.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

import xform
from models.nets.axes import constrained, context_devices


def scores(hidden: jax.Array, kernel: jax.Array) -> jax.Array:
    """Compute float32 logits `[..., V]` of `hidden` `[..., D]` and `kernel` `[D, V]`.

    The kernel is converted to the dtype of `hidden` before the product.
    """
    kernel = kernel.astype(hidden.dtype)
    return jnp.matmul(hidden, kernel, preferred_element_type=jnp.float32)


def cross_entropy(
    hidden: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    weights: jax.Array | None = None,
    *,
    chunk: int | None = 128,
    z: float = 0.0,
) -> jax.Array:
    """Compute the mean negative log-probability of `targets`, in nats.

    Args:
      hidden: `[B, T, D]`.
      kernel: `[D, V]`, the matrix that maps `hidden` to logits.
      targets: integers `[B, T]`.
      weights: `[B, T]`, the weight of each position; 1 if None.
      chunk: number of positions per sequence whose logits are in memory at once on each device;
        None for all.
      z: weight of the z-loss, the square of `logsumexp(logits)` at each position, which keeps the
        logits near 0 ("PaLM", arXiv:2204.02311, section 5).

    Returns:
      A float32 scalar: the weighted mean.
    """
    chunk_loss = functools.partial(_loss_sum, z=z)
    weights = jnp.ones(targets.shape) if weights is None else weights.astype(jnp.float32)
    kernel = constrained(kernel, None, "vocab")  # gather it once, not for each chunk
    parts = context_devices()  # each chunk has positions of every device
    if chunk is None or chunk * parts >= targets.shape[1]:
        total = chunk_loss(kernel, hidden, targets, weights)
    else:

        def chunks(x: jax.Array) -> jax.Array:  # [B, T, ...] to [n, B, parts * chunk, ...]
            batch, rest = x.shape[0], x.shape[2:]
            x = x.reshape(batch, parts, -1, *rest)
            x = jnp.pad(x, [(0, 0), (0, 0), (0, -x.shape[2] % chunk), *[(0, 0)] * len(rest)])
            x = jnp.moveaxis(x.reshape(batch, parts, -1, chunk, *rest), 2, 0)
            return x.reshape(-1, batch, parts * chunk, *rest)

        recomputed = xform.remat(chunk_loss)
        step = lambda total, positions: (total + recomputed(kernel, *positions), None)
        chunked = jax.tree.map(chunks, (hidden, targets, weights))
        total, _ = jax.lax.scan(step, jnp.float32(0), chunked)
    return total / weights.sum()


def _loss_sum(
    kernel: jax.Array, hidden: jax.Array, targets: jax.Array, weights: jax.Array, z: float
) -> jax.Array:
    """Compute the weighted sum of the losses of all positions."""
    logits = constrained(scores(hidden, kernel), "batch", "sequence", "vocab")
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    log_sums = jax.nn.logsumexp(logits, axis=-1)
    losses = log_sums - picked
    return jnp.sum(weights * (losses + z * log_sums**2 if z else losses))
