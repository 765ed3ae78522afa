"""`Pattern`: the elements of a Jacobian or Hessian that may be nonzero."""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import Any

import numpy as np
from scipy import sparse

from xform.errors import WrongArgument
from xform.sparse.picture import dots, draw
from xform.terminal.notebook import Result


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Pattern(Result):
    """The elements of a matrix that may be nonzero, in row-major order.

    There is a row for each element of the output and a column for each element of the input, leaf
    by leaf, each leaf in the order of `ravel`. `print` shows counts and a picture in characters.
    A "nonzero" is an element that may be nonzero.

    Attributes:
      rows: the row of each nonzero, int, of shape `[nonzeros]`.
      cols: the column of each nonzero, int, of shape `[nonzeros]`.
      shape: shape of the matrix.
      name: title of the matrix, such as "Jacobian of f".

    >>> pattern = xform.sparse.sparsity(lambda x: x[1:] * x[:-1], jnp.ones(4))
    >>> pattern.rows.tolist(), pattern.cols.tolist()
    ([0, 0, 1, 1, 2, 2], [0, 1, 1, 2, 2, 3])
    >>> print(pattern)
    Jacobian of <lambda>: 3 x 4, 6 nonzeros (50%), at most 2 in a row, 2 in a column
      # # . .
      . # # .
      . . # #
    """

    rows: np.ndarray
    cols: np.ndarray
    shape: tuple[int, int]
    name: str = "matrix"

    @property
    def nonzeros(self) -> int:
        """The number of elements that may be nonzero."""
        return len(self.rows)

    @property
    def density(self) -> float:
        """The nonzeros as a fraction of all elements; 0 for a matrix without elements."""
        elements = self.shape[0] * self.shape[1]
        return self.nonzeros / elements if elements else 0.0

    @functools.cached_property
    def row_counts(self) -> np.ndarray:
        """The number of nonzeros in each row."""
        return np.bincount(self.rows, minlength=self.shape[0])

    @functools.cached_property
    def col_counts(self) -> np.ndarray:
        """The number of nonzeros in each column."""
        return np.bincount(self.cols, minlength=self.shape[1])

    def todense(self) -> np.ndarray:
        """Return the pattern as a dense boolean matrix."""
        dense = np.zeros(self.shape, bool)
        dense[self.rows, self.cols] = True
        return dense

    def scipy(self) -> Any:
        """Return the pattern as a boolean `scipy.sparse.csr_array`."""
        ones = np.ones(self.nonzeros, bool)
        return sparse.csr_array((ones, (self.rows, self.cols)), shape=self.shape)

    def contains(self, other: Any) -> bool:
        """Return whether this pattern contains every nonzero of another matrix.

        Args:
          other: a `Pattern`, a sparse array of SciPy or JAX, or a dense matrix.

        Returns:
          True if it does; False if it does not, or if the shapes differ.

        Raises:
          WrongArgument: `other` is not a matrix.
        """
        inner = pattern_of(other, "contains")
        if inner.shape != self.shape:
            return False
        own, others = (p.rows * p.shape[1] + p.cols for p in (self, inner))
        return bool(np.isin(others, own).all())

    def plot(self, path: str | os.PathLike[str], coloring: Any = None) -> None:
        """Draw the pattern to a file with matplotlib.

        Args:
          path: the file; its suffix, .png, .svg or .pdf, is the format.
          coloring: a `Coloring`, such as `xform.sparse.jacobian(f).prepare(x).coloring`. Nonzeros
            that are read from the same product with a vector then have one colour in the picture.
            None: one colour for all.

        Raises:
          MissingExtra: matplotlib is not installed.
          WrongArgument: the file has another suffix, or the colouring is for another pattern.
        """
        numbers = None if coloring is None else coloring.entries(self)
        draw(path, self.rows, self.cols, self.shape, str(self).splitlines()[0], numbers)

    def __str__(self) -> str:
        m, n = self.shape
        row_max, col_max = (int(c.max(initial=0)) for c in (self.row_counts, self.col_counts))
        head = (
            f"{self.name}: {m} x {n}, {self.nonzeros} nonzeros ({100 * self.density:.3g}%), "
            f"at most {row_max} in a row, {col_max} in a column"
        )
        return "\n".join([head, *("  " + line for line in dots(self.rows, self.cols, self.shape))])

    def __repr__(self) -> str:
        return f"<{str(self).splitlines()[0]}>"


def pattern_from(matrix: Any, name: str) -> Pattern:
    """Return the pattern of the elements that a SciPy sparse array stores, with a title."""
    stored = sparse.coo_array(sparse.csr_array(matrix))
    order = np.lexsort((stored.col, stored.row))
    m, n = stored.shape
    return Pattern(stored.row[order], stored.col[order], (m, n), name)


def pattern_of(matrix: Any, request: str) -> Pattern:
    """Convert a SciPy or JAX sparse array or a dense matrix to a `Pattern`.

    `request` is what the user asked for, for the error message.
    """
    if isinstance(matrix, Pattern):
        return matrix
    if hasattr(matrix, "indices") and hasattr(matrix, "todense") and not sparse.issparse(matrix):
        indices = np.asarray(matrix.indices)  # JAX may pad a BCOO with indices beyond the matrix
        inside = (indices < np.array(matrix.shape)).all(-1)
        rows, cols = indices[inside].T
        ones = np.ones(len(rows), bool)
        return pattern_from(sparse.csr_array((ones, (rows, cols)), shape=matrix.shape), "pattern")
    if sparse.issparse(matrix):
        return pattern_from(matrix != 0, "pattern")
    dense = np.asarray(matrix)
    if dense.ndim != 2 or dense.dtype.kind not in "biufc":
        raise WrongArgument(
            f"{request} with a pattern of type {type(matrix).__name__}",
            "it is not a matrix",
            "",
            "give a Pattern (from xform.sparse.sparsity), a sparse array of SciPy or JAX, or a "
            "boolean matrix",
        )
    return pattern_from(sparse.csr_array(dense != 0), "pattern")
