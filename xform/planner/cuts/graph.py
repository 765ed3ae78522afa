"""A derivative as a graph. The cheapest cut of the graph gives the values to save.

The forward and the backward pass are one program, a *Joint*. Each forward value that the backward
pass reads is either saved, at the price of its bytes, or recomputed, at the price of its work. The
operands of a recomputed equation are saved or recomputed in turn. Values and forward equations are
vertices of the graph. It also has a source and a sink:

- an edge from an equation to each of its results has the bytes of the result as its capacity;
- an edge from the source to an equation has the price of recomputing the equation;
- an edge from a value to each equation that reads it is never cut, because a recomputed equation
  needs its inputs;
- an edge from each value that the backward pass reads to the sink is never cut.

A value is saved if the edge from its equation is cut. The equations on the sink's side of the cut
are recomputed.

Source: Horace He and Shangdi Yu, "Transcending runtime-memory tradeoffs in checkpointing by being
fusion aware", MLSys 2023. The price of work is as in Picard, "Maximal closure of a graph", 1976
(project selection).

The planner cuts one program at about a hundred prices, so the graph is built once. A price changes
capacities only. If it changes none, the earlier cut is returned.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from xform._jax import JaxprEqn, Var
from xform.interpret.cost import aval_bytes
from xform.interpret.joint import Joint, Schedule, reads_of
from xform.interpret.node import Node
from xform.passes.dce import live
from xform.planner.costs.recompute import fusible
from xform.planner.cuts.mincut import minimum_cut
from xform.program.naming import digest
from xform.registry.table import traits
from xform.storage.bounded_cache import BoundedCache

_SOURCE, _SINK = 0, 1


class CutGraph:
    """The graph of a Joint: the values that could be saved, and the equations that compute them.

    Args:
      joint: the forward and the backward pass.
      inner: for each loop, branch and call in the Joint (its *nodes*), the Schedules of the
        programs inside. They determine which values the node's backward pass reads.

    Attributes:
      equations: the forward equations that could be recomputed. `cheapest` takes one price for
        each.
      places: the index of each of these equations in `joint.forward`.
    """

    def __init__(self, joint: Joint, inner: dict[Node, tuple[Schedule, ...]]):
        read = {v for eqn in joint.backward for v in reads_of(eqn, inner)}
        read.update(v for v in joint.backward_outputs if isinstance(v, Var))
        inputs = set(joint.inputs)
        read = {joint.named_copy.get(v, v) for v in read if v in inputs or v in joint.producer}
        self.joint = joint
        self.equations: tuple[JaxprEqn, ...] = tuple(live(joint.forward, read, effects=False))
        place = {id(eqn): i for i, eqn in enumerate(joint.forward)}
        self.places = np.asarray([place[id(eqn)] for eqn in self.equations], np.int64)
        results = [v for eqn in self.equations for v in eqn.outvars]
        values = (*joint.inputs, *results)
        first = 2 + len(self.equations)  # after source, sink and equations
        self._vertex: dict[Var, int] = {v: first + i for i, v in enumerate(values)}
        self._result_index = {v: i for i, v in enumerate(results)}
        self._results = results
        self._cuts: BoundedCache[str, frozenset[Var]] = BoundedCache(16)
        self._n_vertices = first + len(values)
        uncut: list[tuple[int, int]] = []
        for i, eqn in enumerate(self.equations):
            uncut += [(self._vertex[v], 2 + i) for v in reads_of(eqn, inner) if v in self._vertex]
        # Each value in `read` is a result of one of the equations, or an input.
        results_read = [v for v in joint.producer if v in read and v in self._vertex]
        uncut += [(self._vertex[v], _SINK) for v in results_read]
        uncut += [(self._vertex[v], _SINK) for v in joint.inputs if v in read]
        # The edges that are never cut, as rows (tail, head).
        self._uncut_edges = np.asarray(uncut, np.int64).reshape(-1, 2)

    @cached_property
    def _bytes(self) -> np.ndarray:
        """For each result, its bytes; infinite if it must not be saved: a view or a constant."""
        never_saved = self.joint.always_recomputed
        return np.asarray([
            math.inf if traits(eqn.primitive).label or v in never_saved else aval_bytes(v.aval)
            for eqn in self.equations for v in eqn.outvars
        ], np.float64)  # fmt: skip

    @cached_property
    def _fused(self) -> np.ndarray:
        """For each result, 1.0 if a compiler would fuse it with its readers, else 0.0."""
        flags = [fusible(eqn) for eqn in self.equations for _ in eqn.outvars]
        return np.asarray(flags, np.float64)

    @cached_property
    def _producers(self) -> np.ndarray:
        """For each result, the vertex of its equation."""
        producers = [2 + i for i, eqn in enumerate(self.equations) for _ in eqn.outvars]
        return np.asarray(producers, np.int64)

    def cheapest(self, prices: Sequence[float] | np.ndarray, sizes: Mapping[Var, float],
                 fused_save_price: float = 0.0) -> frozenset[Var]:  # fmt: skip
        """Return the values to save, those on the cheapest cut.

        Args:
          prices: for each of the `equations`, the price of recomputing it, in bytes; infinite if it
            must not be recomputed.
          sizes: the price of saving a value, if it is not the bytes of its type. A token has one,
            because it stands for all values saved inside a node. An input has one if reading it
            costs something; other inputs cost nothing.
          fused_save_price: extra price, for each byte, of saving a value that would otherwise be
            fused.
        """
        size = self._bytes.copy()
        for v, n in sizes.items():
            if v in self._result_index and size[self._result_index[v]] < math.inf:
                size[self._result_index[v]] = n
        size *= 1 + fused_save_price * self._fused
        costly = [(self._vertex[v], sizes[v]) for v in self.joint.inputs if sizes.get(v)]
        if not len(self._uncut_edges):
            return frozenset()
        price = np.asarray(prices, np.float64)
        key = digest([price.tobytes(), size.tobytes(), repr(costly)])
        if key not in self._cuts:
            self._cuts[key] = self._cheapest(price, size, costly)
        return self._cuts[key]

    def _cheapest(self, price: np.ndarray, size: np.ndarray,
                  costly: Sequence[tuple[int, float]]) -> frozenset[Var]:  # fmt: skip
        """Return the values on the cheapest cut.

        Args:
          price: the price of recomputing each of the `equations`.
          size: the price of saving each of their results.
          costly: the vertex and the price of each input whose reading costs something.
        """
        inputs = np.asarray([i for i, _ in costly], np.int64)
        priced = np.flatnonzero(price)
        results = np.arange(len(size)) + 2 + len(self.equations) + len(self.joint.inputs)
        uncut = self._uncut_edges
        source = np.full(len(costly) + len(priced), _SOURCE)
        on_sink_side = minimum_cut(
            self._n_vertices,
            np.concatenate([source, self._producers, uncut[:, 0]]),
            np.concatenate([inputs, priced + 2, results, uncut[:, 1]]),
            np.concatenate([
                [n for _, n in costly], price[priced], size, np.full(len(uncut), math.inf)
            ]),
            _SOURCE,
            _SINK,
        )  # fmt: skip
        saved = ~on_sink_side[self._producers] & on_sink_side[results]
        return frozenset(self._results[i] for i in np.flatnonzero(saved))
