"""Self-attention with an optional cache of keys and values."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from models.nets.attention import attend
from models.nets.axes import constrained
from models.nets.cache import store
from models.nets.dense import NORMAL, dense
from models.nets.norms import rms_norm
from models.nets.ring import ring_attend
from models.nets.rotary import rotate


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """Data about the tokens that all layers share."""

    positions: jax.Array | None = None  # [B, T], the index of each query among the keys
    angles: jax.Array | None = None  # [B, T, E / 2], angles of rotary positions
    segments: jax.Array | None = None  # [B, T], the document of each token
    lengths: jax.Array | None = None  # [B], the number of cached tokens
    # Whether several devices share each sequence, whose tokens are in zigzag order.
    ring: bool = dataclasses.field(default=False, metadata={"static": True})


class SelfAttention(nnx.Module):
    """Self-attention whose query heads share `kv_heads` heads of keys and values.

    With `qk_epsilon`, an RMS norm with this epsilon normalizes each query and each key before its
    position is added (Dehghani et al., "Scaling Vision Transformers to 22 Billion Parameters",
    arXiv:2302.05442, section 2).
    """

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int,
        head_width: int,
        *,
        causal: bool,
        bias: bool,
        chunk: int,
        dtype: Any,
        rngs: nnx.Rngs,
        out_stddev: float = NORMAL,
        window: int | None = None,
        qk_epsilon: float | None = None,
    ) -> None:
        self.causal, self.chunk, self.window = causal, chunk, window
        head = {"head_dim": head_width}
        linear = functools.partial(dense, bias=bias, dtype=dtype, rngs=rngs)
        self.query = linear({"embed": width}, {"heads": heads, **head}, stddev=NORMAL)
        self.key = linear({"embed": width}, {"kv_heads": kv_heads, **head}, stddev=NORMAL)
        self.value = linear({"embed": width}, {"kv_heads": kv_heads, **head}, stddev=NORMAL)
        norm = functools.partial(rms_norm, head_width, dtype=dtype, rngs=rngs)
        self.query_norm = None if qk_epsilon is None else norm(qk_epsilon)
        self.key_norm = None if qk_epsilon is None else norm(qk_epsilon)
        self.out = linear({"heads": heads, **head}, {"embed": width}, stddev=out_stddev)

    def __call__(
        self, x: jax.Array, context: Context, cached: tuple[jax.Array, jax.Array] | None = None
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
        """Map `[B, T, D]` to the same shape.

        Args:
          x: the input.
          context: data about the tokens.
          cached: this layer's cached keys and values; None without a cache.

        Returns:
          The output, and the cached keys and values with these tokens added.
        """
        query = constrained(self.query(x), "batch", "sequence", "heads", None)
        key = constrained(self.key(x), "batch", "sequence", "kv_heads", None)
        value = constrained(self.value(x), "batch", "sequence", "kv_heads", None)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if context.angles is not None:
            query, key = rotate(query, context.angles), rotate(key, context.angles)
        positions = None
        if cached is not None and context.lengths is not None:
            key, value = cached = (
                store(cached[0], key, context.lengths),
                store(cached[1], value, context.lengths),
            )
            key, value, positions = key.astype(x.dtype), value.astype(x.dtype), context.positions
        if context.ring:
            mixed = ring_attend(
                query,
                key,
                value,
                segments=context.segments,
                window=self.window,
                chunk=self.chunk,
            )
        else:
            mixed = attend(
                query,
                key,
                value,
                causal=self.causal,
                positions=positions,
                segments=context.segments,
                window=self.window,
                chunk=self.chunk,
            )
        return self.out(checkpoint_name(mixed, "attention_out")), cached
