"""Minimum cuts of a directed graph, by SciPy's maximum flow."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import scipy  # its parts are imported when they are first used

Integers = Sequence[int] | np.ndarray
# SciPy's capacities are 32-bit: finite ones are scaled so that they add up to about this.
_TOTAL = 2**30


def min_cut(n: int, tails: Integers, heads: Integers, capacities: Sequence[float] | np.ndarray,
            source: int, sink: int) -> np.ndarray:  # fmt: skip
    """Which of `n` vertices stand on the sink's side of a cheapest cut, as booleans.

    Of several cheapest cuts it is the one nearest to the sink. Capacities are nonnegative, and
    `inf` where the edge must not be cut; parallel edges add up. Two capacities are told apart if
    they differ by more than 2^-30 of the sum of the finite ones.

    Cost: near linear in practice (Dinic); 100,000 vertices in about 0.1 s.
    Source: Dinic, "Algorithm for solution of a problem of maximum flow", 1970.

    >>> from xform.planner.cuts.mincut import min_cut
    >>> min_cut(3, [0, 1], [1, 2], [2.0, 1.0], source=0, sink=2)
    array([False, False,  True])
    """
    caps = np.asarray(capacities, np.float64)
    finite = np.isfinite(caps)
    total = caps[finite].sum()
    if not total:
        total = 1.0
    scaled = np.ceil(caps[finite] * (_TOTAL / total))
    never = _TOTAL + len(caps)
    whole = np.full(caps.shape, never, np.int64)
    whole[finite] = scaled
    csr_array, flows = scipy.sparse.csr_array, scipy.sparse.csgraph
    # With the way back of each edge, which has no capacity, as SciPy's flow has it.
    there, back = np.asarray(tails, np.int32), np.asarray(heads, np.int32)
    ends = np.concatenate([there, back]), np.concatenate([back, there])
    graph = csr_array((np.concatenate([whole, np.zeros_like(whole)]), ends), shape=(n, n))
    graph.data = np.minimum(graph.data, never).astype(np.int32)
    flow = flows.maximum_flow(graph, source, sink, method="dinic")
    left = csr_array((graph.data - flow.flow.data, graph.indices, graph.indptr), shape=(n, n))
    backwards = left.T.tocsr()
    backwards.eliminate_zeros()
    reach = np.zeros(n, bool)
    reach[flows.breadth_first_order(backwards, sink, return_predecessors=False)] = True
    tail = np.repeat(np.arange(n), np.diff(graph.indptr))
    cut = int(graph.data[~reach[tail] & reach[graph.indices]].sum(dtype=np.int64))
    assert cut == flow.flow_value < never, "the cut is not the flow"
    return reach
