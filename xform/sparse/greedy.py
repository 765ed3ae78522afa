"""Greedy graph colouring: each vertex in turn gets the first colour that is allowed.

The number of colours depends on the order of the vertices, so several orders are tried. Colours are
numbers from 0 on. A set of colours is an integer whose bits are its members, so a vertex costs one
operation for each neighbour, however many colours there are. Graphs are sparse adjacency matrices.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from scipy import sparse

# The colour of each vertex.
Colors = list[int]
# A function that returns an order of the vertices.
OrderOfVertices = Callable[[], Sequence[int]]
# The sizes of a problem above which an expensive order is not tried: pairs of columns that share a
# row, or edges of a graph. The order by saturation leads to the fewest colours, so its limit is
# larger.
LARGE = 2**18
_LARGE_FOR_SATURATION = 2**22


def neighbours(graph: Any) -> list[list[int]]:
    """Return the columns of the nonzeros in each row of a sparse matrix."""
    indices, begins = graph.indices.tolist(), graph.indptr.tolist()
    return [indices[a:b] for a, b in itertools.pairwise(begins)]


def members(colors: int) -> Iterator[int]:
    """Yield the members of a set of colours: the positions of the bits that are set."""
    while colors:
        lowest = colors & -colors
        yield lowest.bit_length() - 1
        colors ^= lowest


def first_allowed(forbidden: int) -> int:
    """Return the set with the first colour that is not in `forbidden`: an integer with one bit."""
    return ~forbidden & (forbidden + 1)


def color_columns(matrix: Any, order: Sequence[int]) -> Colors:
    """Colour the columns so that no two columns of one colour have a nonzero in the same row.

    In the graph of rows and columns, this is a partial distance-2 colouring.
    Source: Gebremedhin, Manne and Pothen, "What color is your Jacobian?", SIAM Review 47 (2005),
    section 3.
    """
    rows_of = neighbours(sparse.csr_array(matrix.T))
    colors_in_row = [0] * matrix.shape[0]
    colors = [0] * matrix.shape[1]
    for v in order:
        forbidden = 0
        for row in rows_of[v]:
            forbidden |= colors_in_row[row]
        color = first_allowed(forbidden)
        colors[v] = color.bit_length() - 1
        for row in rows_of[v]:
            colors_in_row[row] |= color
    return colors


def color_columns_in_best_order(matrix: Any, order: str) -> Colors:
    """Colour the columns as `color_columns` does, in the order named `order`.

    The orders are "natural", "largest_first", "smallest_last" and "saturation". "best" tries all
    that are not too expensive for the size of the matrix, and takes the fewest colours.
    """
    row_counts = np.diff(matrix.indptr)
    lower_bound = int(row_counts.max(initial=0))  # columns of one row have different colours
    pairs = int((row_counts.astype(np.int64) ** 2).sum())

    def columns_sharing_a_row() -> Any:
        counts = matrix.astype(np.int32)
        return sparse.csr_array(counts.T @ counts)

    def degrees() -> np.ndarray:
        return matrix.T.astype(np.int64) @ row_counts

    orders: dict[str, OrderOfVertices] = {
        "natural": lambda: range(matrix.shape[1]),
        "largest_first": lambda: np.argsort(-degrees(), kind="stable").tolist(),
    }
    if pairs <= LARGE or order == "smallest_last":
        orders["smallest_last"] = lambda: smallest_last(columns_sharing_a_row())
    if pairs <= _LARGE_FOR_SATURATION or order == "saturation":
        orders["saturation"] = lambda: saturation(columns_sharing_a_row())
    return color_in_best_order(
        orders, order, lambda vertices: color_columns(matrix, vertices), lower_bound
    )


def color_in_best_order(orders: dict[str, OrderOfVertices], order: str,
                        color: Callable[[Sequence[int]], Colors], lower_bound: int
                        ) -> Colors:  # fmt: skip
    """Apply `color` to the order named `order`; if it is "best", to each of `orders`.

    Returns the colouring with the fewest colours. The search stops at `lower_bound` colours.
    """
    best: Colors | None = None
    for name, vertices in orders.items():
        if order in ("best", name):
            colors = color(vertices())
            if best is None or max(colors, default=0) < max(best, default=0):
                best = colors
            if max(best, default=-1) < lower_bound:
                break
    assert best is not None, order
    return best


def orders_of_vertices(graph: Any, order: str = "best") -> dict[str, OrderOfVertices]:
    """Return a function for each order of the vertices of a graph, by the name of the order.

    The function computes the order. If `order` is "best", the orders that are too expensive for the
    size of the graph are left out.
    """
    orders: dict[str, OrderOfVertices] = {
        "natural": lambda: range(graph.shape[0]),
        "largest_first": lambda: np.argsort(-np.diff(graph.indptr), kind="stable").tolist(),
        "smallest_last": lambda: smallest_last(graph),
        "saturation": lambda: saturation(graph),
    }
    for name, limit in (("smallest_last", LARGE), ("saturation", _LARGE_FOR_SATURATION)):
        if graph.nnz > limit and order == "best":
            del orders[name]
    return orders


def smallest_last(graph: Any) -> list[int]:
    """Return the smallest-last order: repeatedly remove a vertex of minimum degree, then reverse.

    Source: Matula and Beck, "Smallest-last ordering and clustering and graph coloring algorithms",
    Journal of the ACM 30 (1983).
    """
    adjacent = neighbours(graph)
    degree = [len(vertices) for vertices in adjacent]
    by_degree: list[list[int]] = [[] for _ in range(max(degree, default=0) + 1)]
    for v in range(len(adjacent) - 1, -1, -1):
        by_degree[degree[v]].append(v)
    removed = [False] * len(adjacent)
    removals: list[int] = []
    lowest = 0
    while len(removals) < len(adjacent):
        while not by_degree[lowest]:
            lowest += 1
        v = by_degree[lowest].pop()
        if removed[v] or degree[v] != lowest:  # an outdated entry of the vertex
            continue
        removed[v] = True
        removals.append(v)
        for w in adjacent[v]:
            if not removed[w]:
                degree[w] -= 1
                by_degree[degree[w]].append(w)
        lowest = max(lowest - 1, 0)
    return removals[::-1]


def saturation(graph: Any) -> list[int]:
    """Return the order by saturation: next is the vertex whose neighbours have the most colours.

    For a grid, this order leads to the minimum number of colours; no order by degrees does.
    Source: Brélaz, "New methods to color the vertices of a graph", Communications of the ACM 22
    (1979).
    """
    adjacent = neighbours(graph)
    forbidden, done = [0] * len(adjacent), [False] * len(adjacent)
    # Entries: minus the number of colours among the neighbours, minus the degree, the vertex.
    queue = [(0, -len(vertices), v) for v, vertices in enumerate(adjacent)]
    heapq.heapify(queue)
    order: list[int] = []
    while queue:
        *_, v = heapq.heappop(queue)
        if done[v]:  # an outdated entry of the same vertex, with fewer colours
            continue
        done[v] = True
        order.append(v)
        color = first_allowed(forbidden[v])
        for w in adjacent[v]:
            if not (done[w] or forbidden[w] & color):
                forbidden[w] |= color
                heapq.heappush(queue, (-forbidden[w].bit_count(), -len(adjacent[w]), w))
    return order
