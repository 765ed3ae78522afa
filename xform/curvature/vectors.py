"""Vector operations on pytrees of arrays, for the iterative solvers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xform.errors import WrongArgument, WrongDtype
from xform.program.arithmetic import Value, common_dtype
from xform.transforms.function import Tree, as_array, as_tuple


def real_vector(primals: Sequence[Tree], asked: str) -> tuple[Tree, ...]:
    """Convert primals to a tuple of pytrees of arrays.

    Raises `WrongArgument` if they are not a tuple or list, and `WrongDtype` if a leaf is not of a
    floating-point dtype. `asked` is the public function that the error names.
    """
    point = as_tuple(primals, "primals", asked)
    for leaf in jax.tree.leaves(point):
        dtype = jax.typeof(as_array(leaf, asked)).dtype
        if not jnp.issubdtype(dtype, np.floating):
            raise WrongDtype(
                f"{asked} requires real-valued primals",
                f"a leaf has dtype {dtype}",
                "",
                "pass only parameters of a float dtype, and close over all other values",
            )
    return jax.tree.map(lambda x: as_array(x, asked), point)


def random_key(key: Any, asked: str) -> Value:
    """Return the key, or raise `WrongArgument` if it is not a single JAX random key."""
    try:
        jax.eval_shape(jax.random.split, key)
    except (TypeError, ValueError):
        number = isinstance(key, int | np.integer)
        given = f"{key}" if number else f"of type {type(key).__name__}"
        raise WrongArgument(
            f"{asked} with key={given}" if number else f"{asked} with a key {given}",
            "it is not a single JAX random key",
            "",
            f"pass jax.random.key({key if number else 0})",
        ) from None
    return key


def accumulator(v: Tree) -> Any:
    """Return the dtype for sums over all elements: the common dtype, at least float32."""
    return common_dtype([np.dtype(np.float32), *(x.dtype for x in jax.tree.leaves(v))])


def dot(a: Tree, b: Tree) -> Value:
    """Return the inner product over all elements of two trees."""
    dtype = accumulator(a)
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    terms = [jnp.sum(x.astype(dtype) * y.astype(dtype)) for x, y in pairs]
    return functools.reduce(jnp.add, terms, jnp.zeros((), dtype))


def norm(a: Tree) -> Value:
    """Return the Euclidean norm over all elements."""
    return jnp.sqrt(dot(a, a))


def scale(a: Tree, by: Value) -> Tree:
    """Return `by * a`, in the dtypes of `a`."""
    return jax.tree.map(lambda x: x * jnp.asarray(by).astype(x.dtype), a)


def plus(a: Tree, b: Tree, by: Value = 1.0) -> Tree:
    """Return `a + by * b`, in the dtypes of `a`."""
    return jax.tree.map(lambda x, y: x + y.astype(x.dtype) * jnp.asarray(by).astype(x.dtype), a, b)


def wide(a: Tree) -> Tree:
    """Return the vector with every leaf in at least float32."""
    return jax.tree.map(lambda x: x.astype(accumulator(x)), a)


def size(a: Tree) -> int:
    """Return the total number of elements."""
    return sum(x.size for x in jax.tree.leaves(a))


def rademacher(key: Value, like: Tree) -> Tree:
    """Return a vector of random signs, -1 or 1 with equal probability, shaped like `like`."""
    leaves, tree = jax.tree.flatten(like)
    keys = jax.random.split(key, max(len(leaves), 1))
    return tree.unflatten(
        [jax.random.rademacher(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=False)]
    )


def unwrap(trees: tuple[Tree, ...]) -> Tree:
    """Return the tree itself if the tuple has only one, else the tuple."""
    return trees[0] if len(trees) == 1 else trees
