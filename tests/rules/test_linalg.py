"""Masks of matrices."""

from typing import Any

import jax
import numpy as np
import pytest
from jax import export

from xform.rules.linalg import identity, tri


@pytest.mark.parametrize(("m", "n"), [(3, 3), (2, 4), (4, 2), (1, 1)])
def test_masks_of_symbolic_matrices_are_those_of_known_ones(m: int, n: int) -> None:
    masks: Any = lambda m, n: (tri(m, n), tri(m, n, 1), tri(m, n, -2), identity(m, n))
    known = masks(m, n)
    assert all(isinstance(mask, np.ndarray) for mask in known)
    symbols = export.symbolic_shape("m, n")
    of_sizes = lambda x: masks(*x.shape)
    exported = export.export(jax.jit(of_sizes))(jax.ShapeDtypeStruct(symbols, np.float32))
    for a, b in zip(exported.call(np.zeros((m, n), np.float32)), known, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(known[0], np.tri(m, n, dtype=bool))
    np.testing.assert_array_equal(known[3], np.eye(m, n, dtype=bool))
