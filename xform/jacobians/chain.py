"""The cheapest order to evaluate a chain of Jacobians, by dynamic programming.

A chain `J = J_p ... J_1` is evaluated by forward mode, reverse mode and matrix products. First,
neighbouring links are accumulated to a matrix. This matrix is then pushed through the links after
it (column by column), pulled through the links before it (row by row), or multiplied with another
matrix.

Source: Griewank and Naumann, "Accumulating Jacobians as chained sparse matrix products",
Mathematical Programming 95 (2003); Naumann, "Matrix-free Jacobian chaining", arXiv:2406.11862,
section 3, which has the recurrence. One case is added: if a link begins (in reverse mode: ends)
with a product by a known matrix, this product is free, because the products with unit vectors are
rows or columns of the matrix.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class ChainLink:
    """One factor of a chain: the Jacobian of the program part between two cuts.

    Attributes:
      columns: number of elements of the value before the part.
      rows: number of elements of the value after the part.
      push: FLOPs to push one tangent through it; infinite if it has no forward mode.
      pull: FLOPs to pull one cotangent through it; infinite if it has no reverse mode.
      first: the part of `push` that is free for unit vectors: products applied to the tangent
        first.
      last: the part of `pull` that is free for unit vectors: products applied to the cotangent
        first.
    """

    columns: int
    rows: int
    push: float
    pull: float
    first: float = 0.0
    last: float = 0.0

    @property
    def forward(self) -> float:
        """FLOPs to accumulate it column by column."""
        return self.columns * (self.push - self.first) if self.push < math.inf else math.inf

    @property
    def reverse(self) -> float:
        """FLOPs to accumulate it row by row."""
        return self.rows * (self.pull - self.last) if self.pull < math.inf else math.inf


def dense(columns: int, rows: int) -> ChainLink:
    """The link of a multiplication by a known matrix.

    >>> from xform.jacobians.chain import best, dense, reverse
    >>> sizes = 10, 512, 8, 512, 10
    >>> chain = [dense(a, b) for a, b in zip(sizes, sizes[1:])]
    >>> best(chain).flops / 2, reverse(chain).flops / 2
    (82720.0, 133120.0)
    """
    each = 2.0 * columns * rows
    return ChainLink(columns, rows, each, each, each, each)


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A sweep through the links from `first` to `last` in one mode.

    Attributes:
      mode: "forward" or "reverse".
      first, last: positions of links.
      of: how to compute the matrix that is pushed (pulled) through the links; None: the identity.
      flops: FLOPs of this sweep and of `of`.
    """

    mode: str
    first: int
    last: int
    of: Order | None
    flops: float

    @property
    def low(self) -> int:
        """The first link of the result, which includes `of`."""
        return self.of.low if self.of is not None and self.mode == "forward" else self.first

    @property
    def high(self) -> int:
        """The last link of the result, which includes `of`."""
        return self.of.high if self.of is not None and self.mode == "reverse" else self.last

    def __str__(self) -> str:
        links = [f"J{i + 1}" for i in range(self.last, self.first - 1, -1)]
        inside = [] if self.of is None else [str(self.of)]
        arrow, parts = ("<", links + inside) if self.mode == "forward" else (">", inside + links)
        return parts[0] if len(parts) == 1 else f"({f' {arrow} '.join(parts)})"


@dataclasses.dataclass(frozen=True)
class Product:
    """The matrix product of two accumulated parts; `right` comes first in the program."""

    left: Order
    right: Order
    flops: float

    @property
    def low(self) -> int:
        """The first link of the result."""
        return self.right.low

    @property
    def high(self) -> int:
        """The last link of the result."""
        return self.left.high

    def __str__(self) -> str:
        return f"({self.left} x {self.right})"


Order = Sweep | Product


def forward(links: Sequence[ChainLink]) -> Sweep:
    """The order that uses forward mode for all links."""
    through = links[0].columns * sum(k.push for k in links[1:])
    return Sweep("forward", 0, len(links) - 1, None, links[0].forward + through)


def reverse(links: Sequence[ChainLink]) -> Sweep:
    """The order that uses reverse mode for all links."""
    through = links[-1].rows * sum(k.pull for k in links[:-1])
    return Sweep("reverse", 0, len(links) - 1, None, links[-1].reverse + through)


def best(links: Sequence[ChainLink]) -> Order:
    """The order with the fewest FLOPs. At equal FLOPs, reverse mode comes first, then forward mode.

    Cost: cubic in the number of links; the innermost loop is in NumPy.
    """
    table = _Table(links)
    pure = (order for order in (reverse(links), forward(links)) if order.flops <= table.flops)
    return next(pure, None) or table.order(0, len(links) - 1)


class _Table:
    """The fewest FLOPs for each range of links, and how; at equal FLOPs, the fewest steps."""

    def __init__(self, links: Sequence[ChainLink]):
        self.links = links
        n = len(links)
        # pushes[i, j]: FLOPs of one tangent through links i to j; pulls likewise.
        self.pushes, self.pulls = (_sums([getattr(k, way) for k in links])
                                   for way in ("push", "pull"))  # fmt: skip
        self.cost, self.steps = np.full((n, n), math.inf), np.ones((n, n))
        self.how: dict[tuple[int, int], tuple[str, int]] = {}
        for length in range(n):
            for i in range(n - length):
                self._decide(i, i + length)
        self.flops = float(self.cost[0, n - 1])

    def _decide(self, i: int, j: int) -> None:
        links = self.links
        if i == j:
            ways = {("reverse", i): links[i].reverse, ("forward", i): links[i].forward}
            self.how[i, j] = min(ways, key=ways.__getitem__)
            self.cost[i, j] = ways[self.how[i, j]]
            return
        k = np.arange(i, j)  # the last link of the right part
        left, right = self.cost[k + 1, j], self.cost[i, k]
        columns, rows = links[i].columns, links[j].rows
        middle = np.array([link.rows for link in links[i:j]])
        ways: Any = np.stack([
            left + rows * self.pulls[i, k],
            right + columns * self.pushes[k + 1, j],
            left + right + 2.0 * rows * middle * columns,
        ])  # fmt: skip
        left, right = self.steps[k + 1, j], self.steps[i, k]
        steps: Any = np.stack([left, right, left + right]) + 1
        way, at = divmod(int(np.lexsort((steps.ravel(), ways.ravel()))[0]), j - i)
        self.cost[i, j], self.steps[i, j] = ways[way, at], steps[way, at]
        self.how[i, j] = ("reverse", "forward", "product")[way], i + at

    def order(self, i: int, j: int) -> Order:
        """The order of a range of links; successive sweeps in the same mode are merged."""
        flops = float(self.cost[i, j])
        way, k = self.how[i, j]
        if i == j:
            return Sweep(way, i, j, None, flops)
        if way == "product":
            return Product(self.order(k + 1, j), self.order(i, k), flops)
        of = self.order(k + 1, j) if way == "reverse" else self.order(i, k)
        first, last = (i, k) if way == "reverse" else (k + 1, j)
        if isinstance(of, Sweep) and (of.mode == way or self._equal_cost(of)):
            return Sweep(way, min(first, of.first), max(last, of.last), of.of, flops)
        return Sweep(way, first, last, of, flops)

    def _equal_cost(self, of: Order) -> bool:
        """Whether it is a single link and both modes take equal FLOPs."""
        if isinstance(of, Product) or of.of is not None or of.first != of.last:
            return False
        return self.links[of.first].forward == self.links[of.first].reverse


def _sums(each: Sequence[float]) -> Any:
    """`sums[i, j]`: the sum of the numbers from position i to position j, inclusive."""
    n = len(each)
    sums = np.zeros((n, n))
    for i in range(n):
        sums[i, i:] = np.cumsum(each[i:])
    return sums
