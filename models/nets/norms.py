"""Norms of each vector, or of each channel over a batch. All reduce in float32."""

from __future__ import annotations

from typing import Any

from flax import nnx

from models.nets.axes import named

NAMES = named("norm")


def layer_norm(width: int, epsilon: float, *, rngs: nnx.Rngs, dtype: Any = None) -> nnx.LayerNorm:
    """Make a layer norm: `(x - mean) / deviation * scale + bias` over the last axis.

    Source: arXiv:1607.06450.
    """
    return nnx.LayerNorm(
        width,
        epsilon=epsilon,
        dtype=dtype,
        use_fast_variance=False,
        scale_metadata=NAMES,
        bias_metadata=NAMES,
        rngs=rngs,
    )


def rms_norm(width: int, epsilon: float, *, rngs: nnx.Rngs, dtype: Any = None) -> nnx.RMSNorm:
    """Make an RMS norm: `x / rms(x) * scale` over the last axis (arXiv:1910.07467)."""
    return nnx.RMSNorm(width, epsilon=epsilon, dtype=dtype, scale_metadata=NAMES, rngs=rngs)


def batch_norm(channels: int, *, rngs: nnx.Rngs, dtype: Any = None) -> nnx.BatchNorm:
    """Make a batch norm, which normalizes each channel over batch and positions.

    It keeps running statistics, which are used after `model.eval()`. Source: arXiv:1502.03167.
    """
    return nnx.BatchNorm(
        channels,
        momentum=0.9,
        epsilon=1e-5,
        dtype=dtype,
        use_running_average=False,
        use_fast_variance=False,
        scale_metadata=NAMES,
        bias_metadata=NAMES,
        rngs=rngs,
    )
