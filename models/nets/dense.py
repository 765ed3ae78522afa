"""Linear maps and embeddings whose axes have names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.nets.axes import constrained, named

NORMAL = 0.02  # what GPT-2 and Llama draw weights with


def dense(
    inputs: Mapping[str, int],
    outputs: Mapping[str, int],
    *,
    rngs: nnx.Rngs,
    bias: bool = False,
    dtype: Any = None,
    stddev: float | None = None,
) -> nnx.LinearGeneral:
    """A linear map from the last axes, `inputs`, to `outputs`; both say names and sizes.

    Without `stddev` a kernel's elements have variance 1 / (number of inputs).
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
    """A table of vectors, for `looked_up`; `rows` says what is, and how many there are."""
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
    """The vectors `[..., D]` of indices `[...]`; `rows` is what they are of.

    A device has whole vectors of its sequences, so it gathers whole vectors of the table first.
    """
    vectors = constrained(table.embedding[...], rows, None).astype(table.dtype)
    return jnp.take(vectors, indices, axis=0)
