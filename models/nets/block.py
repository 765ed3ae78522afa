"""The layer of GPT-2 and of a vision transformer: attention, then an MLP, each after a norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from models.nets.dense import NORMAL
from models.nets.dropout import dropout
from models.nets.norms import layer_norm
from models.nets.perceptron import Perceptron
from models.nets.self_attention import Context, SelfAttention


class Block(nnx.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`, with biases."""

    def __init__(
        self,
        width: int,
        heads: int,
        hidden: int,
        activation: Callable[[jax.Array], jax.Array],
        *,
        causal: bool,
        epsilon: float,
        dropout: float,
        chunk: int,
        dtype: Any,
        rngs: nnx.Rngs,
        out_stddev: float = NORMAL,
    ) -> None:
        common: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        self.rate = dropout
        self.attention_norm = layer_norm(width, epsilon, **common)
        self.attention = SelfAttention(
            width,
            heads,
            heads,
            width // heads,
            causal=causal,
            bias=True,
            chunk=chunk,
            out_stddev=out_stddev,
            **common,
        )
        self.mlp_norm = layer_norm(width, epsilon, **common)
        self.mlp = Perceptron(width, hidden, activation, out_stddev=out_stddev, **common)

    def __call__(self, x: jax.Array, own: Any, context: Context) -> Any:
        """Map `[B, T, D]` to the same shape, and update the cache.

        Args:
          x: the input.
          own: a pair of a random key for dropout and this layer's cached keys and values. Each may
            be None.
          context: data about the tokens that all layers share.

        Returns:
          The output and `(cached, None)`, with these tokens added to the cache.
        """
        key, cached = own
        first, second = (None, None) if key is None else jax.random.split(key)
        mixed, cached = self.attention(self.attention_norm(x), context, cached)
        x = x + dropout(mixed, self.rate, first)
        return x + dropout(self.mlp(self.mlp_norm(x)), self.rate, second), (cached, None)
