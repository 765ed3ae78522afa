"""Vertex elimination: the Jacobian from a graph of scalar derivatives.

Each vertex is a scalar that a program computes. An edge from one to another holds the derivative of
the second in the first. To eliminate a vertex, each edge into it is multiplied with each edge out
of it. The product is added to the edge from the start of the first edge to the end of the second.
When only inputs and outputs are left, the edges are the Jacobian. Any order gives the same
Jacobian. The order of the program is forward mode that skips zeros, and the opposite order is
reverse mode that skips zeros. This file plans the multiplications. It does not need the values of
the derivatives.

Source: Griewank and Walther, "Evaluating Derivatives", 2nd edition, chapters 9 and 10; Markowitz,
"The elimination form of the inverse", Management Science 3 (1957).
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterable

Edge = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class ScalarGraph:
    """A graph of scalar derivatives. Vertices are numbered in the order of the program.

    Attributes:
      edges: pairs of a vertex and a later one, without repetition. The position of an edge is its
        slot, that is, the index of its value in an array.
      unit: for each edge, whether its derivative is 1 or -1, so that multiplying is free.
      inputs, outputs: the vertices that are not eliminated.
    """

    edges: tuple[Edge, ...]
    unit: tuple[bool, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def inner_vertices(self) -> list[int]:
        """The vertices to eliminate, in the order of the program."""
        vertices = {v for edge in self.edges for v in edge}
        return sorted(vertices - {*self.inputs, *self.outputs})


@dataclasses.dataclass(frozen=True)
class Elimination:
    """The products and sums of an elimination in one order.

    Attributes:
      name: name of the order.
      multiplications: number of multiplications, without products with 1 and -1.
      slots: number of edges that ever exist: the original edges, and the edges that products add.
      levels: the products, grouped so that none depends on another of its level. Each is a triple
        of slots: the edge that it is added to, and its two factors.
      remaining: the edges after the elimination, with their slots: the elements of the Jacobian.
    """

    name: str
    multiplications: int
    slots: int
    levels: tuple[tuple[tuple[int, int, int], ...], ...]
    remaining: dict[Edge, int]


def eliminate(graph: ScalarGraph, name: str, order: Iterable[int]) -> Elimination:
    """Eliminate vertices in the given order. `name` is the name of the order."""
    state = _State(graph)
    for v in order:
        state.eliminate(v)
    return state.result(name)


def eliminate_forward(graph: ScalarGraph) -> Elimination:
    """Eliminate all inner vertices in the order of the program."""
    return eliminate(graph, "forward", graph.inner_vertices)


def eliminate_in_reverse(graph: ScalarGraph) -> Elimination:
    """Eliminate all inner vertices in the opposite order of the program."""
    return eliminate(graph, "reverse", reversed(graph.inner_vertices))


def eliminate_by_markowitz(graph: ScalarGraph) -> Elimination:
    """Eliminate next the vertex that takes the fewest multiplications (Markowitz' order).

    Ties are broken by the order of the program.

    Cost: after each elimination, the multiplications of the neighbours are counted again.
    """
    state = _State(graph)
    costs = {v: state.cost(v) for v in graph.inner_vertices}
    heap = [(cost, v) for v, cost in costs.items()]
    heapq.heapify(heap)
    while heap:
        cost, v = heapq.heappop(heap)
        if costs.get(v) != cost:  # the vertex is eliminated, or this entry of it is outdated
            continue
        del costs[v]
        neighbours = {*state.before[v], *state.after[v]} & costs.keys()
        state.eliminate(v)
        for u in neighbours:
            costs[u] = state.cost(u)
            heapq.heappush(heap, (costs[u], u))
    return state.result("markowitz")


def cheapest_elimination(graph: ScalarGraph) -> Elimination:
    """Return the cheapest of three eliminations: Markowitz' order (also on a tie) and both modes.

    The cheapest has the fewest multiplications.
    """
    orders = eliminate_by_markowitz, eliminate_in_reverse, eliminate_forward
    return min((order(graph) for order in orders), key=lambda e: e.multiplications)


class _State:
    """A graph during elimination.

    `before` and `after` map each vertex to its neighbours, and these to the slots of the edges.
    `depth` is, for each slot, the number of levels of products that its value needs.
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
        """Return the number of multiplications to eliminate a vertex."""
        ins = sum(not self.unit[slot] for slot in self.before[v].values())
        outs = sum(not self.unit[slot] for slot in self.after[v].values())
        return ins * outs

    def eliminate(self, v: int) -> None:
        """Eliminate a vertex: multiply its edges, and remove them."""
        self.multiplications += self.cost(v)
        before, after = self.before.pop(v), self.after.pop(v)
        for a in before:
            del self.after[a][v]
        for b in after:
            del self.before[b][v]
        for a, slot_in in before.items():
            for b, slot_out in after.items():
                depth = max(self.depth[slot_in], self.depth[slot_out])
                slot = self.after[a].get(b)
                if slot is None:
                    slot = self.before[b][a] = self.after[a][b] = len(self.unit)
                    self.unit.append(self.unit[slot_in] and self.unit[slot_out])
                    self.depth.append(0)
                else:
                    self.unit[slot] = False
                self.depth[slot] = max(self.depth[slot], depth + 1)
                while len(self.products) <= depth:
                    self.products.append([])
                self.products[depth].append((slot, slot_in, slot_out))

    def result(self, name: str) -> Elimination:
        """Return the products of all eliminations so far."""
        remaining = {(a, b): slot for a, outs in self.after.items() for b, slot in outs.items()}
        levels = tuple(map(tuple, self.products))
        return Elimination(name, self.multiplications, len(self.unit), levels, remaining)
