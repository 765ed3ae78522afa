"""`materialize`: an identity that compilers write to memory, for every dtype and transform."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from tests.identity import DTYPES, is_the_identity, is_transformed_as_nothing
from tests.sharding import stays_where_it_is
from xform.steering.materialize import materialize


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3, 4), (0, 2)])
def test_is_the_identity(dtype: str, shape: tuple[int, ...]) -> None:
    is_the_identity(materialize, dtype, shape)


@pytest.mark.parametrize("first", [np.nan, np.inf, -0.0, 0.0])
def test_is_the_identity_bitwise_if_the_first_element_is_nan_inf_or_zero(first: float) -> None:
    x = jnp.array([first, 1.0, np.nan])
    y = jax.jit(materialize)(x)
    np.testing.assert_array_equal(y.view("uint32"), x.view("uint32"))


def test_under_every_transform() -> None:
    is_transformed_as_nothing(materialize, jnp.array([0.3, -0.7, 1.4]))


def test_lowers_to_a_loop_on_cpu_a_barrier_on_gpu_and_nothing_on_tpu() -> None:
    traced = jax.jit(materialize).trace(jnp.ones(3))
    text = {p: traced.lower(lowering_platforms=(p,)).as_text() for p in ("cpu", "cuda", "tpu")}
    assert [p for p in text if "optimization_barrier" in text[p]] == ["cuda"]
    assert [p for p in text if "while" in text[p]] == ["cpu"]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_values(kind: AxisType) -> None:
    stays_where_it_is(materialize, kind)
