"""Convolutions of images `[B, height, width, channels]`, with named parameter axes."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from models.nets.axes import by_example, named
from models.nets.norms import batch_norm

# The names of the axes of a kernel, for sharding.
KERNEL = named("height", "width", "channels_in", "channels")
HE = nnx.initializers.he_normal()  # initial kernels, arXiv:1502.01852


class NormedConvolution(nnx.Module):
    """A convolution without bias, followed by a batch norm."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        size: int,
        *,
        stride: int = 1,
        dtype: Any,
        rngs: nnx.Rngs,
    ) -> None:
        self.convolution = nnx.Conv(
            inputs,
            outputs,
            (size, size),
            strides=stride,
            padding=size // 2,
            use_bias=False,
            dtype=dtype,
            kernel_init=HE,
            kernel_metadata=KERNEL,
            rngs=rngs,
        )
        self.norm = batch_norm(outputs, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `[B, height, width, inputs]` to `[B, height / stride, width / stride, outputs]`."""
        return self.norm(self.convolution(by_example(x)))
