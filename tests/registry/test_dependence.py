"""Rows of indices, beside the definition."""

import itertools

import numpy as np
import pytest

from xform.registry.dependence import index_rows, nonzero_rows, window_indices


def rows_of(rows: tuple[np.ndarray, np.ndarray]) -> list[list[int]]:
    offsets, columns = rows
    assert offsets[0] == 0
    assert offsets[-1] == len(columns)
    return [columns[a:b].tolist() for a, b in itertools.pairwise(offsets)]


def test_rows_of_a_matrix_and_of_indices() -> None:
    matrix = np.array([[0, 2, np.nan], [0, 0, 0], [1, 0, 0]])
    assert rows_of(nonzero_rows(matrix)) == [[1, 2], [], [0]]
    assert rows_of(nonzero_rows(np.zeros((0, 3)))) == []
    assert rows_of(index_rows(np.array([[3, -1], [-1, -1], [0, 2]]))) == [[3], [], [0, 2]]


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("low", [-1, 0, 2])
@pytest.mark.parametrize("base", [1, 3])
@pytest.mark.parametrize("spread", [1, 2])
def test_windows(stride: int, low: int, base: int, spread: int) -> None:
    """Beside windows of an array of element numbers that is dilated and padded as NumPy does."""
    n, size = 4, 3
    dilated = np.full((n - 1) * base + 1, -1)
    dilated[::base] = np.arange(n)
    padded = np.pad(dilated, (max(low, 0), 20), constant_values=-1)[max(-low, 0) :]
    want = [[padded[k * stride + j * spread] for j in range(size)] for k in range(5)]
    found = window_indices(n, 5, size, stride, low, base, spread)
    np.testing.assert_array_equal(found, want)
