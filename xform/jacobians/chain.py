"""The cheapest order of a chain of Jacobians, by dynamic programming.

A chain `J = J_p ... J_1` is evaluated by forward mode, reverse mode and products of matrices. Of
neighbouring links, some are accumulated to a matrix; that is pushed through the links after it, a
column at a time, or pulled through those before it, a row at a time, or multiplied with another.

Source: Griewank and Naumann, "Accumulating Jacobians as chained sparse matrix products",
Mathematical Programming 95 (2003); Naumann, "Matrix-free Jacobian chaining", arXiv:2406.11862,
section 3, whose recurrence this is. Besides, a link that begins (ends) with a product by a known
matrix is accumulated for less: that matrix is its Jacobian, and nothing is multiplied.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Link:
    """One factor of a chain: the Jacobian of what is between two values that all paths cross.

    Attributes:
      columns: elements of the value before it.
      rows: elements of the value after it.
      push: FLOPs to push one tangent through it; infinite if it has no forward mode.
      pull: FLOPs to pull one cotangent through it; infinite if it has no reverse mode.
      first: of `push`, those of products that a tangent meets first: none of a unit vector.
      last: of `pull`, those of products that a cotangent meets first.
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


def dense(columns: int, rows: int) -> Link:
    """The link that multiplies by a matrix.

    >>> from xform.jacobians.chain import best, dense, reverse
    >>> sizes = 10, 512, 8, 512, 10
    >>> chain = [dense(a, b) for a, b in zip(sizes, sizes[1:])]
    >>> best(chain).flops / 2, reverse(chain).flops / 2
    (82720.0, 133120.0)
    """
    each = 2.0 * columns * rows
    return Link(columns, rows, each, each, each, each)


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Links from `first` to `last`, accumulated in one mode.

    Attributes:
      mode: "forward" or "reverse".
      first, last: positions of links.
      of: what is pushed (pulled) through them; None: the unit vectors.
      flops: of this sweep, and of what it is of.
    """

    mode: str
    first: int
    last: int
    of: Order | None
    flops: float

    @property
    def low(self) -> int:
        """The first link of all that is accumulated."""
        return self.of.low if self.of is not None and self.mode == "forward" else self.first

    @property
    def high(self) -> int:
        """The last link of all that is accumulated."""
        return self.of.high if self.of is not None and self.mode == "reverse" else self.last

    def __str__(self) -> str:
        links = [f"J{i + 1}" for i in range(self.last, self.first - 1, -1)]
        inside = [] if self.of is None else [str(self.of)]
        arrow, parts = ("<", links + inside) if self.mode == "forward" else (">", inside + links)
        return parts[0] if len(parts) == 1 else f"({f' {arrow} '.join(parts)})"


@dataclasses.dataclass(frozen=True)
class Product:
    """The matrix product of two accumulated parts, of which `right` comes first in the program."""

    left: Order
    right: Order
    flops: float

    @property
    def low(self) -> int:
        """The first link of all that is accumulated."""
        return self.right.low

    @property
    def high(self) -> int:
        """The last link of all that is accumulated."""
        return self.left.high

    def __str__(self) -> str:
        return f"({self.left} x {self.right})"


Order = Sweep | Product


def forward(links: Sequence[Link]) -> Sweep:
    """All links by forward mode."""
    through = links[0].columns * sum(k.push for k in links[1:])
    return Sweep("forward", 0, len(links) - 1, None, links[0].forward + through)


def reverse(links: Sequence[Link]) -> Sweep:
    """All links by reverse mode."""
    through = links[-1].rows * sum(k.pull for k in links[:-1])
    return Sweep("reverse", 0, len(links) - 1, None, links[-1].reverse + through)


def best(links: Sequence[Link]) -> Order:
    """The order of fewest FLOPs; of those, reverse mode if it is one, or else forward mode.

    Cost: cubic in the number of links, of which the innermost loop is NumPy's.
    """
    table = _Table(links)
    pure = (way for way in (reverse(links), forward(links)) if way.flops <= table.flops)
    return next(pure, None) or table.order(0, len(links) - 1)


class _Table:
    """Fewest FLOPs for each range of links, and how; of equal ones that of fewest steps."""

    def __init__(self, links: Sequence[Link]):
        self.links = links
        n = len(links)
        # pushes[i, j]: of one tangent through links i to j; pulls likewise.
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
        """The order of a range; sweeps in one mode that follow each other are one."""
        flops = float(self.cost[i, j])
        way, k = self.how[i, j]
        if i == j:
            return Sweep(way, i, j, None, flops)
        if way == "product":
            return Product(self.order(k + 1, j), self.order(i, k), flops)
        of = self.order(k + 1, j) if way == "reverse" else self.order(i, k)
        first, last = (i, k) if way == "reverse" else (k + 1, j)
        if isinstance(of, Sweep) and (of.mode == way or self._either(of)):
            return Sweep(way, min(first, of.first), max(last, of.last), of.of, flops)
        return Sweep(way, first, last, of, flops)

    def _either(self, of: Order) -> bool:
        """Whether it is one link that both modes accumulate in as many FLOPs."""
        if isinstance(of, Product) or of.of is not None or of.first != of.last:
            return False
        return self.links[of.first].forward == self.links[of.first].reverse


def _sums(each: Sequence[float]) -> Any:
    """Sums of numbers from position i to position j, by i and j."""
    n = len(each)
    sums = np.zeros((n, n))
    for i in range(n):
        sums[i, i:] = np.cumsum(each[i:])
    return sums
