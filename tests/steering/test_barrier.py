"""`barrier`: an identity that waits for other values, for every dtype and transform."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import xform
from tests.sharding import stays_where_it_is
from xform.steering.barrier import barrier

DTYPES = ["float16", "bfloat16", "float32", "complex64", "int8", "uint32", "int32", "bool"]
VALUES = np.array([0.0, 1.0, -2.0, np.nan, np.inf])


def cast(values, dtype):
    x = jnp.asarray(values)
    return (
        x.astype(dtype)
        if jnp.issubdtype(dtype, np.inexact)
        else jnp.array([0, 1, 2, 3, 0]).astype(dtype)
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_barrier_is_the_identity_for_zero_nan_and_infinite_cotangents(dtype: str) -> None:
    x = cast(VALUES, dtype)
    for ct in (0.0, -0.0, 1.0, np.nan, np.inf, -np.inf):
        for way in (lambda f: f, jax.jit):
            (y,) = way(lambda x, ct: barrier([x], [ct]))(x, jnp.full((2, 3), ct, np.float32))
            assert y.dtype == x.dtype
            np.testing.assert_array_equal(y.astype("complex64"), x.astype("complex64"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_waits_for_a_cotangent_of_any_dtype(dtype: str) -> None:
    x = jnp.asarray(VALUES, np.float32)
    for ct in (cast(VALUES, dtype), cast(VALUES, dtype)[0], cast(VALUES, dtype)[:0]):
        (y,) = jax.jit(lambda x, ct: barrier([x], [ct]))(x, ct)
        np.testing.assert_array_equal(y, x)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("dtype", ["float64", "complex128", "int64"])
def test_in_64_bits(dtype: str) -> None:
    x = cast(VALUES, dtype)
    np.testing.assert_array_equal(jax.jit(lambda x: barrier([x], [x]))(x)[0], x)


def test_keys_zero_size_arrays_and_float0() -> None:
    key, empty = jax.random.key(0), jnp.zeros((0, 3))
    out = jax.jit(lambda k, e, x: barrier([k, e, x], [x, e]))(key, empty, jnp.ones(2))
    assert jax.random.key_data(out[0]).tolist() == jax.random.key_data(key).tolist()
    assert out[1].shape == (0, 3)
    float0 = np.zeros(3, jax.dtypes.float0)
    assert barrier([empty], [float0, key]) == [empty]
    assert barrier([], [jnp.ones(2)]) == []
    no_array = object()  # the cotangent of a hijax value
    assert barrier([empty], [no_array]) == [empty]


def test_keys_wait() -> None:
    traced = jax.make_jaxpr(lambda key, x: barrier([key], [x]))(jax.random.key(0), jnp.ones(2))
    (held,) = (e for e in traced.eqns if e.primitive.name == "xform_barrier")
    assert held.invars[0].aval.dtype == jnp.uint32


def test_the_compiler_cannot_fold_it() -> None:
    def dots(again) -> int:
        f = lambda x, ct: (x @ x, again(x, ct) @ again(x, ct) * ct)
        x = jnp.ones((64, 64))
        return len(
            re.findall(r" dot\(|__onednn|custom-call", jax.jit(f).lower(x, x).compile().as_text())
        )

    assert dots(lambda x, ct: x) == 1
    assert dots(lambda x, ct: barrier([x], [ct])[0]) == 2


def test_batched() -> None:
    f = lambda x, ct: barrier([x * 2], [ct])[0]
    x, ct = jnp.arange(6.0).reshape(2, 3), jnp.ones((2, 4))
    np.testing.assert_array_equal(jax.vmap(f)(x, ct), x * 2)
    np.testing.assert_array_equal(jax.vmap(f, (0, None))(x, ct[0]), x * 2)
    np.testing.assert_array_equal(jax.vmap(f, (None, 0))(x[0], ct), jnp.stack([x[0] * 2] * 2))
    np.testing.assert_array_equal(jax.vmap(f, (1, None), 1)(x, ct[0]), x * 2)


@pytest.mark.parametrize("t", [jax, xform], ids=["jax", "xform"])
def test_differentiated_by_both(t) -> None:
    f = lambda x, ct: barrier([x * 2], [ct])[0]
    x, ct = jnp.arange(6.0).reshape(2, 3), jnp.ones((2, 4))
    loss = lambda x, ct: jnp.sum(f(x, ct) ** 2)
    equal = np.testing.assert_array_equal
    equal(t.grad(loss)(x, ct), 8 * x)
    equal(t.grad(loss, 1)(x, ct), 0 * ct)
    equal(t.jvp(lambda x: f(x, ct), (x,), (x,))[1], 2 * x)
    equal(t.hessian(lambda x: jnp.sum(f(x, ct[0]) ** 2))(x[0]), 8 * np.eye(3))
    equal(t.grad(lambda x: jnp.sum(t.grad(loss)(x, ct)))(x), 8 + 0 * x)


def test_derivatives_are_held_back_too() -> None:
    f = lambda x: jnp.sum(barrier([x * 2], [x])[0])
    for second in (xform.linearize, jax.linearize):
        assert "xform_barrier" in str(jax.make_jaxpr(lambda x: second(f, x)[1](x))(jnp.ones(3)))  # noqa: B023


def test_lowers_to_a_barrier_elsewhere() -> None:
    f = jax.jit(lambda x, ct: barrier([x], [ct]))
    text = f.trace(jnp.ones(3), jnp.ones(3)).lower(lowering_platforms=("tpu",)).as_text()
    assert "optimization_barrier" in text
    assert "select" not in text
    text = f.trace(jnp.ones(3), jnp.ones(3)).lower(lowering_platforms=("cpu",)).as_text()
    assert "optimization_barrier" not in text


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_values(kind: AxisType) -> None:
    stays_where_it_is(lambda x: barrier([x], [x * 2])[0], kind)
    stays_where_it_is(lambda x: barrier([x * 3], [x * 2])[0] / 3, kind)
