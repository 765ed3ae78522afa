"""A Joint as a graph. The cheapest cut of the graph gives the values to save.

Each value that the backward part reads is either saved, at the price of its bytes, or recomputed,
at the price of its work. The operands of a recompute are saved or recomputed in turn. Values and
equations are vertices:

- an edge from an equation to each of its results has the bytes of the result as its capacity;
- an edge from the source to an equation has the price of recomputing it;
- edges from a value to its readers, and from a value that the backward part reads to the sink, are
  never cut: a recomputed equation needs its inputs.

The values on cut edges are saved. Source: Horace He and Shangdi Yu, "Transcending runtime-memory
tradeoffs in checkpointing by being fusion aware", MLSys 2023; a price of work as in project
selection (Picard, "Maximal closure of a graph", 1976).

The planner cuts one program at about a hundred prices, so the graph is built once. A price changes
capacities only. If it changes none, the earlier cut is returned.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from xform._jax import JaxprEqn, Var, name_p
from xform.interpret.cost import aval_bytes
from xform.interpret.joint import Joint, Schedule, reads_of
from xform.interpret.node import Node
from xform.passes.dce import live
from xform.planner.costs.recompute import fusible
from xform.planner.cuts.mincut import minimum_cut
from xform.program.naming import digest
from xform.storage.bounded_cache import BoundedCache

_SOURCE, _SINK = 0, 1


class CutGraph:
    """The values that the backward part of a Joint could read, and the equations behind them.

    Args:
      joint: the Joint.
      inner: the Schedules of its loops and calls, which determine what these read.

    Attributes:
      equations: the forward equations that could be recomputed. A cut takes one price for each.
      places: their places in the forward part.
    """

    def __init__(self, joint: Joint, inner: dict[Node, tuple[Schedule, ...]]):
        wanted = {v for eqn in joint.backward for v in reads_of(eqn, inner)}
        wanted.update(v for v in joint.backward_outputs if isinstance(v, Var))
        inputs = set(joint.inputs)
        wanted = {joint.named.get(v, v) for v in wanted if v in inputs or v in joint.producer}
        self.joint = joint
        self.equations: tuple[JaxprEqn, ...] = tuple(live(joint.forward, wanted, effects=False))
        place = {id(eqn): i for i, eqn in enumerate(joint.forward)}
        self.places = np.asarray([place[id(eqn)] for eqn in self.equations], np.int64)
        results = [v for eqn in self.equations for v in eqn.outvars]
        values = (*joint.inputs, *results)
        first = 2 + len(self.equations)
        self._vertex: dict[Var, int] = {v: first + i for i, v in enumerate(values)}
        self._index = {v: i for i, v in enumerate(results)}
        self._results = results
        self._cuts: BoundedCache[str, frozenset[Var]] = BoundedCache(16)
        self._size = first + len(values)
        ends: list[tuple[int, int]] = []
        for i, eqn in enumerate(self.equations):
            ends += [(self._vertex[v], 2 + i) for v in reads_of(eqn, inner) if v in self._vertex]
        # Each wanted value is a result of one of the equations, or an input.
        results_read = [v for v in joint.producer if v in wanted and v in self._vertex]
        ends += [(self._vertex[v], _SINK) for v in results_read]
        ends += [(self._vertex[v], _SINK) for v in joint.inputs if v in wanted]
        self._needs = np.asarray(ends, np.int64).reshape(-1, 2)

    @cached_property
    def _bytes(self) -> np.ndarray:
        """For each result, the bytes of saving it; infinite if it must not be saved."""
        free = self.joint.free
        return np.asarray([
            math.inf if eqn.primitive is name_p or v in free else aval_bytes(v.aval)
            for eqn in self.equations for v in eqn.outvars
        ], np.float64)  # fmt: skip

    @cached_property
    def _fused(self) -> np.ndarray:
        """For each result, whether a compiler would fuse it with its readers."""
        flags = [fusible(eqn) for eqn in self.equations for _ in eqn.outvars]
        return np.asarray(flags, np.float64)

    @cached_property
    def _makers(self) -> np.ndarray:
        """For each result, the vertex of its equation."""
        makers = [2 + i for i, eqn in enumerate(self.equations) for _ in eqn.outvars]
        return np.asarray(makers, np.int64)

    def cheapest(self, prices: Sequence[float] | np.ndarray, sizes: Mapping[Var, float],
                 fused_save_price: float = 0.0) -> frozenset[Var]:  # fmt: skip
        """Return the values to save: those on the cheapest cut.

        Args:
          prices: for each of the `equations`, the price of recomputing it, in bytes; infinite if it
            must not be recomputed.
          sizes: bytes of values whose price is not the bytes of their type: tokens, and inputs
            that cost something to read. Other inputs are free.
          fused_save_price: extra price, for each byte, of saving a value that would otherwise be
            fused.
        """
        size = self._bytes.copy()
        for v, n in sizes.items():
            if v in self._index and size[self._index[v]] < math.inf:
                size[self._index[v]] = n
        size *= 1 + fused_save_price * self._fused
        read = [(self._vertex[v], sizes[v]) for v in self.joint.inputs if sizes.get(v)]
        if not len(self._needs):
            return frozenset()
        price = np.asarray(prices, np.float64)
        key = digest([price.tobytes(), size.tobytes(), repr(read)])
        if key not in self._cuts:
            self._cuts[key] = self._cheapest(price, size, read)
        return self._cuts[key]

    def _cheapest(self, price: np.ndarray, size: np.ndarray, read: Sequence[tuple[int, float]]
                  ) -> frozenset[Var]:  # fmt: skip
        """`cheapest`, given the bytes of each result and of the inputs that cost something."""
        inputs = np.asarray([i for i, _ in read], np.int64)
        run = np.flatnonzero(price)
        vertices = np.arange(len(size)) + 2 + len(self.equations) + len(self.joint.inputs)
        needs = self._needs
        source = np.full(len(read) + len(run), _SOURCE)
        cut = minimum_cut(
            self._size,
            np.concatenate([source, self._makers, needs[:, 0]]),
            np.concatenate([inputs, run + 2, vertices, needs[:, 1]]),
            np.concatenate([
                [n for _, n in read], price[run], size, np.full(len(needs), math.inf)
            ]),
            _SOURCE,
            _SINK,
        )  # fmt: skip
        saved = ~cut[self._makers] & cut[vertices]
        return frozenset(self._results[i] for i in np.flatnonzero(saved))
