"""A vision transformer: the patches of an image as tokens, and one more token for its class.

Source: Dosovitskiy et al., "An Image is Worth 16x16 Words", arXiv:2010.11929.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.nets.axes import by_example, named
from models.nets.block import Block
from models.nets.dense import NORMAL, dense
from models.nets.dropout import dropout
from models.nets.layers import Layers
from models.nets.norms import layer_norm
from models.nets.policies import check_remat
from models.nets.self_attention import Context
from models.nets.sizes import SIZE, dtype_setting
from models.settings import setting


@dataclasses.dataclass(frozen=True)
class ViTConfig:
    """Settings of a vision transformer: sizes, and options of the computation."""

    image_size: int = setting(
        32, "Side of the (square) pictures in pixels; by default that of the data.", **SIZE
    )
    patch_size: int = setting(4, "Side of the (square) patches in pixels.", **SIZE)
    width: int = setting(128, "Width of the residual stream, or of the state.", **SIZE)
    depth: int = setting(4, "Number of layers.", **SIZE)
    heads: int = setting(4, "Number of query heads in attention.", **SIZE)
    mlp_width: int = setting(512, "Width of the hidden layer of each MLP.", **SIZE)
    classes: int = setting(10, "Number of classes; by default that of the data.", **SIZE)
    channels: int = setting(
        3, "Number of channels of the pictures; by default that of the data.", **SIZE
    )
    norm_epsilon: float = setting(
        1e-12, "Constant added to the variance in each norm.", above=0, change="never"
    )
    dropout: float = setting(0.0, "Dropout rate in training.", least=0, most=1)
    query_chunk_size: int = setting(
        256, "Number of queries whose attention scores are in memory at once.", least=1
    )
    scan_layers: bool = setting(
        True,
        "Run the layers in a loop (scan) over stacked parameters, or unrolled.",
        change="never",
    )
    remat: str | None = setting(
        None,
        "Make each layer a remat region (jax.checkpoint) with this policy, such as save_dots or"
        " saved:1MiB; by default none is.",
    )
    dtype: str = dtype_setting()

    def __post_init__(self) -> None:
        if self.image_size % self.patch_size:
            raise ValueError(
                f"patch_size {self.patch_size} does not divide image_size {self.image_size}"
            )
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of {self.heads} heads")
        check_remat(self.remat)


class ViT(nnx.Module):
    """A vision transformer that maps images to class logits."""

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs) -> None:
        c = self.config = config
        common: dict[str, Any] = {"dtype": c.dtype, "rngs": rngs}
        self.patches = nnx.Conv(
            c.channels,
            c.width,
            (c.patch_size, c.patch_size),
            strides=c.patch_size,
            padding="VALID",
            kernel_metadata=named("height", "width", "channels_in", "embed"),
            bias_metadata=named("embed"),
            **common,
        )
        tokens = (c.image_size // c.patch_size) ** 2 + 1
        drawn = NORMAL * jax.random.normal(rngs.params(), (tokens, c.width))
        self.first = nnx.Param(jnp.zeros((1, c.width)), **named("position", "embed"))
        self.positions = nnx.Param(drawn, **named("position", "embed"))
        make = lambda rngs: Block(
            c.width,
            c.heads,
            c.mlp_width,
            functools.partial(jax.nn.gelu, approximate=False),
            causal=False,
            epsilon=c.norm_epsilon,
            dropout=c.dropout,
            chunk=c.query_chunk_size,
            dtype=c.dtype,
            rngs=rngs,
        )
        self.layers = Layers(make, c.depth, scan=c.scan_layers, remat=c.remat, rngs=rngs)
        self.norm = layer_norm(c.width, c.norm_epsilon, **common)
        self.head = dense(
            {"embed": c.width}, {"classes": c.classes}, bias=True, stddev=NORMAL, **common
        )

    def __call__(self, images: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        """Map images `[B, height, width, channels]` to float32 logits `[B, classes]`."""
        c = self.config
        x = self.patches(by_example(images))
        x = x.reshape(x.shape[0], -1, c.width)
        first = jnp.broadcast_to(self.first[...], (x.shape[0], 1, c.width)).astype(x.dtype)
        x = jnp.concatenate([first, x], axis=1) + self.positions[...].astype(x.dtype)
        outer, key = (None, None) if key is None else jax.random.split(key)
        keys = None if key is None else jax.random.split(key, c.depth)
        x, _ = self.layers(dropout(x, c.dropout, outer), (keys, None), Context())
        return self.head(by_example(self.norm(x[:, 0]))).astype(jnp.float32)
