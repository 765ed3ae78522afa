"""Greedy graph colouring: each vertex in turn gets the first colour that is allowed.

Sets of colours are bits of an integer, so a vertex costs one operation for each neighbour, however
many colours there are. Graphs are sparse adjacency matrices.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from scipy import sparse

Colors = list[int]
# Maximum size for trying all orders: pairs of columns that share a row, or nonzeros. The order by
# saturation, which finds the fewest colours, has a larger limit.
_PAIRS = LARGE = 2**18
_SATURATION = 2**22


def neighbours(graph: Any) -> list[list[int]]:
    """For each row of a sparse matrix, the columns of its nonzeros."""
    indices, begins = graph.indices.tolist(), graph.indptr.tolist()
    return [indices[a:b] for a, b in itertools.pairwise(begins)]


def bits(mask: int) -> Iterator[int]:
    """The positions of the bits that are set in an integer."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def first_free(forbidden: int) -> int:
    """The lowest bit that is not set, as an integer with only that bit."""
    return ~forbidden & (forbidden + 1)


def columns(matrix: Any, order: Sequence[int]) -> Colors:
    """Colours such that no two columns of one colour share a row: a partial distance-2 colouring.

    Source: Gebremedhin, Manne and Pothen, "What color is your Jacobian?", SIAM Review 47 (2005),
    section 3.
    """
    rows_of = neighbours(sparse.csr_array(matrix.T))
    used = [0] * matrix.shape[0]
    colors = [0] * matrix.shape[1]
    for v in order:
        forbidden = 0
        for row in rows_of[v]:
            forbidden |= used[row]
        color = first_free(forbidden)
        colors[v] = color.bit_length() - 1
        for row in rows_of[v]:
            used[row] |= color
    return colors


def best_columns(matrix: Any, order: str) -> Colors:
    """The best of `columns` over some orders; stops when the colours reach the lower bound."""
    least = int(np.diff(matrix.indptr).max(initial=0))  # all columns of one row differ
    most = int((np.diff(matrix.indptr).astype(np.int64) ** 2).sum())

    def graph() -> Any:
        counts = matrix.astype(np.int32)
        return sparse.csr_array(counts.T @ counts)

    def degrees() -> np.ndarray:
        return matrix.T.astype(np.int64) @ np.diff(matrix.indptr)

    ways: dict[str, Callable[[], Sequence[int]]] = {
        "natural": lambda: range(matrix.shape[1]),
        "largest_first": lambda: np.argsort(-degrees(), kind="stable").tolist(),
    }
    if most <= _PAIRS or order == "smallest_last":
        ways["smallest_last"] = lambda: smallest_last(graph())
    if most <= _SATURATION or order == "saturation":
        ways["saturation"] = lambda: saturation(graph())
    return best(ways, order, lambda vertices: columns(matrix, vertices), least)


def best(ways: dict[str, Callable[[], Sequence[int]]], order: str,
         color: Callable[[Sequence[int]], Colors], least: int) -> Colors:  # fmt: skip
    """The colouring with the fewest colours, over the orders in `ways` (or the named `order`).

    `least` is a lower bound on the number of colours: the search stops when it is reached.
    """
    found: Colors | None = None
    for name, vertices in ways.items():
        if order in ("best", name):
            colors = color(vertices())
            if found is None or max(colors, default=0) < max(found, default=0):
                found = colors
            if max(found, default=-1) < least:
                break
    assert found is not None, order
    return found


def orders(graph: Any, order: str = "best") -> dict[str, Callable[[], Sequence[int]]]:
    """A dict of functions that return an order of the vertices for colouring, by name."""
    ways: dict[str, Callable[[], Sequence[int]]] = {
        "natural": lambda: range(graph.shape[0]),
        "largest_first": lambda: np.argsort(-np.diff(graph.indptr), kind="stable").tolist(),
        "smallest_last": lambda: smallest_last(graph),
        "saturation": lambda: saturation(graph),
    }
    for name, most in (("smallest_last", LARGE), ("saturation", _SATURATION)):
        if graph.nnz > most and order == "best":
            del ways[name]
    return ways


def smallest_last(graph: Any) -> list[int]:
    """The smallest-last order: repeatedly remove a vertex of minimum degree, then reverse.

    Source: Matula and Beck, "Smallest-last ordering and clustering and graph coloring algorithms",
    Journal of the ACM 30 (1983).
    """
    near = neighbours(graph)
    degree = [len(vs) for vs in near]
    buckets: list[list[int]] = [[] for _ in range(max(degree, default=0) + 1)]
    for v in range(len(near) - 1, -1, -1):
        buckets[degree[v]].append(v)
    gone = [False] * len(near)
    last: list[int] = []
    low = 0
    while len(last) < len(near):
        while not buckets[low]:
            low += 1
        v = buckets[low].pop()
        if gone[v] or degree[v] != low:
            continue
        gone[v] = True
        last.append(v)
        for w in near[v]:
            if not gone[w]:
                degree[w] -= 1
                buckets[degree[w]].append(w)
        low = max(low - 1, 0)
    return last[::-1]


def saturation(graph: Any) -> list[int]:
    """The order by saturation: next comes the vertex with the most colours among its neighbours.

    For a grid this finds the minimum number of colours, which no order by degrees does.
    Source: Brélaz, "New methods to color the vertices of a graph", Communications of the ACM 22
    (1979).
    """
    near = neighbours(graph)
    forbidden, done = [0] * len(near), [False] * len(near)
    waiting = [(0, -len(vs), v) for v, vs in enumerate(near)]
    heapq.heapify(waiting)
    order: list[int] = []
    while waiting:
        *_, v = heapq.heappop(waiting)
        if done[v]:  # an older entry of the same vertex, with fewer colours
            continue
        done[v] = True
        order.append(v)
        color = first_free(forbidden[v])
        for w in near[v]:
            if not (done[w] or forbidden[w] & color):
                forbidden[w] |= color
                heapq.heappush(waiting, (-forbidden[w].bit_count(), -len(near[w]), w))
    return order
