"""Star and acyclic colourings of graphs, for symmetric matrices.

In both, neighbours have different colours. In a star colouring, every path of four vertices has at
least three colours, and each element can be read from a product. In an acyclic colouring, every
cycle has at least three colours, and elements can be computed from products along trees. Each
vertex and each edge is visited a few times only, however many neighbours they have.

Source: Gebremedhin, Tarafdar, Manne and Pothen, "New acyclic and star coloring algorithms with
application to computing Hessians", SIAM Journal on Scientific Computing 29 (2007).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xform.sparse.greedy import Colors, bits, first_free, neighbours


def star(graph: Any, order: Sequence[int]) -> Colors:
    """A star colouring: no path of four vertices has only two colours.

    For each vertex, the loop maintains three sets of colours. `once`: colours of its neighbours.
    `twice`: colours of several neighbours. `hubs`: colours of neighbours that are a hub, that is,
    have several neighbours of the vertex's own colour.
    """
    near = neighbours(graph)
    colors = [-1] * len(near)
    once, twice, hubs = ([0] * len(near) for _ in range(3))
    for v in order:
        forbidden, several = once[v], twice[v]
        for w in near[v]:
            if colors[w] >= 0:
                # v - w - hub - another neighbour of the hub
                forbidden |= hubs[w]
                if several >> colors[w] & 1:  # another neighbour - v - w - a neighbour of w
                    forbidden |= once[w]
        color = first_free(forbidden)
        colors[v] = color.bit_length() - 1
        for w in near[v]:
            c = colors[w]
            if c >= 0 and several >> c & 1:
                hubs[w] |= color
            if not once[w] & color:
                once[w] |= color
            elif twice[w] & color:
                hubs[v] |= 1 << c if c >= 0 else 0
            else:
                twice[w] |= color
                for x in near[w] if c >= 0 else ():
                    if colors[x] == colors[v]:
                        hubs[x] |= 1 << c
    return colors


def acyclic(graph: Any, order: Sequence[int]) -> Colors:
    """An acyclic colouring: no cycle has only two colours.

    So the edges between any two colours form trees. A vertex is in one tree for each other colour.
    The trees are stored as disjoint sets.
    """
    near = neighbours(graph)
    colors = [-1] * len(near)
    once, twice = ([0] * len(near) for _ in range(2))
    parent: dict[tuple[int, int], tuple[int, int]] = {}

    def tree(v: int, c: int) -> tuple[int, int]:
        at = v, c
        while (up := parent.setdefault(at, at)) != at:
            parent[at] = at = parent[up]
        return at

    for v in order:
        forbidden, several = once[v], twice[v]
        seen: set[tuple[int, tuple[int, int]]] = set()
        for w in near[v] if several else ():
            if colors[w] >= 0 and several >> colors[w] & 1:
                for c in bits(once[w] & ~forbidden):
                    # Two neighbours are in the same tree, so `v` would close a cycle.
                    at = c, tree(w, c)
                    forbidden |= 1 << c if at in seen else 0
                    seen.add(at)
        color = first_free(forbidden)
        c = colors[v] = color.bit_length() - 1
        for w in near[v]:
            if colors[w] >= 0:
                parent[tree(w, c)] = tree(v, colors[w])
            twice[w] |= once[w] & color
            once[w] |= color
    return colors
