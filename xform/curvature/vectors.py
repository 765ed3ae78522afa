"""Vector operations on pytrees of arrays, for iterative methods; and checks of their arguments."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xform.errors import WrongArgument, WrongDtype
from xform.program.arithmetic import Value
from xform.program.arrays import common_dtype, random
from xform.transforms.function import Tree, as_array, as_tuple


def real_vector(primals: Sequence[Tree], caller: str) -> tuple[Tree, ...]:
    """Convert primals to a tuple of pytrees of arrays.

    Raises `WrongArgument` if they are not a tuple or list, and `WrongDtype` if a leaf is not of a
    floating-point dtype. `caller` is the public function that the error names.
    """
    point = as_tuple(primals, "primals", caller)
    for leaf in jax.tree.leaves(point):
        dtype = jax.typeof(as_array(leaf, caller)).dtype
        if not jnp.issubdtype(dtype, np.floating):
            raise WrongDtype(
                f"{caller} requires real-valued primals",
                f"a leaf has dtype {dtype}",
                "",
                "pass only parameters of a float dtype, and close over all other values",
            )
    return jax.tree.map(lambda x: as_array(x, caller), point)


def random_key(key: Any, caller: str) -> Value:
    """Return the key, or raise `WrongArgument` if it is not a single JAX random key."""
    try:
        jax.eval_shape(jax.random.split, key)
    except (TypeError, ValueError):
        is_number = isinstance(key, int | np.integer)
        given = f"key={key}" if is_number else f"a key of type {type(key).__name__}"
        raise WrongArgument(
            f"{caller} with {given}",
            "it is not a single JAX random key",
            "",
            f"pass jax.random.key({key if is_number else 0})",
        ) from None
    return key


def accumulation_dtype(v: Tree) -> Any:
    """Return the dtype for sums over all elements: the common dtype, at least float32."""
    return common_dtype([np.dtype(np.float32), *(x.dtype for x in jax.tree.leaves(v))])


def dot(a: Tree, b: Tree) -> Value:
    """Return the inner product over all elements of two trees."""
    dtype = accumulation_dtype(a)
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    terms = [jnp.sum(x.astype(dtype) * y.astype(dtype)) for x, y in pairs]
    return functools.reduce(jnp.add, terms, jnp.zeros((), dtype))


def norm(a: Tree) -> Value:
    """Return the Euclidean norm over all elements."""
    return jnp.sqrt(dot(a, a))


def scale(a: Tree, factor: Value) -> Tree:
    """Return `factor * a`, in the dtypes of `a`."""
    return jax.tree.map(lambda x: x * jnp.asarray(factor).astype(x.dtype), a)


def plus(a: Tree, b: Tree, factor: Value = 1.0) -> Tree:
    """Return `a + factor * b`, in the dtypes of `a`."""
    cast = lambda value, x: jnp.asarray(value).astype(x.dtype)
    return jax.tree.map(lambda x, y: x + y.astype(x.dtype) * cast(factor, x), a, b)


def at_least_float32(a: Tree) -> Tree:
    """Return the vector with every leaf in at least float32."""
    return jax.tree.map(lambda x: x.astype(accumulation_dtype(x)), a)


def size(a: Tree) -> int:
    """Return the total number of elements."""
    return sum(x.size for x in jax.tree.leaves(a))


def rademacher(key: Value, like: Tree) -> Tree:
    """Return a vector of random signs, -1 or 1 with equal probability, with the types of `like`."""
    leaves, tree = jax.tree.flatten(like)
    keys = jax.random.split(key, max(len(leaves), 1))
    pairs = zip(keys, leaves, strict=False)
    draw = functools.partial(random, jax.random.rademacher)
    return tree.unflatten([draw(key, jax.typeof(x)) for key, x in pairs])


def unwrap(trees: tuple[Tree, ...]) -> Tree:
    """Return the tree itself if the tuple has only one, else the tuple."""
    return trees[0] if len(trees) == 1 else trees
