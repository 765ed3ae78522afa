"""The cheapest order to evaluate a chain of Jacobians, by dynamic programming.

A chain is a product `J = J_p ... J_1`. Its factors, here called links, are the Jacobians of the
successive parts of a program. It is evaluated by forward mode, reverse mode and matrix products. To
accumulate links is to compute their product as a matrix. Such a matrix is then pushed through the
links after it (column by column), pulled through the links before it (row by row), or multiplied
with another matrix. An order is a tree of these steps.

Source: Griewank and Naumann, "Accumulating Jacobians as chained sparse matrix products",
Mathematical Programming 95 (2003); Naumann, "Matrix-free Jacobian chaining", arXiv:2406.11862,
section 3, which has the recurrence. One case is added: if the first operation of a link multiplies
by a known matrix, forward mode does not compute its products with unit vectors, because these
products are the columns of the matrix. The same holds for reverse mode and the last operation.
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
      free_push: the part of `push` that is free for a unit vector: a product of the vector itself
        with a known matrix, which is a column of that matrix.
      free_pull: the part of `pull` that is free for a unit vector, in the same way.
    """

    columns: int
    rows: int
    push: float
    pull: float
    free_push: float = 0.0
    free_pull: float = 0.0

    @property
    def forward(self) -> float:
        """FLOPs to compute its matrix column by column, by forward mode."""
        return self.columns * (self.push - self.free_push) if self.push < math.inf else math.inf

    @property
    def reverse(self) -> float:
        """FLOPs to compute its matrix row by row, by reverse mode."""
        return self.rows * (self.pull - self.free_pull) if self.pull < math.inf else math.inf


def link_of_matrix(columns: int, rows: int) -> ChainLink:
    """Return the link of a multiplication by a known matrix.

    >>> from xform.jacobians.chain import cheapest_order, link_of_matrix, reverse_order
    >>> sizes = 10, 512, 8, 512, 10
    >>> chain = [link_of_matrix(a, b) for a, b in zip(sizes, sizes[1:])]
    >>> cheapest_order(chain).flops / 2, reverse_order(chain).flops / 2
    (82720.0, 133120.0)
    """
    flops = 2.0 * columns * rows
    return ChainLink(columns, rows, flops, flops, flops, flops)


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A sweep through the links from `first` to `last` in one mode.

    Attributes:
      mode: "forward" or "reverse".
      first, last: positions of links.
      operand: how to compute the matrix that is pushed or pulled through the links; None: it is the
        identity.
      flops: FLOPs of this sweep and of `operand`.
    """

    mode: str
    first: int
    last: int
    operand: Order | None
    flops: float

    @property
    def low(self) -> int:
        """The first link of the result, which includes the operand."""
        forward = self.mode == "forward"
        return self.operand.low if self.operand is not None and forward else self.first

    @property
    def high(self) -> int:
        """The last link of the result, which includes the operand."""
        reverse = self.mode == "reverse"
        return self.operand.high if self.operand is not None and reverse else self.last

    def __str__(self) -> str:
        links = [f"J{i + 1}" for i in range(self.last, self.first - 1, -1)]
        operand = [] if self.operand is None else [str(self.operand)]
        arrow, parts = ("<", links + operand) if self.mode == "forward" else (">", operand + links)
        return parts[0] if len(parts) == 1 else f"({f' {arrow} '.join(parts)})"


@dataclasses.dataclass(frozen=True)
class Product:
    """The matrix product of two accumulated parts of the chain.

    Attributes:
      left: the order of the later links.
      right: the order of the earlier links.
      flops: FLOPs of the product and of both parts.
    """

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


def forward_order(links: Sequence[ChainLink]) -> Sweep:
    """Return the order that uses forward mode for all links."""
    after_first = links[0].columns * sum(link.push for link in links[1:])
    return Sweep("forward", 0, len(links) - 1, None, links[0].forward + after_first)


def reverse_order(links: Sequence[ChainLink]) -> Sweep:
    """Return the order that uses reverse mode for all links."""
    before_last = links[-1].rows * sum(link.pull for link in links[:-1])
    return Sweep("reverse", 0, len(links) - 1, None, links[-1].reverse + before_last)


def cheapest_order(links: Sequence[ChainLink]) -> Order:
    """Return the order with the fewest FLOPs.

    On a tie, reverse mode for all links comes first, then forward mode for all links.

    Cost: cubic in the number of links; the innermost loop is in NumPy.
    """
    table = _Table(links)
    for order in (reverse_order(links), forward_order(links)):
        if order.flops <= table.flops:
            return order
    return table.order(0, len(links) - 1)


class _Table:
    """The cheapest way to accumulate each range of links, by dynamic programming.

    `cost[i, j]` is the fewest FLOPs for the links i to j, and `steps[i, j]` the number of steps. If
    several ways take equal FLOPs, the way with the fewest steps is used. `decision[i, j]` is that
    way, as a pair of a text and a position. For one link the text is a mode. For several links, the
    position k splits them in two:

    - "reverse": the links after k are accumulated, and pulled through the links i to k;
    - "forward": the links i to k are accumulated, and pushed through the links after k;
    - "product": both parts are accumulated and multiplied.
    """

    def __init__(self, links: Sequence[ChainLink]):
        self.links = links
        n = len(links)
        # [i, j]: FLOPs to push one tangent, or to pull one cotangent, through links i to j.
        self.pushes = _sums([link.push for link in links])
        self.pulls = _sums([link.pull for link in links])
        self.cost, self.steps = np.full((n, n), math.inf), np.ones((n, n))
        self.decision: dict[tuple[int, int], tuple[str, int]] = {}
        for length in range(n):
            for i in range(n - length):
                self._decide(i, i + length)
        self.flops = float(self.cost[0, n - 1])

    def _decide(self, i: int, j: int) -> None:
        """Find the cheapest way for links i to j. It must be known for all shorter ranges."""
        links = self.links
        if i == j:
            modes = {("reverse", i): links[i].reverse, ("forward", i): links[i].forward}
            self.decision[i, j] = min(modes, key=modes.__getitem__)
            self.cost[i, j] = modes[self.decision[i, j]]
            return
        k = np.arange(i, j)  # the last link of the right part
        left, right = self.cost[k + 1, j], self.cost[i, k]
        columns, rows = links[i].columns, links[j].rows
        middle = np.array([link.rows for link in links[i:j]])
        costs: Any = np.stack([
            left + rows * self.pulls[i, k],
            right + columns * self.pushes[k + 1, j],
            left + right + 2.0 * rows * middle * columns,
        ])  # fmt: skip
        left, right = self.steps[k + 1, j], self.steps[i, k]
        steps: Any = np.stack([left, right, left + right]) + 1
        way, offset = divmod(int(np.lexsort((steps.ravel(), costs.ravel()))[0]), j - i)
        self.cost[i, j], self.steps[i, j] = costs[way, offset], steps[way, offset]
        self.decision[i, j] = ("reverse", "forward", "product")[way], i + offset

    def order(self, i: int, j: int) -> Order:
        """Return the order of a range of links; successive sweeps in the same mode are merged."""
        flops = float(self.cost[i, j])
        way, k = self.decision[i, j]
        if i == j:
            return Sweep(way, i, j, None, flops)
        if way == "product":
            return Product(self.order(k + 1, j), self.order(i, k), flops)
        operand = self.order(k + 1, j) if way == "reverse" else self.order(i, k)
        first, last = (i, k) if way == "reverse" else (k + 1, j)
        if isinstance(operand, Sweep) and (operand.mode == way or self._both_modes_equal(operand)):
            first, last = min(first, operand.first), max(last, operand.last)
            return Sweep(way, first, last, operand.operand, flops)
        return Sweep(way, first, last, operand, flops)

    def _both_modes_equal(self, order: Sweep) -> bool:
        """Return whether an order is a single link, and both modes take equal FLOPs for it."""
        if order.operand is not None or order.first != order.last:
            return False
        return self.links[order.first].forward == self.links[order.first].reverse


def _sums(numbers: Sequence[float]) -> Any:
    """Return `sums[i, j]`: the sum of the numbers from position i to position j, inclusive."""
    n = len(numbers)
    sums = np.zeros((n, n))
    for i in range(n):
        sums[i, i:] = np.cumsum(numbers[i:])
    return sums
