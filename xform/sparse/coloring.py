"""Colourings: which products with a sparse matrix to compute, and how to read the matrix from them.

Columns of one colour are computed by one push (a jvp), rows of one colour by one pull (a vjp). An
element is read from the push of its column's colour if no other column of that colour has a nonzero
in the row, or from the pull of its row's colour likewise. In a symmetric matrix, the element (i, j)
may be read as (j, i) too.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from scipy import sparse

from xform.errors import WrongArgument
from xform.sparse import greedy, symmetric
from xform.sparse.forest import Forest, forest
from xform.sparse.pattern import Pattern

JACOBIAN = ("auto", "column", "row", "bidirectional")
HESSIAN = ("auto", "star", "acyclic", "column")
ORDERS = ("best", "natural", "largest_first", "smallest_last", "saturation")
# How many thresholds are tried for the number of nonzeros of a dense row or column.
_BOUNDS = 12


@dataclasses.dataclass(frozen=True, eq=False)
class Coloring:
    """Colours of the columns and rows of a sparse matrix.

    Attributes:
      kind: "column", "row", "bidirectional", "star" or "acyclic".
      columns: the colour of each column, int, `[n]`; -1 for columns that are in no product.
      rows: the colour of each row, likewise, `[m]`.
      pushes: number of colours of columns: Jacobian-vector products.
      pulls: number of colours of rows: vector-Jacobian products.
      places: the index of each nonzero in the concatenated, flattened products; pushes come first.
      trees: for an acyclic colouring, how to compute off-diagonal elements; see `Forest`.
    """

    kind: str
    columns: np.ndarray
    rows: np.ndarray
    pushes: int
    pulls: int
    places: np.ndarray = dataclasses.field(repr=False)
    trees: Forest | None = dataclasses.field(default=None, repr=False)

    @property
    def evaluations(self) -> int:
        """The number of products."""
        return self.pushes + self.pulls

    def entries(self, pattern: Pattern) -> np.ndarray:
        """The number of the product that each nonzero is read from, int, `[nonzeros]`.

        Raises:
          WrongArgument: the colouring is for another pattern.
        """
        m, n = len(self.rows), len(self.columns)
        if pattern.shape != (m, n) or pattern.nonzeros != len(self.places):
            raise WrongArgument(
                f"colours of a {pattern.shape[0]} x {pattern.shape[1]} pattern with "
                f"{pattern.nonzeros} nonzeros",
                f"the colouring is for another one, {m} x {n} with {len(self.places)} nonzeros",
                "",
                "use the pattern and the coloring that the same call of prepare returned",
            )
        first = self.pushes * m
        pushed, pulled = self.places // max(m, 1), (self.places - first) // max(n, 1)
        return np.where(self.places < first, pushed, self.pushes + pulled)

    def __str__(self) -> str:
        pushes = f"{self.pushes} push{'es' * (self.pushes != 1)}"
        return f"{self.kind} colouring: {pushes}, {self.pulls} pull{'s' * (self.pulls != 1)}"

    def __repr__(self) -> str:
        return f"<{self}>"


def color_jacobian(pattern: Pattern, coloring: str, order: str, forward: bool = True) -> Coloring:
    """Colour the pattern of a Jacobian; `forward`: whether the function has forward mode."""
    if coloring == "column":
        return _by_columns(pattern, order)
    if coloring == "row" or not forward:
        return _by_rows(pattern, order)
    if coloring == "bidirectional":
        return _bidirectional(pattern, order)
    # Lower bounds: the nonzeros of one row (one column) all have different colours.
    least = int(pattern.row_counts.max(initial=0)), int(pattern.col_counts.max(initial=0))
    mean = pattern.nonzeros / max(*pattern.shape, 1)
    found: list[Coloring] = []
    if min(least) > 3 * mean + 2:
        found.append(_bidirectional(pattern, order))
    ways = sorted(zip(least, (_by_columns, _by_rows), strict=True), key=lambda way: way[0])
    for bound, color in ways:
        # For a large pattern, the second way is tried only if its lower bound is smaller.
        more = pattern.nonzeros <= greedy.LARGE or bound < least[0]
        if not found or (bound < min(c.evaluations for c in found) and more):
            found.append(color(pattern, order))
    # For equal numbers of products, prefer pushes, which cost less than pulls.
    return min(found, key=lambda c: (c.evaluations, c.pulls))


def color_hessian(pattern: Pattern, coloring: str, order: str) -> Coloring:
    """Colour a symmetric pattern."""
    if coloring == "column":
        return _by_columns(pattern, order)
    off = pattern.rows != pattern.cols
    graph = _graph(pattern.rows[off], pattern.cols[off], pattern.shape[0])
    kind = "acyclic" if coloring == "acyclic" else "star"
    color = symmetric.acyclic if kind == "acyclic" else symmetric.star
    colors = np.array(
        greedy.best(greedy.orders(graph, order), order, lambda v: color(graph, v), 3), int
    )
    if kind == "acyclic":
        return _acyclic(pattern, colors)
    twice = _repeated_neighbours(graph, colors)
    rows, cols = pattern.rows, pattern.cols
    own, other = ~twice(rows, colors[cols]), ~twice(cols, colors[rows]) & (rows != cols)
    by_own = _choose(colors[cols], own, colors[rows], other)
    read, at = np.where(by_own, colors[cols], colors[rows]), np.where(by_own, rows, cols)
    used, number = _renumber(read, colors)
    places = number[read] * len(colors) + at
    none = np.full(len(colors), -1)
    return Coloring("star", np.where(used[colors], number[colors], -1), none, int(used.sum()), 0,
                    places)  # fmt: skip


def _by_columns(pattern: Pattern, order: str) -> Coloring:
    colors = np.array(greedy.best_columns(pattern.scipy(), order), int)
    colors[pattern.col_counts == 0] = -1
    places = colors[pattern.cols] * pattern.shape[0] + pattern.rows
    none = np.full(pattern.shape[0], -1)
    return Coloring("column", colors, none, _count(colors), 0, places)


def _by_rows(pattern: Pattern, order: str) -> Coloring:
    transposed = sparse.csr_array(pattern.scipy().T)
    colors = np.array(greedy.best_columns(transposed, order), int)
    colors[pattern.row_counts == 0] = -1
    places = colors[pattern.rows] * pattern.shape[1] + pattern.cols
    return Coloring("row", np.full(pattern.shape[1], -1), colors, 0, _count(colors), places)


def _bidirectional(pattern: Pattern, order: str) -> Coloring:
    """Colour for dense rows by pulls and the rest by pushes, or for dense columns the other way.

    Rows that are pulled put no constraint on the colours of columns, and the other rows none on the
    colours of rows. Rows with more nonzeros than a threshold are pulled. Several thresholds are
    tried, and the best result is returned.

    Source: Coleman and Verma, "The Efficient Computation of Sparse Jacobian Matrices Using
    Automatic Differentiation", SIAM Journal on Scientific Computing 19 (1998), section 3.
    """
    matrix = pattern.scipy()
    ways: list[tuple[int, bool, np.ndarray]] = []
    for transposed in (False, True):
        lines = sparse.csr_array(matrix.T) if transposed else matrix
        counts = np.diff(lines.indptr)
        bounds = np.unique(np.append(counts, 0))
        for bound in bounds[np.unique(np.linspace(0, len(bounds) - 1, _BOUNDS).astype(int))]:
            # Lower bound: all colours differ within one sparse line, and in one position across the
            # dense lines.
            most = np.bincount(lines[counts > bound].indices, minlength=1).max()
            ways.append((int(bound + most), transposed, counts > bound))
    found: list[Coloring] = []
    for least, transposed, heavy in sorted(ways, key=lambda way: way[0]):
        if not found or least < min(c.evaluations for c in found):
            lines = sparse.csr_array(matrix.T) if transposed else matrix
            found.append(_dense_lines(pattern, lines, heavy, transposed, order))
    return min(found, key=lambda c: (c.evaluations, c.pulls))


def _dense_lines(
    pattern: Pattern, lines: Any, dense: np.ndarray, transposed: bool, order: str
) -> Coloring:
    """Colour the dense lines (rows or columns), and the rest of the matrix across the lines."""
    m, n = pattern.shape
    rest = sparse.csr_array(sparse.diags_array(~dense, dtype=np.int8) @ lines)
    rest.eliminate_zeros()
    across = np.array(greedy.best_columns(rest, order), int)
    across[np.diff(sparse.csr_array(rest.T).indptr) == 0] = -1
    own = np.full(len(dense), -1)
    own[dense] = greedy.best_columns(sparse.csr_array(lines[dense].T), order)
    columns, rows = (own, across) if transposed else (across, own)
    read_own = dense[pattern.cols if transposed else pattern.rows]
    pushed = read_own if transposed else ~read_own
    pushes = _count(columns)
    places = np.where(pushed, columns[pattern.cols] * m + pattern.rows,
                      pushes * m + rows[pattern.rows] * n + pattern.cols)  # fmt: skip
    return Coloring("bidirectional", columns, rows, pushes, _count(rows), places)


def _acyclic(pattern: Pattern, colors: np.ndarray) -> Coloring:
    used, number = _renumber(np.concatenate([colors[pattern.cols], colors[pattern.rows]]), colors)
    colors = np.where(used[colors], number[colors], -1)
    trees = forest(pattern, colors)
    places = colors[pattern.cols] * len(colors) + pattern.rows
    none = np.full(len(colors), -1)
    return Coloring("acyclic", colors, none, _count(colors), 0, places, trees)


def _graph(rows: np.ndarray, cols: np.ndarray, n: int) -> Any:
    return sparse.csr_array((np.ones(len(rows), np.int32), (rows, cols)), shape=(n, n))


def _count(colors: np.ndarray) -> int:
    return int(colors.max(initial=-1)) + 1


def _repeated_neighbours(graph: Any, colors: np.ndarray):
    """A function `(vertex, colour) -> whether the vertex has several neighbours of the colour`."""
    n, k = len(colors), max(_count(colors), 1)
    each = sparse.csr_array((np.ones(n, np.int32), colors, np.arange(n + 1)), shape=(n, k))
    counts = sparse.csr_array(graph @ each)
    counts.sort_indices()
    keys = np.repeat(np.arange(n), np.diff(counts.indptr)) * k + counts.indices
    several = keys[counts.data > 1]
    return lambda at, color: np.isin(at * k + color, several)


def _choose(a: np.ndarray, can_a: np.ndarray, b: np.ndarray, can_b: np.ndarray) -> np.ndarray:
    """Whether each element is read from its colour `a` (else `b`), so that few colours are used.

    `can_a`, `can_b`: whether the element can be read from this colour.
    """
    assert (can_a | can_b).all()
    k = int(max(a.max(initial=-1), b.max(initial=-1))) + 1
    used = np.zeros(k + 1, bool)
    used[a[can_a & ~can_b]] = used[b[can_b & ~can_a]] = True
    left = can_a & can_b & ~used[a] & ~used[b]
    while left.any():
        counts = np.bincount(a[left], minlength=k) + np.bincount(b[left], minlength=k)
        used[counts.argmax()] = True
        left &= ~used[a] & ~used[b]
    return can_a & (used[a] | ~can_b)


def _renumber(read: np.ndarray, colors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which colours are used, and new consecutive numbers for these."""
    used = np.zeros(int(max(read.max(initial=-1), colors.max(initial=-1))) + 1, bool)
    used[read] = True
    return used, np.cumsum(used) - 1
