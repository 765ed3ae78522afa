"""The joint program as a graph whose cheapest cut is what to save.

Each value that the second part reads is saved, at the price of its bytes, or made again, at the
price of its work, from values of which the same is true. An edge from an equation to a value it
makes has the value's bytes as capacity; one from the source to an equation the price of running it
again; and what is run again needs its inputs. The values on cut edges are saved. Source: Horace He
and Shangdi Yu, "Transcending runtime-memory tradeoffs in checkpointing by being fusion aware",
MLSys 2023; a price of work as in project selection (Picard, "Maximal closure of a graph", 1976).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from xform._jax import JaxprEqn, Var, name_p
from xform.cost import aval_bytes
from xform.interpret.joint import Joint, Plan, reads_of
from xform.interpret.node import Node
from xform.passes.dce import live
from xform.planner.mincut import min_cut
from xform.planner.work import fusible

# Of an equation: the price of running it again, in bytes; infinite if it must not be.
Price = Callable[[JaxprEqn], float]


def cheapest(joint: Joint, inner: dict[Node, tuple[Plan, ...]], price: Price,
             sizes: Mapping[Var, float], written: float = 0.0) -> frozenset[Var]:  # fmt: skip
    """The values to save, of those that the second part of a Joint could read.

    `sizes` are bytes of values where they are not those of their type: of inputs (what it costs
    that they be read), and of tokens. `written` is the price of saving what would else be fused,
    for each of its bytes.
    """
    wanted = {v for eqn in joint.second for v in reads_of(eqn, inner)}
    wanted.update(v for v in joint.second_outputs if isinstance(v, Var))
    inputs = set(joint.inputs)
    wanted = {joint.named.get(v, v) for v in wanted if v in inputs or v in joint.producer}
    equations = live(joint.first, wanted, effects=False)
    number: dict[Any, int] = {}
    source, sink = 0, 1
    at = lambda x: number.setdefault(x, len(number) + 2)
    edges: list[tuple[int, int, float]] = []
    for v in joint.inputs:
        if sizes.get(v):
            edges.append((source, at(v), sizes[v]))
    for eqn in equations:
        again = at(id(eqn))
        cost = price(eqn)
        if cost:
            edges.append((source, again, cost))
        for v in reads_of(eqn, inner):
            if v in inputs or v in joint.producer:
                edges.append((at(v), again, math.inf))
        saved = eqn.primitive is not name_p
        extra = 1 + written * fusible(eqn)
        for v in eqn.outvars:
            size = extra * sizes.get(v, aval_bytes(v.aval))
            size = size if saved and v not in joint.free else math.inf
            edges.append((again, at(v), size))
    for v in wanted:
        edges.append((at(v), sink, math.inf))
    if not edges:
        return frozenset()
    tails, heads, capacities = zip(*edges, strict=True)
    needed = min_cut(len(number) + 2, tails, heads, capacities, source, sink)
    return frozenset(
        v
        for eqn in equations
        if not needed[number[id(eqn)]]
        for v in eqn.outvars
        if needed[number[v]]
    )
