"""Residual networks of convolutions: ResNet-50 for photographs, ResNet-20 for 32 x 32 pixels.

Source: He et al., "Deep Residual Learning for Image Recognition", arXiv:1512.03385. The stem is the
first convolution. A stage is a sequence of blocks with the same number of channels, and each stage
but the first halves height and width. A bottleneck is a block of three convolutions. The middle one
has fewer channels, and it has the stride of the block, as in all later implementations.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.nets.axes import by_example
from models.nets.convolution import NormedConvolution
from models.nets.dense import dense
from models.nets.sizes import SIZE, dtype_setting
from models.settings import setting


@dataclasses.dataclass(frozen=True)
class ResNetConfig:
    """Settings of a ResNet. Each stage has a width and a number of blocks."""

    stem_channels: int = setting(16, "Number of channels of the first convolution.", **SIZE)
    stage_channels: tuple[int, ...] = setting(
        (16, 32, 64), "Number of channels of each stage.", **SIZE
    )
    stage_blocks: tuple[int, ...] = setting((3, 3, 3), "Number of blocks in each stage.", **SIZE)
    classes: int = setting(10, "Number of classes; by default that of the data.", **SIZE)
    bottleneck: bool = setting(
        False,
        "Make blocks of three convolutions (the middle one narrow), not of two.",
        change="never",
    )
    small_pictures: bool = setting(
        False,
        "Use the variant for small pictures: no stride in the first convolution, and shortcuts"
        " without parameters.",
        change="never",
    )
    channels: int = setting(
        3, "Number of channels of the pictures; by default that of the data.", **SIZE
    )
    dtype: str = dtype_setting()

    def __post_init__(self) -> None:
        if not self.stage_channels or len(self.stage_channels) != len(self.stage_blocks):
            raise ValueError(
                f"stage_channels {self.stage_channels} and stage_blocks {self.stage_blocks} must"
                " have one entry per stage each"
            )
        if self.bottleneck and any(width % 4 for width in self.stage_channels):
            raise ValueError(
                f"stage_channels {self.stage_channels} of bottlenecks must be multiples of 4"
            )
        channels = (self.stem_channels, *self.stage_channels)
        if self.small_pictures and any(b < a for a, b in itertools.pairwise(channels)):
            raise ValueError(
                f"stem_channels {self.stem_channels} and stage_channels {self.stage_channels}: with"
                " small_pictures no stage may be narrower than the one before it, because shortcuts"
                " only add channels of zeros"
            )


class Block(nnx.Module):
    """A residual block of two or three convolutions."""

    def __init__(
        self, config: ResNetConfig, inputs: int, outputs: int, stride: int, *, rngs: nnx.Rngs
    ) -> None:
        common: dict[str, Any] = {"dtype": config.dtype, "rngs": rngs}
        middle = outputs // 4 if config.bottleneck else outputs
        sizes = (1, 3, 1) if config.bottleneck else (3, 3)
        strided = 1 if config.bottleneck else 0  # the convolution that has the stride
        widths = [inputs, *[middle] * (len(sizes) - 1), outputs]
        parts = zip(widths[:-1], widths[1:], sizes, strict=True)
        self.parts = nnx.List([
            NormedConvolution(a, b, size, stride=stride if i == strided else 1, **common)
            for i, (a, b, size) in enumerate(parts)
        ])  # fmt: skip
        self.stride, self.added_channels = stride, outputs - inputs
        changes_shape = (stride != 1 or inputs != outputs) and not config.small_pictures
        self.shortcut = (
            NormedConvolution(inputs, outputs, 1, stride=stride, **common)
            if changes_shape
            else None
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `[B, height, width, inputs]` to `[B, height / stride, width / stride, outputs]`."""
        y = x
        for i, part in enumerate(self.parts):
            y = part(jax.nn.relu(y) if i else y)
        if self.shortcut is not None:
            x = self.shortcut(x)
        elif self.stride != 1 or self.added_channels:
            # The paper's option A: take every second pixel, and add channels of zeros.
            around = (self.added_channels // 2, self.added_channels - self.added_channels // 2)
            x = jnp.pad(x[:, :: self.stride, :: self.stride], [(0, 0)] * 3 + [around])
        return jax.nn.relu(x + y)


class ResNet(nnx.Module):
    """A residual network that maps images to class logits.

    After `eval()` its norms use running statistics.
    """

    def __init__(self, config: ResNetConfig, *, rngs: nnx.Rngs) -> None:
        c = self.config = config
        common: dict[str, Any] = {"dtype": c.dtype, "rngs": rngs}
        size, stride = (3, 1) if c.small_pictures else (7, 2)
        self.stem = NormedConvolution(c.channels, c.stem_channels, size, stride=stride, **common)
        stages: list[nnx.List] = []
        width = c.stem_channels
        for i, (out, depth) in enumerate(zip(c.stage_channels, c.stage_blocks, strict=True)):
            before = [width, *[out] * (depth - 1)]
            strides = [2 if i else 1, *[1] * (depth - 1)]
            blocks = [Block(c, a, out, s, rngs=rngs) for a, s in zip(before, strides, strict=True)]
            stages.append(nnx.List(blocks))
            width = out
        self.stages = nnx.List(stages)
        self.head = dense({"channels": width}, {"classes": c.classes}, bias=True, **common)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Map images `[B, height, width, channels]` to float32 logits `[B, classes]`."""
        x = jax.nn.relu(self.stem(images))
        if not self.config.small_pictures:
            around: Any = ((1, 1), (1, 1))  # as in PyTorch; "SAME" would be (0, 1)
            x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding=around)
        for stage in self.stages:
            for block in stage:
                x = block(x)
        return self.head(by_example(x.mean((1, 2)))).astype(jnp.float32)
