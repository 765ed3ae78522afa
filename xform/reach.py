"""Reach: on which elements of its operands an element of a primitive's result depends.

It is a trait of a primitive's rule. Elements are followed in one of four ways: one by one (`Each`),
by moving numbers as the primitive moves data (`Moved`), axis by axis (`Linked`), or by a list of
pairs (`Paired`). What differentiates to zero is no concern of these: the word `constant` says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from xform._jax import JaxprEqn

Values = Sequence[np.ndarray | None]
Moves = Callable[..., Any]
# Some operands: from one on, up to another.
Span = tuple[int, int | None]
NONE: Span = (0, 0)


# The rows of a sparse matrix of places: where each row begins and ends, and the places in it.
Rows = tuple[np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Each:
    """Element by element; an operand without axes is seen by all. Several results are pairs."""


@dataclasses.dataclass(frozen=True)
class Along:
    """An axis of the result that follows an axis of an operand.

    Attributes:
      axis: of the operand.
      sees: for each place on the result's axis the places on the operand's that it depends on;
        None: its own.
      cumulative: 1 or -1 for all places up to its own, from the first or from the last.
    """

    axis: int
    sees: Rows | None = None
    cumulative: int = 0


# For each axis of the result what it follows. An axis of the operand that none follows is seen
# whole; an axis of the result that follows none repeats what is seen.
Links = tuple[Along | None, ...]


@dataclasses.dataclass(frozen=True)
class Linked:
    """Axis by axis.

    Attributes:
      links: `links(eqn, values)` says for each operand in how many ways it is seen, and how. The
        `values` are those operands that are the same at every point, None for others.
      reads: the operands whose values it asks for.
    """

    links: Callable[[JaxprEqn, Values], list[list[Links]]]
    reads: Span = NONE


@dataclasses.dataclass(frozen=True)
class Paired:
    """By pairs of elements, counted in the order of the arrays.

    Attributes:
      pairs: `pairs(eqn, values)` says for each operand which of its elements an element of the
        result depends on; None for none.
      reads: the operands whose values it asks for; all of them must be known.
      otherwise: where they are not.
    """

    pairs: Callable[[JaxprEqn, Sequence[Any]], list[Rows | None]]
    reads: Span
    otherwise: Linked


@dataclasses.dataclass(frozen=True)
class Moved:
    """Each element of the result is an element of an operand, or none.

    Attributes:
      move: `move(params, *operands)` does with NumPy's arrays what the primitive does: what it does
        to numbers that stand for elements says where those go. 0 stands for none. None: the
        primitive itself is applied.
      reads: the operands that say where to, and are not moved. All their values must be known.
      otherwise: where they are not.
    """

    move: Moves | None = None
    reads: Span = NONE
    otherwise: Each | Linked | None = None


Reach = Each | Moved | Linked | Paired
EACH = Each()
MOVED = Moved()


def linked(links: Callable[[JaxprEqn], list[list[Links]]]) -> Linked:
    """Axis by axis, in a way that no value changes."""
    return Linked(lambda eqn, values: links(eqn))


def kept(ndim: int, axes: Sequence[int]) -> Links:
    """All axes but some, in order: what a reduction over those keeps."""
    return tuple(Along(i) for i in range(ndim) if i not in axes)


def places(at: np.ndarray) -> Rows:
    """Rows of places `[n, k]`; negative ones are none."""
    there = at >= 0
    return np.concatenate([[0], np.cumsum(there.sum(1))]), at[there]


def nonzeros(matrix: np.ndarray) -> Rows:
    """Where the rows of a matrix are not zero. NaN is not zero."""
    rows, columns = np.nonzero(matrix)
    return np.searchsorted(rows, np.arange(len(matrix) + 1)), columns


def window(n: int, m: int, size: int, stride: int = 1, low: int = 0, base: int = 1,
           spread: int = 1) -> np.ndarray:  # fmt: skip
    """Places of `m` windows on an axis of `n` elements, `[m, size]`; -1 where none is.

    `base - 1` holes are between the elements, `spread - 1` between the places of a window, and
    `low` places before the first element.
    """
    at = np.arange(m)[:, None] * stride + np.arange(size) * spread - low
    there = (at >= 0) & (at <= (n - 1) * base) & (at % base == 0)
    return np.where(there, at // base, -1)
