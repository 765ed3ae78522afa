"""A cotangent that a product reads is computed once for all its readers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import xform
from xform.steering.settings import Steering

WIDTH = 64
X = jnp.asarray(np.random.default_rng(0).normal(size=(32, WIDTH)), jnp.float32)
W = jnp.asarray(np.random.default_rng(1).normal(size=(8, WIDTH, WIDTH)) / 8, jnp.float32)


def layer(x, w):
    """Two residual blocks, each with a normalization before its product."""
    for activation in (jax.nn.gelu, jax.nn.softmax):
        y = x - x.mean(-1, keepdims=True)
        y = y * lax.rsqrt((y**2).mean(-1, keepdims=True) + 1e-5)
        x = x + activation(y @ w) @ w.T
    return x


def unrolled(ws, x):
    for w in ws:
        x = layer(x, w)
    return jnp.mean(x**2)


def scanned(ws, x):
    return jnp.mean(lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0] ** 2)


def lines(gradient, n: int) -> int:
    return jax.jit(gradient).lower(W[:n], X).compile().as_text().count("\n")


def count(f, *args) -> int:
    return str(jax.make_jaxpr(xform.grad(f))(*args)).count("xform_materialize")


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="it is written on a CPU alone")
def test_the_compiled_program_is_shorter() -> None:
    added = lambda: lines(xform.grad(unrolled), 8) - lines(xform.grad(unrolled), 4)
    shared = added()
    with Steering(long_chains_written=False).used():
        assert shared < 0.75 * added()


def test_gradients_are_those_of_jax() -> None:
    got = jax.jit(xform.grad(unrolled, argnums=(0, 1)))(W, X)
    want = jax.jit(jax.grad(unrolled, argnums=(0, 1)))(W, X)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7)
    once = lambda ad, x: jnp.sum(ad.grad(unrolled, argnums=1)(W[:2], x) ** 2)
    twice = lambda ad: jax.jit(ad.grad(functools.partial(once, ad)))
    np.testing.assert_allclose(twice(xform)(X), twice(jax)(X), rtol=1e-3, atol=1e-7)


def test_as_many_values_of_each_layer_are_written() -> None:
    assert [count(unrolled, W[:n], X) for n in (2, 3, 4)] == [2, 4, 6]
    assert count(unrolled, W[:4], X[:4]) == 0  # too small to matter


def test_cotangents_are_materialized_only_for_products_that_reshape_them() -> None:
    """A value of another shape may be read in another shape, made by a separate chain."""
    dense = lambda ws, x: jnp.mean(functools.reduce(lambda x, w: jax.nn.gelu(x @ w), ws, x) ** 2)
    assert count(dense, W, X) == 0
    assert count(dense, W, X[None]) == len(W) - 1


def test_cotangents_are_not_materialized_in_loops_nor_outside_jit() -> None:
    assert count(scanned, W, X) == 0
    np.testing.assert_allclose(xform.grad(unrolled)(W, X), jax.grad(unrolled)(W, X), rtol=1e-4,
                               atol=1e-7)  # fmt: skip
