"""A deep residual MLP, the smallest model on which saving and recomputing differ measurably."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from models.nets.dense import dense
from models.nets.layers import Layers


@dataclasses.dataclass(frozen=True)
class MLPConfig:
    """Sizes: `inputs -> width`, then layers `width -> hidden -> width`, then `width -> outputs`."""

    inputs: int = 256
    width: int = 256
    hidden: int = 1024
    outputs: int = 256
    depth: int = 16
    scan_layers: bool = True
    remat: str | None = None
    dtype: str = "float32"  # the dtype of the computation; parameters are float32


class Block(nnx.Module):
    """`x + down(gelu(up(x)))`."""

    def __init__(self, config: MLPConfig, *, rngs: nnx.Rngs) -> None:
        common: dict[str, Any] = {"bias": True, "dtype": config.dtype, "rngs": rngs}
        sides = {"embed": config.width}, {"mlp": config.hidden}
        self.up = dense(*sides, **common)
        self.down = dense(*sides[::-1], **common)

    def __call__(self, x: jax.Array, own: Any, shared: Any) -> tuple[jax.Array, None]:
        """Map `[..., width]` to the same shape. `own` and `shared` are not used."""
        hidden = checkpoint_name(self.up(x), "mlp_hidden")
        return checkpoint_name(x + self.down(jax.nn.gelu(hidden)), "block_out"), None


class MLP(nnx.Module):
    """A residual MLP that maps vectors to vectors."""

    def __init__(self, config: MLPConfig, *, rngs: nnx.Rngs) -> None:
        c = self.config = config
        common: dict[str, Any] = {"bias": True, "dtype": c.dtype, "rngs": rngs}
        self.enter = dense({"channels_in": c.inputs}, {"channels": c.width}, **common)
        make = lambda rngs: Block(c, rngs=rngs)
        self.layers = Layers(make, c.depth, scan=c.scan_layers, remat=c.remat, rngs=rngs)
        self.leave = dense({"embed": c.width}, {"classes": c.outputs}, **common)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `[..., inputs]` to float32 `[..., outputs]`."""
        return self.leave(self.layers(self.enter(x))[0]).astype(jnp.float32)
