"""Compute the elements of a Hessian from an acyclic colouring, by sums along trees.

The columns of the Hessian are the vertices of a graph; a nonzero outside of the diagonal is an
edge. For each colour there is one product: the Hessian times the sum of the unit vectors of that
colour. In an acyclic colouring, the edges between two colours form trees.

A node of a tree is a pair of a vertex and another colour. Its edges are the nonzeros that link the
vertex to neighbours of that colour. The product of that colour has, at the vertex, the sum of these
nonzeros. So the element on the edge to the node's parent is this sum minus the elements on the
edges to its children. Unrolled, it is the sum over the node and all its descendants, with
alternating signs. The number of rounds of summation is the logarithm of the depth of the deepest
tree.

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
      product_indices: the index of each node's sum in the flattened products, `[nodes]`.
      sign: 1 if the depth of a node is even, -1 if it is odd, `[nodes]`.
      rounds: for each round of summation, the nodes whose sums are added, and the nodes to whose
        sums they are added.
      edge_nodes: for each nonzero of the pattern, the node whose edge to its parent it is; -1 on
        the diagonal.
    """

    product_indices: np.ndarray
    sign: np.ndarray
    rounds: tuple[tuple[np.ndarray, np.ndarray], ...]
    edge_nodes: np.ndarray


def forest(pattern: Pattern, colors: np.ndarray) -> Forest:
    """Return the trees of a symmetric pattern, for an acyclic colouring of its columns."""
    n, k = len(colors), int(colors.max(initial=-1)) + 1
    edges = np.flatnonzero(pattern.rows != pattern.cols)
    # The edge (i, j) joins the node (i, colour of j) and the node (j, colour of i). A node is
    # first the number `vertex * k + colour`, then its position among all nodes that exist.
    starts = pattern.rows[edges] * k + colors[pattern.cols[edges]]
    ends = pattern.cols[edges] * k + colors[pattern.rows[edges]]
    nodes, positions = np.unique(np.concatenate([starts, ends]), return_inverse=True)
    starts, ends = positions[: len(edges)], positions[len(edges) :]
    parents, depths = _parents_and_depths(starts, ends, len(nodes))
    has_parent = parents >= 0
    # From here on, nodes are numbered without the roots.
    number = np.where(has_parent, np.cumsum(has_parent) - 1, -1)
    ancestor = np.where(has_parent, number[parents], -1)[has_parent]
    rounds: list[tuple[np.ndarray, np.ndarray]] = []
    while (added := np.flatnonzero(ancestor >= 0)).size:
        rounds.append((added, ancestor[added]))
        ancestor = np.where(ancestor >= 0, ancestor[ancestor], -1)  # now twice as far up the tree
    edge_nodes = np.full(pattern.nonzeros, -1)
    edge_nodes[edges] = np.where(parents[starts] == ends, number[starts], number[ends])
    vertices, other_colors = nodes[has_parent] // max(k, 1), nodes[has_parent] % max(k, 1)
    sign = 1 - 2 * (depths[has_parent] % 2)
    return Forest(other_colors * n + vertices, sign, tuple(rounds), edge_nodes)


def _parents_and_depths(
    starts: np.ndarray, ends: np.ndarray, n: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the parent of each of `n` nodes (-1 for a root) and its depth, given the edges.

    One breadth-first search starts from an extra node that is connected to all roots.
    """
    graph = sparse.csr_array((np.ones(len(starts)), (starts, ends)), shape=(n, n))
    count, tree = csgraph.connected_components(graph, directed=False)
    degrees = np.bincount(starts, minlength=n)
    order = np.lexsort((-degrees, tree))  # the root of a tree is a node with the most neighbours
    roots = order[np.searchsorted(tree[order], np.arange(count))]
    extra = np.full(len(roots), n)
    connected = sparse.csr_array(
        (np.ones(len(starts) + len(roots)),
         (np.concatenate([starts, extra]), np.concatenate([ends, roots]))), shape=(n + 1, n + 1)
    )  # fmt: skip
    order, parents = csgraph.breadth_first_order(connected, n, directed=True)
    depths = np.zeros(n + 1, int)
    for v in order[1:].tolist():
        depths[v] = depths[parents[v]] + 1
    return np.where(parents[:n] == n, -1, parents[:n]), depths[:n]


def solve_forest(trees: Forest, products: Any, product_indices: np.ndarray) -> Any:
    """Compute the nonzeros of the pattern from the flattened products, in the pattern's order.

    `product_indices` holds, for each nonzero on the diagonal, its index in the products. The
    entries of other nonzeros are not used.
    """
    sign = jnp.asarray(trees.sign, products.dtype)
    total = jnp.take(products, trees.product_indices) * sign
    for added, to in trees.rounds:
        total = total.at[to].add(total[added])
    edges = total * sign
    diagonal = jnp.take(products, product_indices)
    if not edges.size:
        return diagonal
    return jnp.where(trees.edge_nodes >= 0, jnp.take(edges, np.maximum(trees.edge_nodes, 0)),
                     diagonal)  # fmt: skip
