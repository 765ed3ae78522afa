"""The joint program as a graph whose cheapest cut is what to save.

Each value that the backward part reads is saved, at the price of its bytes, or made again, at the
price of its work, from values of which the same is true. An edge from an equation to a value it
makes has the value's bytes as capacity; one from the source to an equation the price of running it
again; and what is run again needs its inputs. The values on cut edges are saved. Source: Horace He
and Shangdi Yu, "Transcending runtime-memory tradeoffs in checkpointing by being fusion aware",
MLSys 2023; a price of work as in project selection (Picard, "Maximal closure of a graph", 1976).

A planner cuts one program at a hundred prices. Its graph is made once; a price changes capacities,
and where it changes none the cut is the one that was found before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from xform._jax import JaxprEqn, Var, name_p
from xform.cost import aval_bytes
from xform.interpret.joint import Joint, Schedule, reads_of
from xform.interpret.node import Node
from xform.naming import digest
from xform.passes.dce import live
from xform.planner.costs.recompute import fusible
from xform.planner.cuts.mincut import min_cut
from xform.recent import Recent

_SOURCE, _SINK = 0, 1


class Graph:
    """What the backward part of a Joint could read, and what that is made from.

    `inner` says what loops and calls read. `equations` are those that might be run again, `places`
    where they stand in the forward part: a price for each of them is what a cut takes.
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
        values_made = [v for eqn in self.equations for v in eqn.outvars]
        values = (*joint.inputs, *values_made)
        first = 2 + len(self.equations)
        self._at: dict[Var, int] = {v: first + i for i, v in enumerate(values)}
        self._made = {v: i for i, v in enumerate(values_made)}
        self._values = values_made
        self._cuts: Recent[str, frozenset[Var]] = Recent(16)
        self._size = first + len(values)
        ends: list[tuple[int, int]] = []
        for i, eqn in enumerate(self.equations):
            ends += [(self._at[v], 2 + i) for v in reads_of(eqn, inner) if v in self._at]
        # What is wanted and made by no equation that might be run again is an input.
        ends += [(self._at[v], _SINK) for v in joint.producer if v in wanted and v in self._at]
        ends += [(self._at[v], _SINK) for v in joint.inputs if v in wanted]
        self._needs = np.asarray(ends, np.int64).reshape(-1, 2)

    @cached_property
    def _bytes(self) -> np.ndarray:
        """Of each value that is made, what saving it costs; infinite if it is not to be saved."""
        free = self.joint.free
        return np.asarray([
            math.inf if eqn.primitive is name_p or v in free else aval_bytes(v.aval)
            for eqn in self.equations for v in eqn.outvars
        ], np.float64)  # fmt: skip

    @cached_property
    def _fused(self) -> np.ndarray:
        """Which of the values that are made a compiler would fuse with what reads them."""
        flags = [fusible(eqn) for eqn in self.equations for _ in eqn.outvars]
        return np.asarray(flags, np.float64)

    @cached_property
    def _makers(self) -> np.ndarray:
        """Of each value that is made, the vertex of its equation."""
        makers = [2 + i for i, eqn in enumerate(self.equations) for _ in eqn.outvars]
        return np.asarray(makers, np.int64)

    def cheapest(self, prices: Sequence[float] | np.ndarray, sizes: Mapping[Var, float],
                 written: float = 0.0) -> frozenset[Var]:  # fmt: skip
        """The values to save, where running each of the `equations` again has a price in bytes.

        A price is infinite where an equation must not be run again. `sizes` are bytes of values
        where they are not those of their type: of inputs (what it costs that they be read; 0 if
        they are not among them), and of tokens. `written` is the price of saving what would else be
        fused, for each of its bytes.
        """
        size = self._bytes.copy()
        for v, n in sizes.items():
            if v in self._made and size[self._made[v]] < math.inf:
                size[self._made[v]] = n
        size *= 1 + written * self._fused
        read = [(self._at[v], sizes[v]) for v in self.joint.inputs if sizes.get(v)]
        if not len(self._needs):
            return frozenset()
        price = np.asarray(prices, np.float64)
        key = digest([price.tobytes(), size.tobytes(), repr(read)])
        if key not in self._cuts:
            self._cuts[key] = self._cheapest(price, size, read)
        return self._cuts[key]

    def _cheapest(self, price: np.ndarray, size: np.ndarray, read: Sequence[tuple[int, float]]
                  ) -> frozenset[Var]:  # fmt: skip
        """The same, with bytes for each value that is made, and for those inputs that cost some."""
        inputs = np.asarray([i for i, _ in read], np.int64)
        run = np.flatnonzero(price)
        vertices = np.arange(len(size)) + 2 + len(self.equations) + len(self.joint.inputs)
        needs = self._needs
        source = np.full(len(read) + len(run), _SOURCE)
        cut = min_cut(
            self._size,
            np.concatenate([source, self._makers, needs[:, 0]]),
            np.concatenate([inputs, run + 2, vertices, needs[:, 1]]),
            np.concatenate([
                [n for _, n in read], price[run], size, np.full(len(needs), math.inf)
            ]),
            _SOURCE,
            _SINK,
        )  # fmt: skip
        crossed = ~cut[self._makers] & cut[vertices]
        return frozenset(self._values[i] for i in np.flatnonzero(crossed))
