"""Checks of the identities that steer a compiler: for every dtype, under every transform."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import xform

DTYPES = ["float16", "bfloat16", "float32", "complex64", "int8", "uint32", "int32", "bool"]


def is_the_identity(identity: Callable[[Any], Any], dtype: str, shape: tuple[int, ...]) -> None:
    """Check that the function returns what it is given, jitted and not."""
    x = (jnp.arange(np.prod(shape, dtype=int)) % 3).reshape(shape).astype(dtype)
    for way in (lambda f: f, jax.jit):
        y = way(identity)(x)
        assert (y.dtype, y.shape) == (x.dtype, shape)
        np.testing.assert_array_equal(y.astype("complex64"), x.astype("complex64"))


def is_transformed_as_nothing(identity: Callable[[Any], Any], x: jax.Array) -> None:
    """Check third derivatives, tangents and batches of a function with the identity inside."""
    f = lambda x: jnp.sum(jnp.sin(identity(x * x)))
    plain = lambda x: jnp.sum(jnp.sin(x * x))
    for ad in (xform, jax):
        third = lambda g, ad=ad: ad.grad(lambda x: jnp.sum(ad.grad(
            lambda x: jnp.sum(ad.grad(g)(x)))(x)))  # fmt: skip
        np.testing.assert_allclose(jax.jit(third(f))(x), third(plain)(x), rtol=1e-5)
        y, dy = ad.jvp(f, (x,), (x,))
        np.testing.assert_allclose((y, dy), ad.jvp(plain, (x,), (x,)), rtol=1e-6)
        mapped = jax.jit(jax.vmap(ad.grad(f)))(jnp.stack([x, -x]))
        np.testing.assert_allclose(mapped, jax.vmap(ad.grad(plain))(jnp.stack([x, -x])), rtol=1e-6)
