"""Sparse arrays without elements and of empty shapes. Other tests of the rules: `cases/sparse`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse
from jax.experimental.sparse import BCOO

import xform

FUNCTIONS: dict[str, Callable[[BCOO], Any]] = {
    "to dense": lambda m: m.todense(),
    "sorted": lambda m: m.sort_indices().data,
    "duplicates summed": lambda m: m.sum_duplicates(nse=3).data,
    "duplicates summed to none": lambda m: m.sum_duplicates(nse=0).data,
    "sliced to none": lambda m: sparse.bcoo_slice(
        m, start_indices=(0,) * m.ndim, limit_indices=(0,) * m.ndim
    ).todense(),
}  # fmt: skip
# Shape, number of elements, and batch axes.
ARRAYS = [((5,), 0, 0), ((0,), 0, 0), ((3, 0), 0, 0), ((2, 0, 4), 0, 1)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arrays_without_elements_have_jaxs_derivatives(name: str) -> None:
    for shape, n, batch in ARRAYS:
        data = np.ones((*shape[:batch], n), np.float32)
        indices = np.zeros((*data.shape, len(shape) - batch), np.int32)

        def f(data: Any, indices: Any = indices, shape: Any = shape) -> Any:
            return FUNCTIONS[name](BCOO((data, indices), shape=shape))

        def pulled(data: Any, f: Any = f) -> list[Any]:
            pullbacks = [lib.vjp(f, data) for lib in (xform, jax)]
            return [pull(jnp.ones_like(y)) for y, pull in pullbacks]

        found, expected = jax.jit(pulled)(data)
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
