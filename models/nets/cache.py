"""Keys and values of tokens that were read, so that the next ones need not read them again."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Of L layers, B sequences and room for S tokens each: `[L, B, S, K, E]` twice, lengths `[B]`.

    Prompts of several lengths are padded at their ends and read at once;
    `dataclasses.replace(cache, lengths=...)` then takes the padding back: what is stored past a
    length is never seen, and written over.
    """

    keys: jax.Array
    values: jax.Array
    lengths: jax.Array

    @classmethod
    def empty(
        cls, depth: int, batch: int, room: int, kv_heads: int, head_width: int, dtype: str
    ) -> Cache:
        """Nothing read so far."""
        none = jnp.zeros((depth, batch, room, kv_heads, head_width), dtype)
        return cls(none, none, jnp.zeros(batch, jnp.int32))

    def positions(self, tokens: int) -> jax.Array:
        """Where the next tokens will be: `[B, T]`."""
        if tokens > self.keys.shape[2]:
            raise ValueError(f"{tokens} tokens do not fit a cache of {self.keys.shape[2]}")
        return self.lengths[:, None] + jnp.arange(tokens)


def store(stored: jax.Array, new: jax.Array, lengths: jax.Array) -> jax.Array:
    """Write `new` `[B, T, K, E]` behind what one layer stored, `[B, S, K, E]`.

    There must be room: XLA moves what would be past the end to before it.
    """
    put = lambda row, new, at: jax.lax.dynamic_update_slice(row, new.astype(row.dtype), (at, 0, 0))
    return jax.vmap(put)(stored, new, lengths)
