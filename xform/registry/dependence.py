"""Dependence: on which elements of its operands an element of a primitive's result depends.

The dependence is one of the traits of a primitive (`xform.registry.traits`). It gives the sparsity
pattern of the primitive's Jacobian. There are four kinds:

- `Elementwise`: each element depends on the operands' elements at the same indices, as in `add`.
- `DataMovement`: each element is a copy of one element, as in `transpose`.
- `AxisByAxis`: the dependence is stated for each axis on its own, as in `reduce_sum`.
- `ElementPairs`: a list of pairs (element of the result, element of an operand).

A primitive whose derivative is zero needs no dependence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from xform._jax import JaxprEqn
from xform.program.dimensions import shape
from xform.registry.ends import EndsRule

# The value of each operand; None if it is not known.
Values = Sequence[np.ndarray | None]
MoveFunction = Callable[..., Any]
# A range of operands: the first, and the last + 1 (None: up to the end).
OperandRange = tuple[int, int | None]
NO_OPERANDS: OperandRange = (0, 0)


# A sparse boolean matrix by rows (CSR): the offsets of the rows, and the column indices. It has a
# row for each index (or element) of the result, and a column for each one of the operand.
Rows = tuple[np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Elementwise:
    """Each element of the result depends on the operands' elements at the same indices.

    If an operand is a scalar, all elements of the result depend on it. If there are several
    results, each depends on one operand: the first on the first, and so on.
    """


@dataclasses.dataclass(frozen=True)
class AxisLink:
    """How indices along an axis of the result depend on indices along an axis of an operand.

    Attributes:
      axis: the axis of the operand.
      rows: for each index of the result, the indices of the operand that it depends on. None: the
        same index, or the indices that `cumulative` says.
      cumulative: 1: index `i` depends on the operand's indices up to `i`; -1: from `i` to the end;
        0: the link is not cumulative.
    """

    axis: int
    rows: Rows | None = None
    cumulative: int = 0


# How the result depends on one operand: one entry for each axis of the result. None: the dependence
# is the same for all indices of that axis of the result. If no entry names an axis of the operand,
# the result depends on all indices of that axis.
Links = tuple[AxisLink | None, ...]


@dataclasses.dataclass(frozen=True)
class AxisByAxis:
    """The dependence is stated for each axis of the result on its own.

    Attributes:
      links: `links(eqn, values)` returns, for each operand, a list of `Links`. The dependence on
        the operand is the union of the list. `values` has the values of operands that do not depend
        on the inputs of the function, and None for other operands.
      reads: the operands whose values `links` uses.
    """

    links: Callable[[JaxprEqn, Values], list[list[Links]]]
    reads: OperandRange = NO_OPERANDS


@dataclasses.dataclass(frozen=True)
class ElementPairs:
    """The dependence is a list of pairs of elements, which are numbered in row-major order.

    Attributes:
      pairs: `pairs(eqn, values)` returns for each operand the elements on which each element of the
        result depends; None for an operand on which the result does not depend.
      reads: the operands whose values `pairs` uses.
      otherwise: the dependence if one of these values is not known.
    """

    pairs: Callable[[JaxprEqn, Sequence[Any]], list[Rows | None]]
    reads: OperandRange
    otherwise: AxisByAxis


@dataclasses.dataclass(frozen=True)
class DataMovement:
    """Each element of the result is an element of an operand, or a constant.

    Attributes:
      move: `move(params, *operands)` moves the elements of NumPy arrays as the primitive does. It
        is applied to arrays of element numbers, with 0 for a constant, so its result shows where
        each element comes from. None: the primitive itself is applied.
      reads: the operands that decide the movement, such as indices. They are not moved.
      otherwise: the dependence if the value of an operand in `reads` is not known.
    """

    move: MoveFunction | None = None
    reads: OperandRange = NO_OPERANDS
    otherwise: Elementwise | AxisByAxis | None = None


Dependence = Elementwise | DataMovement | AxisByAxis | ElementPairs
ELEMENTWISE_DEPENDENCE = Elementwise()
MOVEMENT_DEPENDENCE = DataMovement()


def axis_by_axis(links: Callable[[JaxprEqn], list[list[Links]]]) -> AxisByAxis:
    """Return an `AxisByAxis` for `links(eqn)`, which uses no values of operands."""
    return AxisByAxis(lambda eqn, values: links(eqn))


def by_ends(ends: EndsRule) -> AxisByAxis:
    """Return the dependence that follows from how the axes of the operands end.

    The result depends on the same index of an axis that stays, and on all indices of the others.
    """
    return AxisByAxis(lambda eqn, values: [[links] for links in links_of(eqn, ends)])


def links_of(eqn: JaxprEqn, ends: EndsRule) -> list[Links]:
    """Return for each operand the links to the axes that stay."""
    axes = range(len(shape(eqn.outvars[0])))
    return [tuple(AxisLink(of.index(j)) if j in of else None for j in axes) for of in ends(eqn)]


def index_rows(indices: np.ndarray) -> Rows:
    """Convert an array of indices, `[rows, k]`, to `Rows`; negative indices are left out."""
    valid = indices >= 0
    return np.concatenate([[0], np.cumsum(valid.sum(1))]), indices[valid]


def nonzero_rows(matrix: np.ndarray) -> Rows:
    """Return the positions of the nonzero elements of a matrix. NaN counts as nonzero."""
    rows, columns = np.nonzero(matrix)
    return np.searchsorted(rows, np.arange(len(matrix) + 1)), columns


def window_indices(n: int, m: int, size: int, stride: int = 1, low: int = 0, base: int = 1,
           spread: int = 1) -> np.ndarray:  # fmt: skip
    """Indices of the elements in each of `m` windows on an axis of `n` elements, `[m, size]`.

    -1 stands for an element of the padding, or for a hole that a dilation makes. `low` is the
    padding before the first element, `base` the dilation of the axis, `spread` the dilation of the
    window.
    """
    position = np.arange(m)[:, None] * stride + np.arange(size) * spread - low
    valid = (position >= 0) & (position <= (n - 1) * base) & (position % base == 0)
    return np.where(valid, position // base, -1)
