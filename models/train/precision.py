"""Numbers of 16 bits: what a step rounds the parameters to, and by what it scales a loss."""

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
    """What a loss is multiplied by, so that small gradients are not zero in float16.

    It is Flax's `DynamicScale`, whose gradient is `jax.grad`'s alone; never below 1, since a loss
    that overflows at 1 is not helped by less.

    Attributes:
      value: the factor, float32; a power of two where it was one at first, so that it rounds
        nothing.
      good: steps since it changed, int32.
    """

    value: jax.Array
    good: jax.Array

    def after(self, finite: jax.Array, steps: int) -> LossScale:
        """Halved by a gradient that is not finite, doubled after so many that are."""
        good = jnp.where(finite, self.good + 1, 0)
        grown = good == steps
        factor = jnp.where(finite, jnp.where(grown, 2.0, 1.0), 0.5)
        value = jnp.clip(self.value * factor, 1.0, jnp.finfo(jnp.float32).max)
        return LossScale(value, jnp.where(grown, 0, good))


def first_scale(model: Any, optim: OptimConfig) -> LossScale | None:
    """The scale before the first step; None where nothing is in float16."""
    if "float16" not in (model.dtype, optim.weights):
        return None
    return LossScale(jnp.float32(optim.loss_scale), jnp.int32(0))


def rounded(params: Any, optim: OptimConfig) -> Any:
    """Parameters as a step reads them."""
    return jax.tree.map(lambda leaf: leaf.astype(optim.weights), params)
