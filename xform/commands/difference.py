"""How far the results of a derivative by xform and by JAX are apart, for `xform run`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def largest_difference(ours: Sequence[Any], theirs: Sequence[Any]) -> Any:
    """Return the largest difference between arrays of two lists, as a float32 scalar.

    The difference of two arrays is relative to the largest number in JAX's array. A difference up
    to the rounding error of the largest number of all arrays counts as 0. Otherwise a gradient that
    is zero except for rounding, such as that of a bias that softmax cancels, would count as
    entirely different.
    """
    differences: list[Any] = []
    for a, b in zip(ours, theirs, strict=True):
        if not jnp.issubdtype(getattr(b, "dtype", jax.dtypes.float0), jnp.inexact) or not b.size:
            continue
        a, b = map(jax.lax.stop_gradient, (jnp.asarray(a), jnp.asarray(b)))
        is_equal = (a == b) | (jnp.isnan(a) & jnp.isnan(b))
        scale = jnp.max(jnp.where(jnp.isfinite(b), jnp.abs(b), 0))
        differences.append(
            (jnp.max(jnp.where(is_equal, 0, jnp.abs(a - b))), scale, jnp.finfo(b.dtype).eps)
        )
    largest_scale = functools.reduce(jnp.maximum, [scale for _, scale, _ in differences], 0.0)
    largest: Any = 0.0
    for difference, scale, eps in differences:
        counted = jnp.where(difference <= eps * largest_scale, 0, difference)
        relative = counted / jnp.where(scale == 0, 1, scale)
        largest = jnp.maximum(largest, relative.astype(jnp.float32))
    return largest
