"""Linear layers and embeddings with named parameter axes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.nets.axes import constrained, named

NORMAL = 0.02  # standard deviation of initial weights in GPT-2 and Llama


def dense(
    inputs: Mapping[str, int],
    outputs: Mapping[str, int],
    *,
    rngs: nnx.Rngs,
    bias: bool = False,
    dtype: Any = None,
    stddev: float | None = None,
) -> nnx.LinearGeneral:
    """Make a linear layer that maps the last axes of an array to new axes.

    Args:
      inputs: the names and sizes of the last axes.
      outputs: the names and sizes of the axes that replace them.
      rngs: the random numbers for the initial parameters.
      bias: whether to add a bias.
      dtype: dtype of the computation; None for that of the operands.
      stddev: standard deviation of the initial kernel; None for the variance 1 / (number of
        inputs).
    """
    fan = math.prod(inputs.values())
    return nnx.LinearGeneral(
        tuple(inputs.values()),
        tuple(outputs.values()),
        axis=tuple(range(-len(inputs), 0)),
        use_bias=bias,
        dtype=dtype,
        kernel_init=nnx.initializers.normal(fan**-0.5 if stddev is None else stddev),
        kernel_metadata=named(*inputs, *outputs),
        bias_metadata=named(*outputs),
        rngs=rngs,
    )


def embedding(
    rows: Mapping[str, int], width: int, *, rngs: nnx.Rngs, dtype: Any = None
) -> nnx.Embed:
    """Make a table of vectors for `looked_up`. `rows` is the name and the number of its rows."""
    ((name, size),) = rows.items()
    return nnx.Embed(
        size,
        width,
        dtype=dtype,
        embedding_init=nnx.initializers.normal(NORMAL),
        embedding_metadata=named(name, "embed"),
        rngs=rngs,
    )


def looked_up(table: nnx.Embed, indices: jax.Array, rows: str) -> jax.Array:
    """Look up the vectors `[..., D]` of indices `[...]`. `rows` is the name of the table's rows.

    Activations are not sharded over D, so the table is gathered over D first.
    """
    vectors = constrained(table.embedding[...], rows, None).astype(table.dtype)
    return jnp.take(vectors, indices, axis=0)
