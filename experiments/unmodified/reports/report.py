"""A program of a public report: a loss, its arguments, and the address of the report."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

KEY = jax.random.key(0)
# A loss and its arguments. The first argument is differentiated.
Made = tuple[Callable[..., Any], tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class Report:
    """A public report.

    Attributes:
      address: the repository, and the number of the issue or pull request.
      make: makes a program that does what the report describes.
    """

    address: str
    make: Callable[[], Made]

    @property
    def url(self) -> str:
        """The address in a browser."""
        repository, number = self.address.split("#")
        return f"https://github.com/{repository}/issues/{number}"


def normal(*shape: int, seed: int = 0) -> jax.Array:
    """Return random numbers, scaled for a matrix product over the first of several axes."""
    numbers = jax.random.normal(jax.random.key(seed + len(shape)), shape)
    return numbers / jnp.sqrt(shape[0]) if len(shape) > 1 else numbers


def dense(params: Any, x: jax.Array, activation: Callable[..., Any] = jnp.tanh) -> jax.Array:
    """Return the output of a network of dense layers without biases."""
    for w in params[:-1]:
        x = activation(x @ w)
    return x @ params[-1]


def layers(*sizes: int) -> list[jax.Array]:
    """Return the weights of dense layers of these sizes."""
    return [normal(a, b, seed=i) for i, (a, b) in enumerate(itertools.pairwise(sizes))]
