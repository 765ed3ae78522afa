"""Generate tokens one by one, each from the model's distribution given the tokens before it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


@dataclasses.dataclass(frozen=True)
class Draw:
    """How a token is drawn from logits.

    Attributes:
      temperature: the divisor of the logits; 0 takes the most likely token.
      top_k: draw only among this many most likely tokens; 0 for all.
      top_p: draw only among the fewest most likely tokens whose probabilities add up to this.
      vocab: draw only among the first `vocab` tokens; 0 for all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    vocab: int = 0

    def __call__(self, logits: jax.Array, keys: jax.Array) -> jax.Array:
        """Map logits `[B, V]` and a key for each row to tokens `[B]`."""
        logits = logits[:, : self.vocab or None]
        if self.temperature <= 0:
            return jnp.argmax(logits, axis=-1)
        logits = logits / self.temperature
        ranked = jnp.sort(logits, axis=-1, descending=True)
        if 0 < self.top_k < logits.shape[-1]:
            logits = _at_least(logits, ranked[:, self.top_k - 1])
            ranked = jnp.sort(logits, axis=-1, descending=True)
        if self.top_p < 1:
            probabilities = jax.nn.softmax(ranked, axis=-1)
            before = jnp.cumsum(probabilities, axis=-1) - probabilities
            count = jnp.sum(before < self.top_p, axis=-1, keepdims=True).clip(1)
            logits = _at_least(logits, jnp.take_along_axis(ranked, count - 1, axis=-1)[:, 0])
        return jax.vmap(jax.random.categorical)(keys, logits)


def _at_least(logits: jax.Array, least: jax.Array) -> jax.Array:
    """Set logits below `least` `[B]` to minus infinity."""
    return jnp.where(logits < least[:, None], -jnp.inf, logits)


def generate(
    model: Any, prompts: list[np.ndarray], length: int, draw: Draw, seed: int = 0
) -> list[np.ndarray]:
    """Extend each prompt by `length` tokens.

    Args:
      model: a decoder.
      prompts: arrays of at least one token.
      length: number of new tokens.
      draw: how tokens are drawn.
      seed: the random seed.

    Returns:
      Each prompt with its new tokens.

    Keys and values are cached. When the model's context is full, generation continues from the last
    half of it, which is read again. The result for a prompt depends on the prompt, its index and
    the seed. It does not depend on the other prompts.
    """
    graphdef, params = nnx.split(model)
    context: int = model.config.context
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), np.arange(len(prompts)))
    rows = [np.asarray(prompt, np.int32) for prompt in prompts]
    ends = [len(row) + length for row in rows]
    read = min(max(map(len, rows)), max(1, context - min(length, context // 2)))
    while (left := max(end - len(row) for end, row in zip(ends, rows, strict=True))) > 0:
        new = min(left, context - read)
        seen = [row[-read:] for row in rows]
        padded = np.stack([np.pad(row, (0, read - len(row))) for row in seen])
        lengths = np.array([len(row) for row in seen])
        indices = np.array([len(row) for row in rows])
        tokens = _generate_segment(graphdef, new, draw, params, padded, lengths, indices, keys)
        rows = [
            np.concatenate([row, more]) for row, more in zip(rows, np.asarray(tokens), strict=True)
        ]
        read = max(1, context // 2)
    return [row[:end] for row, end in zip(rows, ends, strict=True)]


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _generate_segment(
    graphdef: nnx.GraphDef,
    new: int,
    draw: Draw,
    params: nnx.State,
    prompts: jax.Array,
    lengths: jax.Array,
    indices: jax.Array,
    keys: jax.Array,
) -> jax.Array:
    """Read prompts `[B, P]`, padded at their ends to P, and generate tokens `[B, new]`.

    A prompt may be only the last part of its full row. `lengths` `[B]` are the lengths of the
    prompts without padding. `indices` `[B]` holds the position of the first new token in each full
    row. The random number of a token depends on its position in the full row and on the row's key.
    """
    model = nnx.merge(graphdef, params)
    rows, read = prompts.shape

    def drawn(logits: jax.Array, i: jax.Array) -> jax.Array:
        return draw(logits, jax.vmap(jax.random.fold_in)(keys, indices + i)).astype(prompts.dtype)

    logits, cache = model.extend(prompts, model.cache(rows, read + new))
    cache = dataclasses.replace(cache, lengths=lengths)
    first = drawn(
        jnp.take_along_axis(logits, lengths[:, None, None] - 1, axis=1)[:, 0], jnp.int32(0)
    )

    def step(carry, i):
        token, cache = carry
        logits, cache = nnx.merge(graphdef, params).extend(token[:, None], cache)
        token = drawn(logits[:, 0], i)
        return (token, cache), token

    _, rest = jax.lax.scan(step, (first, cache), jnp.arange(1, new))
    return jnp.concatenate([first[:, None], rest.T], axis=1)
