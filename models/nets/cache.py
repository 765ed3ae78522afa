"""A cache of the keys and values of earlier tokens, for generation token by token."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Cached keys and values of L layers and B sequences, with room for S tokens each.

    A token has K heads of width E. Prompts of different lengths are padded at their ends and read
    together. Then `dataclasses.replace(cache, lengths=...)` drops the padding: attention never sees
    entries past a length, and later tokens overwrite them.

    Attributes:
      keys, values: `[L, B, S, K, E]`.
      lengths: `[B]`, the number of cached tokens.
    """

    keys: jax.Array
    values: jax.Array
    lengths: jax.Array

    @classmethod
    def empty(
        cls, depth: int, batch: int, room: int, kv_heads: int, head_width: int, dtype: str
    ) -> Cache:
        """Return a cache without tokens."""
        none = jnp.zeros((depth, batch, room, kv_heads, head_width), dtype)
        return cls(none, none, jnp.zeros(batch, jnp.int32))

    def positions(self, tokens: int) -> jax.Array:
        """Return the positions `[B, T]` of the next tokens."""
        if tokens > self.keys.shape[2]:
            raise ValueError(
                f"{tokens} tokens do not fit in a cache of {self.keys.shape[2]}: make a larger one"
            )
        return self.lengths[:, None] + jnp.arange(tokens)


def store(stored: jax.Array, new: jax.Array, lengths: jax.Array) -> jax.Array:
    """Append `new` `[B, T, K, E]` to the cached entries of one layer, `[B, S, K, E]`.

    There must be room. Otherwise XLA shifts the write back, over earlier entries.
    """
    put = lambda row, new, at: jax.lax.dynamic_update_slice(row, new.astype(row.dtype), (at, 0, 0))
    return jax.vmap(put)(stored, new, lengths)
