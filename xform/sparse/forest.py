"""Compute the elements of a Hessian from an acyclic colouring, by sums along trees.

A node is a pair of a vertex and another colour. Its edges are the nonzeros that link the vertex to
neighbours of that colour. The product of that colour has, at the vertex, the sum of these nonzeros.
So the element on the edge to the node's parent is this sum minus the elements on the edges to its
children. Unrolled, it is the sum of the products over all descendants, with alternating signs. The
number of rounds of summation is the logarithm of the depth of the deepest tree.

Source: Gebremedhin, Pothen, Tarafdar and Walther, "Efficient Computation of Sparse Hessians Using
Coloring and Automatic Differentiation", INFORMS Journal on Computing 21 (2009).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from scipy import sparse
from scipy.sparse import csgraph

from xform.sparse.pattern import Pattern


@dataclasses.dataclass(frozen=True, eq=False)
class Forest:
    """The nodes of the trees, without the roots.

    Attributes:
      places: the index of each node's sum in the flattened products, `[nodes]`.
      sign: 1 if the depth of a node is even, -1 if it is odd, `[nodes]`.
      rounds: for each round, the nodes that are added, and the nodes that they are added to.
      reads: for each nonzero of the pattern, the node whose edge to its parent it is; -1 on the
        diagonal.
    """

    places: np.ndarray
    sign: np.ndarray
    rounds: tuple[tuple[np.ndarray, np.ndarray], ...]
    reads: np.ndarray


def forest(pattern: Pattern, colors: np.ndarray) -> Forest:
    """The trees of a symmetric pattern with an acyclic colouring."""
    n, k = len(colors), int(colors.max(initial=-1)) + 1
    off = np.flatnonzero(pattern.rows != pattern.cols)
    # The edge (i, j) joins the node (i, colour of j) and the node (j, colour of i).
    here = pattern.rows[off] * k + colors[pattern.cols[off]]
    there = pattern.cols[off] * k + colors[pattern.rows[off]]
    names, both = np.unique(np.concatenate([here, there]), return_inverse=True)
    here, there = both[: len(off)], both[len(off) :]
    parents, depths = _rooted(here, there, len(names))
    below = parents >= 0
    number = np.where(below, np.cumsum(below) - 1, -1)
    above = np.where(below, number[parents], -1)[below]
    rounds: list[tuple[np.ndarray, np.ndarray]] = []
    while (added := np.flatnonzero(above >= 0)).size:
        rounds.append((added, above[added]))
        above = np.where(above >= 0, above[above], -1)
    reads = np.full(pattern.nonzeros, -1)
    reads[off] = np.where(parents[here] == there, number[here], number[there])
    vertices, others = names[below] // max(k, 1), names[below] % max(k, 1)
    sign = 1 - 2 * (depths[below] % 2)
    return Forest(others * n + vertices, sign, tuple(rounds), reads)


def _rooted(here: np.ndarray, there: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """The parent of each node (-1 for a root) and its depth.

    One breadth-first search starts from an extra node that is connected to all roots.
    """
    graph = sparse.csr_array((np.ones(len(here)), (here, there)), shape=(n, n))
    count, tree = csgraph.connected_components(graph, directed=False)
    degrees = np.bincount(here, minlength=n)
    order = np.lexsort((-degrees, tree))  # the root of a tree is a node with the most neighbours
    roots = order[np.searchsorted(tree[order], np.arange(count))]
    top = np.full(len(roots), n)
    whole = sparse.csr_array(
        (np.ones(len(here) + len(roots)),
         (np.concatenate([here, top]), np.concatenate([there, roots]))), shape=(n + 1, n + 1)
    )  # fmt: skip
    order, parents = csgraph.breadth_first_order(whole, n, directed=True)
    depths = np.zeros(n + 1, int)
    for v in order[1:].tolist():
        depths[v] = depths[parents[v]] + 1
    return np.where(parents[:n] == n, -1, parents[:n]), depths[:n]


def solve_forest(trees: Forest, products: Any, places: np.ndarray) -> Any:
    """Compute the nonzeros of the pattern from the flattened products.

    `places` holds the index of each diagonal element in the products.
    """
    total = jnp.take(products, trees.places) * jnp.asarray(trees.sign, products.dtype)
    for added, to in trees.rounds:
        total = total.at[to].add(total[added])
    edges = total * jnp.asarray(trees.sign, products.dtype)
    if not edges.size:
        return jnp.take(products, places)
    return jnp.where(trees.reads >= 0, jnp.take(edges, np.maximum(trees.reads, 0)),
                     jnp.take(products, places))  # fmt: skip
