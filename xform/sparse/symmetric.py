"""Star and acyclic colourings of graphs, for symmetric matrices.

The vertices of the graph are the columns of the matrix; an edge is a nonzero outside of the
diagonal. The matrix is multiplied by one vector for each colour: the sum of the unit vectors of the
columns of that colour. In both colourings, neighbours have different colours. In a star colouring,
every path of four vertices has at least three colours. Then each nonzero can be read directly from
a product. In an acyclic colouring, every cycle has at least three colours. Then the nonzeros are
computed from the products by sums along trees (`forest.py`). Both algorithms visit each edge a few
times only, however many neighbours its vertices have.

Source: Gebremedhin, Tarafdar, Manne and Pothen, "New acyclic and star coloring algorithms with
application to computing Hessians", SIAM Journal on Scientific Computing 29 (2007).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xform.sparse.greedy import Colors, first_allowed, members, neighbours


def star(graph: Any, order: Sequence[int]) -> Colors:
    """Return a star colouring of a graph: no path of four vertices has only two colours.

    The vertices are coloured in `order`. For each vertex, the loop maintains three sets of colours.
    `once` has the colours of its neighbours, and `twice` the colours that several neighbours have.
    A neighbour is a hub if it has several neighbours of the vertex's own colour. `hubs` has the
    colours of these neighbours.
    """
    adjacent = neighbours(graph)
    colors = [-1] * len(adjacent)  # -1: no colour yet
    once, twice, hubs = ([0] * len(adjacent) for _ in range(3))
    for v in order:
        forbidden, several = once[v], twice[v]
        for w in adjacent[v]:
            if colors[w] >= 0:
                # With the colour of a hub, v would be on this path of two colours:
                # v - w - hub - another neighbour of the hub.
                forbidden |= hubs[w]
                # With the colour of a neighbour of w, v would be on this path of two colours:
                # another neighbour of v with w's colour - v - w - the neighbour of w.
                if several >> colors[w] & 1:
                    forbidden |= once[w]
        color = first_allowed(forbidden)
        colors[v] = color.bit_length() - 1
        for w in adjacent[v]:
            c = colors[w]
            if c >= 0 and several >> c & 1:
                hubs[w] |= color
            if not once[w] & color:
                once[w] |= color
            elif twice[w] & color:
                hubs[v] |= 1 << c if c >= 0 else 0
            else:
                twice[w] |= color
                for x in adjacent[w] if c >= 0 else ():
                    if colors[x] == colors[v]:
                        hubs[x] |= 1 << c
    return colors


def acyclic(graph: Any, order: Sequence[int]) -> Colors:
    """Return an acyclic colouring of a graph: no cycle has only two colours.

    So the edges between any two colours form trees. A vertex is in one tree for each other colour.
    The trees are stored as disjoint sets (union-find) of pairs of a vertex and another colour. For
    each vertex, `once` holds the colours of its neighbours, and `twice` the colours that several
    neighbours have.
    """
    adjacent = neighbours(graph)
    colors = [-1] * len(adjacent)  # -1: no colour yet
    once, twice = ([0] * len(adjacent) for _ in range(2))
    parent: dict[tuple[int, int], tuple[int, int]] = {}

    def root_of(v: int, c: int) -> tuple[int, int]:
        """Return the root of the tree of a vertex and another colour."""
        pair = v, c
        while (above := parent.setdefault(pair, pair)) != pair:
            parent[pair] = pair = parent[above]
        return pair

    for v in order:
        forbidden, several = once[v], twice[v]
        seen: set[tuple[int, tuple[int, int]]] = set()
        for w in adjacent[v] if several else ():
            if colors[w] >= 0 and several >> colors[w] & 1:
                for c in members(once[w] & ~forbidden):
                    # With colour c, v would close a cycle if two neighbours are in the same tree.
                    tree = c, root_of(w, c)
                    forbidden |= 1 << c if tree in seen else 0
                    seen.add(tree)
        color = first_allowed(forbidden)
        c = colors[v] = color.bit_length() - 1
        for w in adjacent[v]:
            if colors[w] >= 0:
                parent[root_of(w, c)] = root_of(v, colors[w])
            twice[w] |= once[w] & color
            once[w] |= color
    return colors
