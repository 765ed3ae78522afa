"""The feed-forward part of a transformer layer: an MLP with one hidden layer, gated or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from models.nets.axes import constrained
from models.nets.dense import NORMAL, dense


class Perceptron(nnx.Module):
    """`down(activation(up(x)))`, with biases."""

    def __init__(
        self,
        width: int,
        hidden: int,
        activation: Callable[[jax.Array], jax.Array],
        *,
        dtype: Any,
        rngs: nnx.Rngs,
        out_stddev: float = NORMAL,
    ) -> None:
        sides = {"embed": width}, {"mlp": hidden}
        self.activation = activation
        self.up = dense(*sides, bias=True, dtype=dtype, stddev=NORMAL, rngs=rngs)
        self.down = dense(*sides[::-1], bias=True, dtype=dtype, stddev=out_stddev, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `[..., D]` to the same shape."""
        return self.down(checkpoint_name(self.activation(_sharded(self.up(x))), "mlp_hidden"))


class GatedPerceptron(nnx.Module):
    """`down(silu(gate(x)) * up(x))` (arXiv:2002.05202)."""

    def __init__(self, width: int, hidden: int, *, dtype: Any, rngs: nnx.Rngs) -> None:
        sides = {"embed": width}, {"mlp": hidden}
        self.gate = dense(*sides, dtype=dtype, stddev=NORMAL, rngs=rngs)
        self.up = dense(*sides, dtype=dtype, stddev=NORMAL, rngs=rngs)
        self.down = dense(*sides[::-1], dtype=dtype, stddev=NORMAL, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `[..., D]` to the same shape."""
        hidden = jax.nn.silu(_sharded(self.gate(x))) * _sharded(self.up(x))
        return self.down(checkpoint_name(hidden, "mlp_hidden"))


def _sharded(hidden: jax.Array) -> jax.Array:
    """Constrain the sharding of hidden values `[B, ..., hidden]`."""
    outer = ("batch", "sequence", *[None] * (hidden.ndim - 3))[: hidden.ndim - 1]
    return constrained(hidden, *outer, "mlp")
