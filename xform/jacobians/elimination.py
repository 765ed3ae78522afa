"""Vertex elimination: the edges of a graph of scalars, multiplied and added until none is inside.

To eliminate a vertex, each edge into it is multiplied with each edge out of it, and the product
added to the edge from the one's start to the other's end. Any order gives the Jacobian; in the
order of the program it is forward mode that skips zeros, backwards it is reverse mode.

Source: Griewank and Walther, "Evaluating Derivatives", 2nd edition, chapters 9 and 10; Markowitz,
"The elimination form of the inverse", Management Science 3 (1957).
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterable, Sequence

Edge = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Graph:
    """A graph of scalars, in the order of a program.

    Attributes:
      edges: from one vertex to a later one, each once; the position of an edge is its slot.
      unit: whether the derivative along an edge is 1 or -1, which multiplies for free.
      inputs, outputs: the vertices at the two ends, which stay.
    """

    edges: tuple[Edge, ...]
    unit: tuple[bool, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def inside(self) -> list[int]:
        """The vertices to be eliminated, in the order of the program."""
        ends = {*self.inputs, *self.outputs}
        return sorted({v for edge in self.edges for v in edge} - ends)


@dataclasses.dataclass(frozen=True)
class Elimination:
    """What is multiplied and added in one order.

    Attributes:
      name: of the order.
      multiplications: how many, without those by 1 and -1.
      slots: how many edges there ever are.
      levels: products that depend on none of the same level: for each the slot that it is added to,
        and those of its factors.
      left: the edges that are left, with their slots.
    """

    name: str
    multiplications: int
    slots: int
    levels: tuple[tuple[tuple[int, int, int], ...], ...]
    left: dict[Edge, int]


def eliminate(graph: Graph, name: str, order: Iterable[int]) -> Elimination:
    """Eliminate the vertices inside in some order."""
    state = _State(graph)
    for v in order:
        state.eliminate(v)
    return state.result(name)


def forward(graph: Graph) -> Elimination:
    """In the order of the program."""
    return eliminate(graph, "forward", graph.inside)


def reverse(graph: Graph) -> Elimination:
    """Backwards."""
    return eliminate(graph, "reverse", reversed(graph.inside))


def markowitz(graph: Graph) -> Elimination:
    """At each step a vertex of fewest multiplications; of those the first of the program.

    Cost: of each vertex that is eliminated, its neighbours are counted again.
    """
    state = _State(graph)
    cost = {v: state.cost(v) for v in graph.inside}
    heap = [(c, v) for v, c in cost.items()]
    heapq.heapify(heap)
    while heap:
        c, v = heapq.heappop(heap)
        if cost.get(v) != c:
            continue
        del cost[v]
        near = {*state.before[v], *state.after[v]} & cost.keys()
        state.eliminate(v)
        for u in near:
            cost[u] = state.cost(u)
            heapq.heappush(heap, (cost[u], u))
    return state.result("markowitz")


def fewest(graph: Graph) -> Elimination:
    """Of the three orders that of fewest multiplications; Markowitz' if it is one of them."""
    found: Sequence[Elimination] = [markowitz(graph), reverse(graph), forward(graph)]
    return min(found, key=lambda e: e.multiplications)


class _State:
    """A graph that is being eliminated: for each vertex the slots of its edges, by neighbour."""

    def __init__(self, graph: Graph):
        vertices = {v for edge in graph.edges for v in edge}.union(graph.inputs, graph.outputs)
        self.before: dict[int, dict[int, int]] = {v: {} for v in vertices}
        self.after: dict[int, dict[int, int]] = {v: {} for v in vertices}
        for slot, (a, b) in enumerate(graph.edges):
            self.before[b][a] = self.after[a][b] = slot
        self.unit = list(graph.unit)
        self.depth = [0] * len(graph.edges)
        self.products: list[list[tuple[int, int, int]]] = []
        self.multiplications = 0

    def cost(self, v: int) -> int:
        """How many multiplications it takes to eliminate a vertex."""
        ins, outs = (sum(not self.unit[s] for s in side[v].values())
                     for side in (self.before, self.after))  # fmt: skip
        return ins * outs

    def eliminate(self, v: int) -> None:
        """Multiply its edges, and drop them."""
        self.multiplications += self.cost(v)
        before, after = self.before.pop(v), self.after.pop(v)
        for a in before:
            del self.after[a][v]
        for b in after:
            del self.before[b][v]
        for a, into in before.items():
            for b, out in after.items():
                depth = max(self.depth[into], self.depth[out])
                slot = self.after[a].get(b)
                if slot is None:
                    slot = self.before[b][a] = self.after[a][b] = len(self.unit)
                    self.unit.append(self.unit[into] and self.unit[out])
                    self.depth.append(0)
                else:
                    self.unit[slot] = False
                self.depth[slot] = max(self.depth[slot], depth + 1)
                while len(self.products) <= depth:
                    self.products.append([])
                self.products[depth].append((slot, into, out))

    def result(self, name: str) -> Elimination:
        """What was done."""
        left = {(a, b): slot for a, outs in self.after.items() for b, slot in outs.items()}
        levels = tuple(map(tuple, self.products))
        return Elimination(name, self.multiplications, len(self.unit), levels, left)
