"""The trees of an acyclic colouring, and the elements of a matrix from them.

A vertex and another colour are a node: the product of that colour has, at the vertex, the sum of
the elements to its neighbours of that colour, which are the node's edges. So the element to a
node's parent is what the product says less the elements to its children: the sum over all below,
with signs that alternate. It is summed in as many rounds as the depth of the deepest tree has bits.

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
    """The nodes below a parent.

    Attributes:
      places: where the products have what is said at each node, `[nodes]`.
      sign: 1 or -1 as the depth of a node is even or odd, `[nodes]`.
      rounds: for each round the nodes that are added, and those that they are added to.
      reads: for each element of the pattern the node whose edge it is; -1 on the diagonal.
    """

    places: np.ndarray
    sign: np.ndarray
    rounds: tuple[tuple[np.ndarray, np.ndarray], ...]
    reads: np.ndarray


def forest(pattern: Pattern, colors: np.ndarray) -> Forest:
    """The trees of a symmetric pattern whose vertices have colours."""
    n, k = len(colors), int(colors.max(initial=-1)) + 1
    off = np.flatnonzero(pattern.rows != pattern.cols)
    # The edge from a row to a column joins two nodes, each named by the other's colour.
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
    """The parent of each node, -1 of a root, and its depth; by one walk from above all roots."""
    graph = sparse.csr_array((np.ones(len(here)), (here, there)), shape=(n, n))
    count, tree = csgraph.connected_components(graph, directed=False)
    degrees = np.bincount(here, minlength=n)
    order = np.lexsort((-degrees, tree))  # of each tree a node with the most neighbours is the root
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


def solved(trees: Forest, products: Any, places: np.ndarray) -> Any:
    """The elements of a pattern from the products, flat; those on the diagonal from `places`."""
    total = jnp.take(products, trees.places) * jnp.asarray(trees.sign, products.dtype)
    for added, to in trees.rounds:
        total = total.at[to].add(total[added])
    edges = total * jnp.asarray(trees.sign, products.dtype)
    if not edges.size:
        return jnp.take(products, places)
    return jnp.where(trees.reads >= 0, jnp.take(edges, np.maximum(trees.reads, 0)),
                     jnp.take(products, places))  # fmt: skip
