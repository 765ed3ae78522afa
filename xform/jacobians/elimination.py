"""Vertex elimination: the Jacobian from a graph of scalar derivatives.

To eliminate a vertex, each edge into it is multiplied with each edge out of it. The product is
added to the edge from the start of the first edge to the end of the second. When only inputs and
outputs are left, the edges are the Jacobian. Any order gives the same Jacobian. The order of the
program is forward mode that skips zeros, the opposite order is reverse mode.

Source: Griewank and Walther, "Evaluating Derivatives", 2nd edition, chapters 9 and 10; Markowitz,
"The elimination form of the inverse", Management Science 3 (1957).
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterable, Sequence

Edge = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class ScalarGraph:
    """A graph of scalar derivatives. Vertices are numbered in the order of the program.

    Attributes:
      edges: pairs of a vertex and a later one, without repetition; the position of an edge is its
        slot.
      unit: for each edge, whether its derivative is 1 or -1, so that multiplying is free.
      inputs, outputs: the vertices that are not eliminated.
    """

    edges: tuple[Edge, ...]
    unit: tuple[bool, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def inside(self) -> list[int]:
        """The vertices to eliminate, in the order of the program."""
        ends = {*self.inputs, *self.outputs}
        return sorted({v for edge in self.edges for v in edge} - ends)


@dataclasses.dataclass(frozen=True)
class Elimination:
    """The products and sums of an elimination in one order.

    Attributes:
      name: name of the order.
      multiplications: number of multiplications, without those by 1 and -1.
      slots: number of edges that ever exist.
      levels: the products, grouped so that none depends on another of its level. Each is a triple
        of slots: the edge that it is added to, and its two factors.
      left: the remaining edges, with their slots.
    """

    name: str
    multiplications: int
    slots: int
    levels: tuple[tuple[tuple[int, int, int], ...], ...]
    left: dict[Edge, int]


def eliminate(graph: ScalarGraph, name: str, order: Iterable[int]) -> Elimination:
    """Eliminate vertices in the given order."""
    state = _State(graph)
    for v in order:
        state.eliminate(v)
    return state.result(name)


def forward(graph: ScalarGraph) -> Elimination:
    """Eliminate all inner vertices in the order of the program."""
    return eliminate(graph, "forward", graph.inside)


def reverse(graph: ScalarGraph) -> Elimination:
    """Eliminate all inner vertices in the opposite order of the program."""
    return eliminate(graph, "reverse", reversed(graph.inside))


def markowitz(graph: ScalarGraph) -> Elimination:
    """Eliminate next the vertex that takes the fewest multiplications (Markowitz' order).

    Ties are broken by the order of the program.

    Cost: after each elimination, the multiplications of the neighbours are counted again.
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


def fewest(graph: ScalarGraph) -> Elimination:
    """The order with the fewest multiplications of the three; on a tie, Markowitz' order."""
    found: Sequence[Elimination] = [markowitz(graph), reverse(graph), forward(graph)]
    return min(found, key=lambda e: e.multiplications)


class _State:
    """A graph during elimination.

    `before` and `after` map each vertex to its neighbours and the slots of the edges to these.
    """

    def __init__(self, graph: ScalarGraph):
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
        """The number of multiplications to eliminate a vertex."""
        ins, outs = (sum(not self.unit[s] for s in side[v].values())
                     for side in (self.before, self.after))  # fmt: skip
        return ins * outs

    def eliminate(self, v: int) -> None:
        """Eliminate a vertex: multiply its edges, and remove them."""
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
        """The products of all eliminations so far."""
        left = {(a, b): slot for a, outs in self.after.items() for b, slot in outs.items()}
        levels = tuple(map(tuple, self.products))
        return Elimination(name, self.multiplications, len(self.unit), levels, left)
