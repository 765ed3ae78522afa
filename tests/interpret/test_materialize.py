"""`materialize`: an identity that compilers write to memory, for every dtype and transform."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import xform
from tests.sharding import stays_where_it_is
from xform.interpret.materialize import materialize

DTYPES = ["float16", "bfloat16", "float32", "complex64", "int8", "uint32", "int32", "bool"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3, 4), (0, 2)])
def test_is_the_identity(dtype: str, shape: tuple[int, ...]) -> None:
    x = (jnp.arange(np.prod(shape, dtype=int)) % 3).reshape(shape).astype(dtype)
    for way in (lambda f: f, jax.jit):
        y = way(materialize)(x)
        assert (y.dtype, y.shape) == (x.dtype, shape)
        np.testing.assert_array_equal(y.astype("complex64"), x.astype("complex64"))


@pytest.mark.parametrize("first", [np.nan, np.inf, -0.0, 0.0])
def test_whatever_the_first_element_is(first: float) -> None:
    x = jnp.array([first, 1.0, np.nan])
    y = jax.jit(materialize)(x)
    np.testing.assert_array_equal(y.view("uint32"), x.view("uint32"))


def test_under_every_transform() -> None:
    f = lambda x: jnp.sum(jnp.sin(materialize(x * x)))
    plain = lambda x: jnp.sum(jnp.sin(x * x))
    x = jnp.array([0.3, -0.7, 1.4])
    for ad in (xform, jax):
        third = lambda g, ad=ad: ad.grad(lambda x: jnp.sum(ad.grad(
            lambda x: jnp.sum(ad.grad(g)(x)))(x)))  # fmt: skip
        np.testing.assert_allclose(jax.jit(third(f))(x), third(plain)(x), rtol=1e-5)
        y, dy = ad.jvp(f, (x,), (x,))
        np.testing.assert_allclose((y, dy), ad.jvp(plain, (x,), (x,)), rtol=1e-6)
        mapped = jax.jit(jax.vmap(ad.grad(f)))(jnp.stack([x, -x]))
        np.testing.assert_allclose(mapped, jax.vmap(ad.grad(plain))(jnp.stack([x, -x])), rtol=1e-6)


def test_what_it_is_on_each_platform() -> None:
    traced = jax.jit(materialize).trace(jnp.ones(3))
    text = {p: traced.lower(lowering_platforms=(p,)).as_text() for p in ("cpu", "cuda", "tpu")}
    assert [p for p in text if "optimization_barrier" in text[p]] == ["cuda"]
    assert [p for p in text if "while" in text[p]] == ["cpu"]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_values(kind: AxisType) -> None:
    stays_where_it_is(materialize, kind)
