"""Mixed precision: rounding of the parameters, and scaling of the loss."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from models.train.optim import OptimConfig


@functools.partial(jax.tree_util.register_dataclass, data_fields=["value", "good"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class LossScale:
    """A factor of the loss that keeps small gradients from underflowing to zero in float16.

    It works like Flax's `DynamicScale`, which cannot be used here, because it always differentiates
    with `jax.grad`. The factor is at least 1, because a smaller one would not help a loss that
    overflows at 1.

    Attributes:
      value: the factor, float32. If it starts as a power of two, it stays one, so that scaling
        is exact.
      good: consecutive finite steps since it changed, int32.
    """

    value: jax.Array
    good: jax.Array

    def after(self, finite: jax.Array, steps: int) -> LossScale:
        """Return the next scale.

        A gradient that is not finite halves it. `steps` consecutive finite gradients double it.
        """
        good = jnp.where(finite, self.good + 1, 0)
        grown = good == steps
        factor = jnp.where(finite, jnp.where(grown, 2.0, 1.0), 0.5)
        value = jnp.clip(self.value * factor, 1.0, jnp.finfo(jnp.float32).max)
        return LossScale(value, jnp.where(grown, 0, good))


def first_scale(model: Any, optim: OptimConfig) -> LossScale | None:
    """Return the scale before the first step; None if nothing is in float16."""
    if "float16" not in (model.dtype, optim.weight_dtype):
        return None
    return LossScale(jnp.float32(optim.loss_scale), jnp.int32(0))


def rounded(params: Any, optim: OptimConfig) -> Any:
    """Round the parameters to the dtype `optim.weight_dtype`."""
    return jax.tree.map(lambda leaf: leaf.astype(optim.weight_dtype), params)
