"""Dependence: on which elements of its operands an element of a primitive's result depends.

The dependence is a trait in a primitive's rule, and gives the sparsity pattern of its Jacobian.
There are four kinds. `Elementwise`: element by element. `DataMovement`: found by moving element
numbers as the primitive moves data. `AxisByAxis`: axis by axis. `ElementPairs`: a list of pairs of
elements. Primitives with a zero derivative need no dependence: their rule is `constant`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from xform._jax import JaxprEqn

Values = Sequence[np.ndarray | None]
Moves = Callable[..., Any]
# A range of operands: first and last + 1 (None: up to the end).
OperandRange = tuple[int, int | None]
NO_OPERANDS: OperandRange = (0, 0)


# A sparse boolean matrix by rows (CSR): the offsets of the rows, and the column indices.
Rows = tuple[np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Elementwise:
    """Element by element.

    All elements of the result depend on a scalar operand. If there are several results, each
    depends on one operand: the first on the first, and so on.
    """


@dataclasses.dataclass(frozen=True)
class AxisLink:
    """How indices along an axis of the result depend on indices along an axis of an operand.

    Attributes:
      axis: the axis of the operand.
      rows: for each index of the result, the indices of the operand that it depends on; None: the
        same index.
      cumulative: 1: index `i` depends on the operand's indices up to `i`; -1: from `i` to the end.
    """

    axis: int
    rows: Rows | None = None
    cumulative: int = 0


# One entry for each axis of the result. None: the dependence is the same for all indices of that
# axis of the result. If no entry names an axis of the operand, the result depends on all its
# indices.
Links = tuple[AxisLink | None, ...]


@dataclasses.dataclass(frozen=True)
class AxisByAxis:
    """Axis by axis.

    Attributes:
      links: `links(eqn, values)` returns a list of `Links` for each operand; the dependence is the
        union of these. `values` has the values of operands that do not depend on the inputs of the
        function, and None for other operands.
      reads: the operands whose values it uses.
    """

    links: Callable[[JaxprEqn, Values], list[list[Links]]]
    reads: OperandRange = NO_OPERANDS


@dataclasses.dataclass(frozen=True)
class ElementPairs:
    """By pairs of elements, numbered in row-major order.

    Attributes:
      pairs: `pairs(eqn, values)` returns for each operand the elements on which each element of the
        result depends; None for an operand that does not matter.
      reads: the operands whose values it uses; all of them must be known.
      otherwise: the dependence if they are not known.
    """

    pairs: Callable[[JaxprEqn, Sequence[Any]], list[Rows | None]]
    reads: OperandRange
    otherwise: AxisByAxis


@dataclasses.dataclass(frozen=True)
class DataMovement:
    """Each element of the result is an element of an operand, or a constant.

    Attributes:
      move: `move(params, *operands)` does on NumPy arrays what the primitive does. It is applied to
        arrays of element numbers, with 0 for a constant. None: the primitive itself is applied.
      reads: the operands that decide the movement, such as indices, and are not moved. All their
        values must be known.
      otherwise: the dependence if they are not known.
    """

    move: Moves | None = None
    reads: OperandRange = NO_OPERANDS
    otherwise: Elementwise | AxisByAxis | None = None


Dependence = Elementwise | DataMovement | AxisByAxis | ElementPairs
ELEMENTWISE_DEPENDENCE = Elementwise()
MOVEMENT_DEPENDENCE = DataMovement()


def axis_by_axis(links: Callable[[JaxprEqn], list[list[Links]]]) -> AxisByAxis:
    """Axis by axis, for links that do not depend on values of operands."""
    return AxisByAxis(lambda eqn, values: links(eqn))


def reduction_links(ndim: int, axes: Sequence[int]) -> Links:
    """Links of a reduction over `axes` of an operand with `ndim` axes."""
    return tuple(AxisLink(i) for i in range(ndim) if i not in axes)


def index_rows(at: np.ndarray) -> Rows:
    """Convert an array of indices, `[n, k]`, to `Rows`; negative indices are left out."""
    valid = at >= 0
    return np.concatenate([[0], np.cumsum(valid.sum(1))]), at[valid]


def nonzero_rows(matrix: np.ndarray) -> Rows:
    """The nonzero elements of a matrix, as `Rows`. NaN counts as nonzero."""
    rows, columns = np.nonzero(matrix)
    return np.searchsorted(rows, np.arange(len(matrix) + 1)), columns


def window_indices(n: int, m: int, size: int, stride: int = 1, low: int = 0, base: int = 1,
           spread: int = 1) -> np.ndarray:  # fmt: skip
    """Indices of the elements in each of `m` windows on an axis of `n` elements, `[m, size]`.

    -1 marks padding and holes. `low` is the padding before the first element, `base` the dilation
    of the axis, `spread` the dilation of the window_indices.
    """
    at = np.arange(m)[:, None] * stride + np.arange(size) * spread - low
    valid = (at >= 0) & (at <= (n - 1) * base) & (at % base == 0)
    return np.where(valid, at // base, -1)
