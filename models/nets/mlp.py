"""A deep residual MLP, the smallest model on which saving and recomputing can be told apart."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from models.nets.config import DTYPES, MLPConfig
from models.nets.stack import Stack


class MLPBlock(nnx.Module):
    """`x + down(gelu(up(x)))`."""

    def __init__(self, config: MLPConfig, *, rngs: nnx.Rngs) -> None:
        linear = functools.partial(nnx.Linear, dtype=DTYPES[config.dtype], rngs=rngs)
        self.up = linear(config.width, config.hidden)
        self.down = linear(config.hidden, config.width)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `[..., width]` to the same shape and dtype."""
        hidden = checkpoint_name(self.up(x), "mlp_hidden")
        return checkpoint_name(x + self.down(jax.nn.gelu(hidden)), "block_out")


class MLP(nnx.Module):
    """A linear map in, `depth` residual blocks, a linear map out."""

    def __init__(self, config: MLPConfig, *, rngs: nnx.Rngs) -> None:
        dtype = DTYPES[config.dtype]
        self.config = config
        self.enter = nnx.Linear(config.inputs, config.width, dtype=dtype, rngs=rngs)
        self.stack = Stack(
            lambda rngs: MLPBlock(config, rngs=rngs),
            config.depth,
            scan=config.scan,
            policy=config.block_policy,
            rngs=rngs,
        )
        self.leave = nnx.Linear(config.width, config.outputs, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `[..., inputs]` to float32 `[..., outputs]`."""
        return self.leave(self.stack(self.enter(x))).astype(jnp.float32)
