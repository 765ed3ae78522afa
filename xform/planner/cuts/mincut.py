"""Minimum cuts of a directed graph, by SciPy's maximum flow.

A cut divides the vertices into a side with the source and a side with the sink. It cuts the edges
that lead from the first side to the second. A minimum cut has the least sum of their capacities.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import scipy  # its parts are imported when they are first used

Integers = Sequence[int] | np.ndarray
# SciPy's capacities are 32-bit integers. Finite capacities are scaled to add up to about this.
_TOTAL = 2**30


def minimum_cut(n: int, tails: Integers, heads: Integers, capacities: Sequence[float] | np.ndarray,
                source: int, sink: int) -> np.ndarray:  # fmt: skip
    """Return which of `n` vertices are on the sink's side of a minimum cut, as booleans.

    If there are several minimum cuts, the result is the one whose sink's side is smallest.

    Args:
      n: number of vertices, which are numbered from 0.
      tails: the vertex that each edge leaves.
      heads: the vertex that each edge enters. The capacities of parallel edges add up.
      capacities: the capacity of each edge, not negative; `inf`: the edge must not be cut. Finite
        capacities are rounded up to multiples of 2^-30 of their sum.
      source: the vertex on the one side.
      sink: the vertex on the other side.

    Cost: near linear in practice (Dinic); 100,000 vertices in about 0.1 s.
    Source: Dinic, "Algorithm for solution of a problem of maximum flow", 1970.

    >>> from xform.planner.cuts.mincut import minimum_cut
    >>> minimum_cut(3, [0, 1], [1, 2], [2.0, 1.0], source=0, sink=2)
    array([False, False,  True])
    """
    exact = np.asarray(capacities, np.float64)
    finite = np.isfinite(exact)
    total = exact[finite].sum()
    if not total:
        total = 1.0
    infinite = _TOTAL + len(exact)  # more than all finite capacities together
    scaled = np.full(exact.shape, infinite, np.int64)
    scaled[finite] = np.ceil(exact[finite] * (_TOTAL / total))
    csr_array, flows = scipy.sparse.csr_array, scipy.sparse.csgraph
    # Add the reverse of each edge with capacity 0, so that the matrices of graph and flow match.
    from_, to = np.asarray(tails, np.int32), np.asarray(heads, np.int32)
    ends = np.concatenate([from_, to]), np.concatenate([to, from_])
    graph = csr_array((np.concatenate([scaled, np.zeros_like(scaled)]), ends), shape=(n, n))
    graph.data = np.minimum(graph.data, infinite).astype(np.int32)
    flow = flows.maximum_flow(graph, source, sink, method="dinic")
    residual = csr_array((graph.data - flow.flow.data, graph.indices, graph.indptr), shape=(n, n))
    backwards = residual.T.tocsr()
    backwards.eliminate_zeros()
    sink_side = np.zeros(n, bool)
    sink_side[flows.breadth_first_order(backwards, sink, return_predecessors=False)] = True
    tail = np.repeat(np.arange(n), np.diff(graph.indptr))
    cut = int(graph.data[~sink_side[tail] & sink_side[graph.indices]].sum(dtype=np.int64))
    assert cut == flow.flow_value < infinite, "the capacity of the cut differs from the flow"
    return sink_side
