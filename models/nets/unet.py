"""A U-Net: an encoder to small images of many channels, and a decoder with skip connections.

Source: Ronneberger et al., "U-Net", arXiv:1505.04597. As in most later implementations,
convolutions keep the size of images, and each has a batch norm.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.nets.axes import by_example, named
from models.nets.convolution import KERNEL, NormedConvolution
from models.nets.sizes import SIZE, dtype_setting
from models.settings import setting


@dataclasses.dataclass(frozen=True)
class UNetConfig:
    """Settings of a U-Net. Each level has half the side length of the one before."""

    channels: int = setting(
        3, "Number of channels of the pictures; by default that of the data.", **SIZE
    )
    level_channels: tuple[int, ...] = setting(
        (16, 32, 64), "Number of channels of each level.", **SIZE
    )
    classes: int = setting(2, "Number of classes; by default that of the data.", **SIZE)
    dtype: str = dtype_setting()

    def __post_init__(self) -> None:
        if not self.level_channels:
            raise ValueError("level_channels is empty: it must have an entry for each level")


class Pair(nnx.Module):
    """Two normed convolutions, each followed by a ReLU."""

    def __init__(self, inputs: int, outputs: int, **common: Any) -> None:
        self.first = NormedConvolution(inputs, outputs, 3, **common)
        self.second = NormedConvolution(outputs, outputs, 3, **common)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `[B, height, width, inputs]` to `[B, height, width, outputs]`."""
        return jax.nn.relu(self.second(jax.nn.relu(self.first(x))))


class UNet(nnx.Module):
    """A U-Net that maps images to class logits at each pixel.

    After `eval()` its norms use running statistics.
    """

    def __init__(self, config: UNetConfig, *, rngs: nnx.Rngs) -> None:
        c = self.config = config
        common: dict[str, Any] = {"dtype": c.dtype, "rngs": rngs}
        metadata = {"kernel_metadata": KERNEL, "bias_metadata": named("channels")}
        above = [c.channels, *c.level_channels[:-1]]
        levels = list(zip(above, c.level_channels, strict=True))
        self.down = nnx.List([Pair(a, b, **common) for a, b in levels])
        enlarge = lambda a, b: nnx.ConvTranspose(
            b, a, (2, 2), strides=2, padding="VALID", transpose_kernel=False, **metadata, **common
        )
        self.enlarge = nnx.List([enlarge(a, b) for a, b in levels[:0:-1]])
        self.up = nnx.List([Pair(2 * a, a, **common) for a, _ in levels[:0:-1]])
        self.head = nnx.Conv(c.level_channels[0], c.classes, (1, 1), **metadata, **common)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Map images `[B, height, width, channels]` to logits `[B, height, width, classes]`.

        The logits are float32.
        """
        x, skips = images, []
        for i, pair in enumerate(self.down):
            x = pair(nnx.max_pool(x, (2, 2), strides=(2, 2)) if i else x)
            skips.append(x)
        for enlarge, pair, skip in zip(self.enlarge, self.up, skips[-2::-1], strict=True):
            x = pair(jnp.concatenate([skip, enlarge(by_example(x))], axis=-1))
        return self.head(by_example(x)).astype(jnp.float32)
