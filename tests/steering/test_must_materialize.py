"""The compiler keeps a small saved value instead of the larger values that it is made from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import xform
from xform.steering.settings import Steering

KEY = jax.random.key(0)
W, X = jnp.ones((64, 64)) / 64, jnp.ones((512, 64))


def dropout(w, x):
    """Three layers, each with a mask of random bits."""
    for i in range(3):
        x = jnp.tanh(x @ w)
        x = jnp.where(jax.random.bernoulli(jax.random.fold_in(KEY, i), 0.9, x.shape), x, 0)
    return jnp.sum(x * x)


def relu(w, x):
    """The signs of a product take a quarter of its bytes."""
    for _ in range(3):
        y = x @ w
        x = jnp.where(y > 0, y * 0.5, y * 2.0)
    return jnp.sum(x)


def count(f, *args) -> int:
    return str(jax.make_jaxpr(f)(*args)).count("xform_materialize")


@pytest.mark.parametrize("loss", [dropout, relu])
def test_materialized_masks_reduce_temporary_bytes(loss) -> None:
    step = lambda: jax.jit(lambda w, x: xform.value_and_grad(loss)(w, x)).lower(W, X).compile()
    assert count(xform.grad(loss), W, X) >= 2
    bytes_of = lambda compiled: compiled.memory_analysis().temp_size_in_bytes
    own = step()
    want = jax.jit(jax.value_and_grad(loss))(W, X)
    np.testing.assert_allclose(own(W, X)[0], want[0], rtol=1e-6)
    np.testing.assert_allclose(own(W, X)[1], want[1], rtol=1e-5)
    with Steering(saved_values_written=False).used():
        assert bytes_of(own) < bytes_of(step())


def test_values_whose_source_is_no_larger_or_kept_are_not_materialized() -> None:
    same = lambda w: jnp.sum(jnp.sin(X @ w))  # cos of a product takes as much as the product
    assert count(xform.grad(same), W) == 0
    rounded = lambda w: jnp.sum(jnp.sin((X @ w).astype(jnp.bfloat16).astype(jnp.float32)))
    assert count(xform.grad(rounded), W) == 0  # half the bytes: no gain on CPU
    of_input = lambda w: jnp.sum(jnp.where(X > 0, X @ w, 0.0))  # the input exists anyway
    assert count(xform.grad(of_input), W) == 0
    both = lambda w: jnp.sum(jnp.where((y := X @ w) > 0, jnp.exp(y), y * y))  # the product is saved
    assert count(xform.grad(both, policy=xform.policies.save_dots), W) == 0


def test_not_inside_loops_nor_outside_jit() -> None:
    def scanned(w):
        return jnp.sum(jax.lax.scan(lambda x, _: (dropout(w, x) * x, None), X, None, length=2)[0])

    assert count(xform.grad(scanned), W) == 0
    value, grad = xform.value_and_grad(dropout)(W, X)
    want = jax.value_and_grad(dropout)(W, X)
    np.testing.assert_allclose(value, want[0], rtol=1e-6)
    np.testing.assert_allclose(grad, want[1], rtol=1e-5)


def test_in_a_region_and_a_call() -> None:
    region = xform.remat(dropout, policy=xform.policies.min_cut)
    assert count(xform.grad(region), W, X) == 3
    assert count(xform.grad(jax.jit(dropout)), W, X) == 3


def test_gradients_of_gradients() -> None:
    first = lambda ad: lambda w: jnp.sum(ad.grad(dropout)(w, X) ** 2)
    want = jax.grad(first(jax))(W)
    np.testing.assert_allclose(xform.grad(first(xform))(W), want, rtol=1e-4)
    np.testing.assert_allclose(jax.jit(jax.grad(first(xform)))(W), want, rtol=1e-4)
    np.testing.assert_allclose(jax.jit(xform.grad(first(xform)))(W), want, rtol=1e-4)


def pooled(activation, pool):
    """Convolutions, an activation, and windows of two by two."""

    def loss(ws, x):
        for w in ws:
            dims = ("NHWC", "HWIO", "NHWC")
            x = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=dims)
            x = pool(activation(x), window_shape=(2, 2), strides=(2, 2))
        return jnp.mean(x**2)

    return loss


@pytest.mark.parametrize("pool", [nn.avg_pool, nn.max_pool])
@pytest.mark.parametrize("activation", [jax.nn.relu, jax.nn.gelu, jax.nn.silu, jnp.tanh])
def test_pooled_convolutions_take_no_more_memory_than_under_jax(activation, pool) -> None:
    """XLA:CPU would pass the constants of the activation to a library as whole arrays."""
    shape = jax.ShapeDtypeStruct
    ws = [shape((3, 3, a, b), "float32") for a, b in ((3, 16), (16, 32))]
    loss, x = pooled(activation, pool), shape((16, 32, 32, 3), "float32")
    temp = lambda g: jax.jit(g).lower(ws, x).compile().memory_analysis().temp_size_in_bytes
    theirs = temp(jax.grad(loss))
    for policy in (None, xform.policies.save_everything, xform.policies.save_nothing):
        assert temp(xform.grad(loss, policy=policy)) <= theirs * 1.06
