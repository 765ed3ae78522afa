"""Colourings: the products to compute with a sparse matrix, and where each element is in them.

A colouring gives each column, each row or both a number, its *colour*. One push (a jvp) multiplies
the matrix by the sum of the unit vectors of all columns of one colour. One pull (a vjp) does the
same for the rows of one colour. An element can be read from the push of its column's colour if no
other column of that colour has a nonzero in the element's row. It can be read from the pull of its
row's colour if no other row of that colour has a nonzero in the element's column. In a symmetric
matrix, the element (i, j) may be read as (j, i) too. The aim is the fewest products.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import sparse

from xform.errors import WrongArgument
from xform.sparse import greedy, symmetric
from xform.sparse.forest import Forest, forest
from xform.sparse.pattern import Pattern
from xform.terminal.notebook import Result

JACOBIAN = ("auto", "column", "row", "bidirectional")
HESSIAN = ("auto", "star", "acyclic", "column")
ORDERS = ("best", "natural", "largest_first", "smallest_last", "saturation")
# How many thresholds are tried for the number of nonzeros of a dense row or column.
_THRESHOLDS = 12


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Coloring(Result):
    """Colours of the columns and rows of a sparse matrix of shape `[m, n]`.

    There is one product with the matrix for each colour. The other factor is the sum of the unit
    vectors of the columns of that colour (for a push), or of its rows (for a pull).

    Attributes:
      kind: "column", "row", "bidirectional", "star" or "acyclic".
      columns: the colour of each column, int, `[n]`; -1 for columns that are in no product.
      rows: the colour of each row, int, `[m]`; -1 for rows that are in no product.
      pushes: the number of colours of columns: Jacobian-vector products.
      pulls: the number of colours of rows: vector-Jacobian products.
      product_indices: the index of each nonzero in the concatenated, flattened products, int,
        `[nonzeros]`. Pushes come before pulls.
      trees: for an acyclic colouring, the sums of products that give the elements outside of the
        diagonal; None for other kinds.
    """

    kind: str
    columns: np.ndarray
    rows: np.ndarray
    pushes: int
    pulls: int
    product_indices: np.ndarray = dataclasses.field(repr=False)
    trees: Forest | None = dataclasses.field(default=None, repr=False)

    @property
    def evaluations(self) -> int:
        """The number of products."""
        return self.pushes + self.pulls

    def entries(self, pattern: Pattern) -> np.ndarray:
        """Return the number of the product that each nonzero is read from, int, `[nonzeros]`.

        Raises:
          WrongArgument: the colouring is for another pattern.
        """
        m, n = len(self.rows), len(self.columns)
        if pattern.shape != (m, n) or pattern.nonzeros != len(self.product_indices):
            raise WrongArgument(
                f"colours of a {pattern.shape[0]} x {pattern.shape[1]} pattern with "
                f"{pattern.nonzeros} nonzeros",
                f"the colouring is for another pattern, {m} x {n} with {len(self.product_indices)} "
                "nonzeros",
                "",
                "use the pattern and the coloring that the same call of prepare returned",
            )
        first_pull = self.pushes * m
        push = self.product_indices // max(m, 1)
        pull = (self.product_indices - first_pull) // max(n, 1)
        return np.where(self.product_indices < first_pull, push, self.pushes + pull)

    def __str__(self) -> str:
        pushes = f"{self.pushes} push{'es' * (self.pushes != 1)}"
        return f"{self.kind} colouring: {pushes}, {self.pulls} pull{'s' * (self.pulls != 1)}"

    def __repr__(self) -> str:
        return f"<{self}>"


def color_jacobian(pattern: Pattern, coloring: str, order: str, forward: bool = True) -> Coloring:
    """Colour the pattern of a Jacobian.

    Args:
      pattern: the elements that may be nonzero.
      coloring: one of `JACOBIAN`; "auto" takes the fewest products.
      order: the order of colouring rows or columns, one of `ORDERS`.
      forward: whether the function has forward mode. Without it there are only pulls.
    """
    if coloring == "column":
        return _by_columns(pattern, order)
    if coloring == "row" or not forward:
        return _by_rows(pattern, order)
    if coloring == "bidirectional":
        return _bidirectional(pattern, order)
    # Lower bounds: the nonzeros of one row (one column) all have different colours.
    lower_bounds = int(pattern.row_counts.max(initial=0)), int(pattern.col_counts.max(initial=0))
    mean = pattern.nonzeros / max(*pattern.shape, 1)
    found: list[Coloring] = []
    if min(lower_bounds) > 3 * mean + 2:
        found.append(_bidirectional(pattern, order))
    methods = zip(lower_bounds, (_by_columns, _by_rows), strict=True)
    for bound, color in sorted(methods, key=lambda method: method[0]):
        # A large pattern is coloured a second time only if that method's bound is smaller.
        worthwhile = pattern.nonzeros <= greedy.LARGE or bound < lower_bounds[0]
        if not found or (bound < min(c.evaluations for c in found) and worthwhile):
            found.append(color(pattern, order))
    return min(found, key=_products_then_pulls)


def _products_then_pulls(coloring: Coloring) -> tuple[int, int]:
    """Return the sort key of a colouring: fewer products are better, then fewer pulls.

    A pull costs more than a push.
    """
    return coloring.evaluations, coloring.pulls


def color_hessian(pattern: Pattern, coloring: str, order: str) -> Coloring:
    """Colour a symmetric pattern.

    Args:
      pattern: the elements that may be nonzero.
      coloring: one of `HESSIAN`; "auto" is "star".
      order: the order of colouring columns, one of `ORDERS`.
    """
    if coloring == "column":
        return _by_columns(pattern, order)
    rows, cols = pattern.rows, pattern.cols
    off_diagonal = rows != cols
    graph = _graph(rows[off_diagonal], cols[off_diagonal], pattern.shape[0])
    kind = "acyclic" if coloring == "acyclic" else "star"
    color = symmetric.acyclic if kind == "acyclic" else symmetric.star
    orders = greedy.orders_of_vertices(graph, order)
    colors = np.array(
        greedy.color_in_best_order(orders, order, lambda vertices: color(graph, vertices), 3), int
    )
    if kind == "acyclic":
        return _acyclic(pattern, colors)
    has_several = _repeated_neighbours(graph, colors)
    by_column = ~has_several(rows, colors[cols])
    by_row = ~has_several(cols, colors[rows]) & off_diagonal
    use_column = _choose_colors(colors[cols], by_column, colors[rows], by_row)
    read_color = np.where(use_column, colors[cols], colors[rows])
    index_in_product = np.where(use_column, rows, cols)
    used, number = _renumber(read_color, colors)
    product_indices = number[read_color] * len(colors) + index_in_product
    no_rows = np.full(len(colors), -1)
    return Coloring("star", np.where(used[colors], number[colors], -1), no_rows, int(used.sum()), 0,
                    product_indices)  # fmt: skip


def _by_columns(pattern: Pattern, order: str) -> Coloring:
    """Colour for pushes only: each element is read from the push of its column's colour."""
    colors = np.array(greedy.color_columns_in_best_order(pattern.scipy(), order), int)
    colors[pattern.col_counts == 0] = -1
    product_indices = colors[pattern.cols] * pattern.shape[0] + pattern.rows
    no_rows = np.full(pattern.shape[0], -1)
    return Coloring("column", colors, no_rows, _count(colors), 0, product_indices)


def _by_rows(pattern: Pattern, order: str) -> Coloring:
    """Colour for pulls only: each element is read from the pull of its row's colour."""
    transposed = sparse.csr_array(pattern.scipy().T)
    colors = np.array(greedy.color_columns_in_best_order(transposed, order), int)
    colors[pattern.row_counts == 0] = -1
    product_indices = colors[pattern.rows] * pattern.shape[1] + pattern.cols
    no_columns = np.full(pattern.shape[1], -1)
    return Coloring("row", no_columns, colors, 0, _count(colors), product_indices)


def _bidirectional(pattern: Pattern, order: str) -> Coloring:
    """Colour for pushes and pulls together.

    Either dense rows are read from pulls and the rest from pushes, or dense columns are read from
    pushes and the rest from pulls. A row is dense if it has more nonzeros than a threshold. Columns
    may then share a colour although they share a dense row, because that row is not read from
    pushes. Several thresholds are tried, for rows and for columns, and the best result is returned.
    Below, a line is a row, or a column if the matrix is `transposed`.

    Source: Coleman and Verma, "The Efficient Computation of Sparse Jacobian Matrices Using
    Automatic Differentiation", SIAM Journal on Scientific Computing 19 (1998), section 3.
    """
    matrix = pattern.scipy()
    # Each alternative: a lower bound on its products, `transposed`, and a mask of its dense lines.
    alternatives: list[tuple[int, bool, np.ndarray]] = []
    for transposed in (False, True):
        lines = sparse.csr_array(matrix.T) if transposed else matrix
        counts = np.diff(lines.indptr)
        possible = np.unique(np.append(counts, 0))
        selected = np.unique(np.linspace(0, len(possible) - 1, _THRESHOLDS).astype(int))
        for threshold in possible[selected]:
            dense = counts > threshold
            # The nonzeros of one sparse line have different colours. So do all dense lines that
            # have a nonzero in the same position.
            overlap = np.bincount(lines[dense].indices, minlength=1).max()
            alternatives.append((int(threshold + overlap), transposed, dense))
    found: list[Coloring] = []
    for lower_bound, transposed, dense in sorted(alternatives, key=lambda one: one[0]):
        if not found or lower_bound < min(c.evaluations for c in found):
            lines = sparse.csr_array(matrix.T) if transposed else matrix
            found.append(_with_dense_lines(pattern, lines, dense, transposed, order))
    return min(found, key=_products_then_pulls)


def _with_dense_lines(
    pattern: Pattern, lines: Any, dense: np.ndarray, transposed: bool, order: str
) -> Coloring:
    """Colour the dense lines (rows or columns), and the rest of the matrix across the lines.

    `lines` is the matrix, with a row for each line.
    """
    m, n = pattern.shape
    rest = sparse.csr_array(sparse.diags_array(~dense, dtype=np.int8) @ lines)
    rest.eliminate_zeros()
    across_colors = np.array(greedy.color_columns_in_best_order(rest, order), int)
    across_colors[np.diff(sparse.csr_array(rest.T).indptr) == 0] = -1
    line_colors = np.full(len(dense), -1)
    line_colors[dense] = greedy.color_columns_in_best_order(sparse.csr_array(lines[dense].T), order)
    columns, rows = (line_colors, across_colors) if transposed else (across_colors, line_colors)
    in_dense_line = dense[pattern.cols if transposed else pattern.rows]
    by_push = in_dense_line if transposed else ~in_dense_line
    pushes = _count(columns)
    product_indices = np.where(by_push, columns[pattern.cols] * m + pattern.rows,
                               pushes * m + rows[pattern.rows] * n + pattern.cols)  # fmt: skip
    return Coloring("bidirectional", columns, rows, pushes, _count(rows), product_indices)


def _acyclic(pattern: Pattern, colors: np.ndarray) -> Coloring:
    """Return the `Coloring` for acyclic colours of the columns.

    A colour is dropped if no nonzero is in a row or column of that colour.
    """
    used, number = _renumber(np.concatenate([colors[pattern.cols], colors[pattern.rows]]), colors)
    colors = np.where(used[colors], number[colors], -1)
    trees = forest(pattern, colors)
    product_indices = colors[pattern.cols] * len(colors) + pattern.rows
    no_rows = np.full(len(colors), -1)
    return Coloring("acyclic", colors, no_rows, _count(colors), 0, product_indices, trees)


def _graph(rows: np.ndarray, cols: np.ndarray, n: int) -> Any:
    """Return the adjacency matrix of a graph: `n` vertices, and an edge `(row, column)` each."""
    return sparse.csr_array((np.ones(len(rows), np.int32), (rows, cols)), shape=(n, n))


def _count(colors: np.ndarray) -> int:
    """Return the number of colours, which are numbered from 0 on."""
    return int(colors.max(initial=-1)) + 1


def _repeated_neighbours(
    graph: Any, colors: np.ndarray
) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Return a function of arrays of vertices and of colours, which returns a mask.

    It is True where the vertex has several neighbours of the colour.
    """
    n, k = len(colors), max(_count(colors), 1)
    color_of = sparse.csr_array((np.ones(n, np.int32), colors, np.arange(n + 1)), shape=(n, k))
    counts = sparse.csr_array(graph @ color_of)
    counts.sort_indices()
    keys = np.repeat(np.arange(n), np.diff(counts.indptr)) * k + counts.indices
    several = keys[counts.data > 1]
    return lambda vertex, color: np.isin(vertex * k + color, several)


def _choose_colors(
    a: np.ndarray, can_a: np.ndarray, b: np.ndarray, can_b: np.ndarray
) -> np.ndarray:
    """Choose for each nonzero the colour that it is read from, so that few colours are used.

    Each nonzero may be read from its colour `a` if `can_a`, from its colour `b` if `can_b`. Returns
    a mask of the nonzeros that are read from `a`.
    """
    assert (can_a | can_b).all()
    k = int(max(a.max(initial=-1), b.max(initial=-1))) + 1
    used = np.zeros(k + 1, bool)
    used[a[can_a & ~can_b]] = used[b[can_b & ~can_a]] = True
    undecided = can_a & can_b & ~used[a] & ~used[b]
    while undecided.any():
        counts = np.bincount(a[undecided], minlength=k) + np.bincount(b[undecided], minlength=k)
        used[counts.argmax()] = True
        undecided &= ~used[a] & ~used[b]
    return can_a & (used[a] | ~can_b)


def _renumber(read_colors: np.ndarray, colors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a mask of the colours that are read, and new consecutive numbers for these colours."""
    used = np.zeros(int(max(read_colors.max(initial=-1), colors.max(initial=-1))) + 1, bool)
    used[read_colors] = True
    return used, np.cumsum(used) - 1
