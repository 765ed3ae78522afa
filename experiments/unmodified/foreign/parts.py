"""Parts that the fields of programs share: random batches, losses, and models taken apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox
import jax
import optax
from flax import nnx

from experiments.unmodified.programs import tokens

# A loss, and its arguments: the parameters that it is differentiated in, then its inputs.
Made = tuple[Callable[..., jax.Array], tuple[Any, ...]]


@dataclass(frozen=True)
class Program:
    """A program: its repository, the files that it takes from there, and its loss."""

    repository: str
    files: str
    make: Callable[[Path], Made]


def normal(*shape: int, seed: int = 1) -> jax.Array:
    """Random numbers of a standard normal distribution."""
    return jax.random.normal(jax.random.key(seed), shape)


def labels(count: int, classes: int) -> jax.Array:
    """A random class for each example."""
    return tokens(count, 1, classes)[:, 0]


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """The mean cross-entropy of integer targets."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def classified(apply: Callable[..., jax.Array], params: Any, *batch: Any) -> Made:
    """The cross-entropy of `apply(params, inputs, *rest)`, for a batch `inputs, targets, *rest`."""

    def loss(params: Any, inputs: Any, targets: jax.Array, *rest: Any) -> jax.Array:
        return cross_entropy(apply(params, inputs, *rest), targets)

    return loss, (params, *batch)


def of_nnx(model: nnx.Module) -> tuple[Any, Callable[[Any], Any]]:
    """The parameters of an NNX model, and the model as a function of them."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    return params, lambda params: nnx.merge(graph, params, rest, copy=True)


def of_equinox(model: Any) -> tuple[Any, Callable[[Any], Any]]:
    """The parameters of an Equinox model, and the model as a function of them."""
    params, rest = equinox.partition(model, equinox.is_inexact_array)
    return params, lambda params: equinox.combine(params, rest)
