"""The batch at which ResNet-50 takes 7.5 GB."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from matplotlib.figure import Figure

import xform
from experiments.claims.claim import Claim, Finding
from experiments.claims.programs import total_bytes
from models.nets.presets import PRESETS, abstract

CLAIMED = 7.5e9
SIZE = 224


def bytes_of(batch: int, gradient: Any) -> int:
    """Return all bytes of a compiled float32 gradient, from shapes alone."""
    graphdef, params, rest = nnx.split(abstract(PRESETS["resnet50"]), nnx.Param, ...)

    def loss(params: Any, rest: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        logits = nnx.merge(graphdef, params, rest, copy=True)(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    x = jax.ShapeDtypeStruct((batch, SIZE, SIZE, 3), jnp.float32)
    labels = jax.ShapeDtypeStruct((batch,), jnp.int32)
    return total_bytes(jax.jit(gradient(loss)).lower(params, rest, x, labels).compile())


def measure(quick: bool) -> Finding:
    """Estimate the batch from the bytes at two batches, and compile it."""
    tried = {n: bytes_of(n, jax.grad) for n in (2, 8)}
    each = (tried[8] - tried[2]) / 6
    batch = round((CLAIMED - tried[2]) / each) + 2
    tried[batch] = bytes_of(batch, jax.grad)
    ours = {n: bytes_of(n, xform.grad) for n in (2, batch)}
    return Finding(
        [
            Claim(
                "ResNet-50 needs 7.5 GB",
                "Sohoni et al., Low-memory neural network training, arXiv:1904.10631",
                "activations grow with the batch; weights are 0.1 GB",
                f"{tried[batch] / 1e9:.2f} GB at a batch of {batch} pictures of {SIZE} by jax.grad,"
                f" in float32; {ours[batch] / 1e9:.2f} GB by xform.grad",
                f"holds if the batch is {batch}"
                if abs(tried[batch] / CLAIMED - 1) < 0.05
                else f"wrong: {tried[batch] / 1e9:.1f} GB at {batch}",
            )
        ],
        lambda figure: draw(figure, tried, ours),
    )


def draw(figure: Figure, tried: dict[int, int], ours: dict[int, int]) -> None:
    """Draw bytes by batch."""
    axes = figure.subplots()
    for name, found in (("jax.grad", tried), ("xform.grad", ours)):
        batches = sorted(found)
        axes.plot(batches, [found[n] / 1e9 for n in batches], "o-", label=name)
    axes.axhline(CLAIMED / 1e9, color="gray", linestyle="--", label="claimed")
    axes.set(xlabel="batch", ylabel="GB, arguments and results included")
    axes.legend(frameon=False)
