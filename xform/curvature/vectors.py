"""Vectors that are trees of arrays: the few operations that solvers need."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xform.arithmetic import Value, common_dtype
from xform.errors import WrongArgument, WrongDtype
from xform.transforms.function import Tree, as_array, as_tuple


def real_vector(primals: Sequence[Tree], asked: str) -> tuple[Tree, ...]:
    """Primals as trees of arrays; refused if they are no tuple, or a leaf is not real."""
    point = as_tuple(primals, "primals", asked)
    for leaf in jax.tree.leaves(point):
        dtype = jax.typeof(as_array(leaf, asked)).dtype
        if not jnp.issubdtype(dtype, np.floating):
            raise WrongDtype(
                f"{asked} requires real-valued primals",
                f"a leaf has dtype {dtype}",
                "",
                "close over what is not differentiated, and give parameters of a float dtype",
            )
    return jax.tree.map(lambda x: as_array(x, asked), point)


def random_key(key: Any, asked: str) -> Value:
    """A JAX random key; refused if it is not exactly one."""
    try:
        jax.eval_shape(jax.random.split, key)
    except (TypeError, ValueError):
        number = isinstance(key, int | np.integer)
        given = f"{key}" if number else f"of type {type(key).__name__}"
        raise WrongArgument(
            f"{asked} with key={given}" if number else f"{asked} with a key {given}",
            "it is not one JAX random key",
            "",
            f"pass jax.random.key({key if number else 0})",
        ) from None
    return key


def accumulator(v: Tree) -> Any:
    """The dtype in which sums over all elements are formed: float32 at least."""
    return common_dtype([np.dtype(np.float32), *(x.dtype for x in jax.tree.leaves(v))])


def dot(a: Tree, b: Tree) -> Value:
    """The sum of products of all elements."""
    dtype = accumulator(a)
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    terms = [jnp.sum(x.astype(dtype) * y.astype(dtype)) for x, y in pairs]
    return functools.reduce(jnp.add, terms, jnp.zeros((), dtype))


def norm(a: Tree) -> Value:
    """The Euclidean length."""
    return jnp.sqrt(dot(a, a))


def scaled(a: Tree, by: Value) -> Tree:
    """A vector times a number, in the vector's dtypes."""
    return jax.tree.map(lambda x: x * jnp.asarray(by).astype(x.dtype), a)


def plus(a: Tree, b: Tree, by: Value = 1.0) -> Tree:
    """`a + by b`, in the dtypes of `a`."""
    return jax.tree.map(lambda x, y: x + y.astype(x.dtype) * jnp.asarray(by).astype(x.dtype), a, b)


def wide(a: Tree) -> Tree:
    """A vector in float32 at least."""
    return jax.tree.map(lambda x: x.astype(accumulator(x)), a)


def size(a: Tree) -> int:
    """The number of elements."""
    return sum(x.size for x in jax.tree.leaves(a))


def rademacher(key: Value, like: Tree) -> Tree:
    """Signs, each as likely as the other."""
    leaves, tree = jax.tree.flatten(like)
    keys = jax.random.split(key, max(len(leaves), 1))
    return tree.unflatten(
        [jax.random.rademacher(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=False)]
    )


def unwrapped(trees: tuple[Tree, ...]) -> Tree:
    """One tree if there is one primal, else the tuple."""
    return trees[0] if len(trees) == 1 else trees
