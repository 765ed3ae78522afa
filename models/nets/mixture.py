"""A mixture of experts: a router chooses a few gated MLPs (the experts) for each token.

No token is dropped. Tokens are sorted by expert, and `jax.lax.ragged_dot` multiplies the tokens of
each expert by its matrix. Source: "Mixtral of Experts", arXiv:2401.04088.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.nets.axes import named
from models.nets.dense import NORMAL, dense


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """How tokens were distributed among E experts.

    Attributes:
      shares: `[..., k, E]`, the share of tokens whose k-th choice is each expert.
      weights: `[..., E]`, the router's mean weight of each expert.
    """

    shares: jax.Array
    weights: jax.Array

    def imbalance(self) -> jax.Array:
        """Compute the load-balancing loss (arXiv:2101.03961, eq. 4, summed over k choices).

        It is k if all experts are used equally, and more otherwise.
        """
        experts = self.weights.shape[-1]
        layers = tuple(range(self.weights.ndim - 1))
        shares, weights = self.shares.mean(layers), self.weights.mean(layers)
        return experts * jnp.sum(shares * weights)


class Mixture(nnx.Module):
    """`experts` gated MLPs, of which the router chooses `experts_per_token` for each token."""

    def __init__(
        self,
        width: int,
        hidden: int,
        experts: int,
        experts_per_token: int,
        *,
        dtype: Any,
        rngs: nnx.Rngs,
    ) -> None:
        # A parameter with a matrix for each expert. A pair is the name and the size of an axis.
        def matrices(inputs: tuple[str, int], outputs: tuple[str, int]) -> nnx.Param[Any]:
            (name, size), (out_name, out_size) = inputs, outputs
            drawn = NORMAL * jax.random.normal(rngs.params(), (experts, size, out_size))
            return nnx.Param(drawn, **named("expert", name, out_name))

        self.experts_per_token, self.dtype = experts_per_token, dtype
        self.router = dense(
            {"embed": width}, {"expert": experts}, dtype=dtype, stddev=NORMAL, rngs=rngs
        )
        self.gate = matrices(("embed", width), ("mlp", hidden))
        self.up = matrices(("embed", width), ("mlp", hidden))
        self.down = matrices(("mlp", hidden), ("embed", width))

    def __call__(self, x: jax.Array) -> tuple[jax.Array, Routing]:
        """Map `[..., D]` to the same shape, and return how the tokens were routed."""
        tokens = x.reshape(-1, x.shape[-1])
        weights = jax.nn.softmax(self.router(tokens).astype(jnp.float32))
        best, chosen = jax.lax.top_k(weights, self.experts_per_token)  # [N, k]
        best /= best.sum(-1, keepdims=True)
        one_hot = jax.nn.one_hot(chosen, weights.shape[-1])

        order = jnp.argsort(chosen.reshape(-1))  # by expert
        sizes = jnp.sum(one_hot, (0, 1)).astype(jnp.int32)  # tokens of each expert
        run = lambda rows, kernel: jax.lax.ragged_dot(
            rows, kernel[...].astype(x.dtype if self.dtype is None else self.dtype), sizes
        )
        rows = tokens[order // self.experts_per_token]
        rows = run(jax.nn.silu(run(rows, self.gate)) * run(rows, self.up), self.down)
        unsorted = rows[jnp.argsort(order)].reshape(*chosen.shape, -1)
        mixed = jnp.einsum("nkd,nk->nd", unsorted, best.astype(unsorted.dtype))
        return mixed.reshape(x.shape), Routing(one_hot.mean(0), weights.mean(0))
