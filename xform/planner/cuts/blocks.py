"""Budgets of large programs: equal blocks are found by hashing, solved once, and counted.

What crosses at the narrow places of the forward part (`bottleneck.py`) is taken to be needed: it is
saved, or made again in the block that makes it. Then no decision of a block changes the work of
another, and blocks add up. What a block is to the integer program of `integer_program.py` (its
equations, their wiring, and what of them is read after it) is written down with variables by
number. Two blocks with the same text are equal, as layers are. Each class of blocks is
solved at a few budgets of its own, and a second integer program says how many blocks of each class
take which solution.

Cost: linear in equations, and one solution for each distinct block; 96 equal layers cost as one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import scipy  # its parts are imported when they are first used

from xform._jax import JaxprEqn, Var
from xform.fingerprint import lines
from xform.interpret.joint import Joint, Schedule, reads_of
from xform.interpret.node import Node, fork_p, join_p
from xform.passes.dce import live
from xform.planner.cuts.bottleneck import bottlenecks, roots_of
from xform.planner.cuts.integer_program import MOST, IntegerProgram, Point, size
from xform.planner.plan.decision import Decision
from xform.recent import Recent

# Of a class of blocks: how many solutions are looked for.
_POINTS = 16
# In bytes for a FLOP: more than any is worth.
_DEAREST = 16.0
_GAP = 1e-4


def choose(top: Schedule, budget: int) -> Decision | None:
    """What a Schedule's Joint saves for little work run again; None if its blocks are too large.

    The classes and their solutions are kept with the Schedule, for other budgets.
    """
    if "blocks" not in top.cache:
        equal = classes(top)
        small = all(size(same[0]) <= MOST for same in equal)
        top.cache["blocks"] = equal, [front(same[0]) for same in equal] if small else [[]]
    equal, fronts = top.cache["blocks"]
    counts = _counts(fronts, [len(same) for same in equal], budget) if all(fronts) else None
    if counts is None:
        return None
    saved: set[Var] = set()
    inner: dict[Node, tuple[Decision, ...]] = {}
    for same, points, numbers in zip(equal, fronts, counts, strict=True):
        taken = [p.decision for p, n in zip(points, numbers, strict=True) for _ in range(n)]
        for block, decision in zip(same, taken, strict=True):
            moved = _moved(decision, same[0].joint, block.joint)
            saved |= moved.saved
            inner |= moved.inner
    return Decision(frozenset(saved), inner)


def classes(top: Schedule) -> list[list[Schedule]]:
    """The blocks of a Schedule, as Schedules of their own, equal ones together."""
    alike: dict[Any, list[Schedule]] = {}
    for block in _blocks(top):
        joint = block.joint
        names: dict[Any, str] = {}
        form = (
            *lines((*joint.forward, *joint.backward), names),
            *map(names.get, joint.backward_outputs),
        )
        alike.setdefault(form, []).append(block)
    return list(alike.values())


def front(block: Schedule) -> list[Point]:
    """Solutions of one block, from the fewest bytes to the least work; empty if none was found.

    First its two ends, then always between those neighbours that enclose most of bytes x work.
    """
    problem = IntegerProgram(block)
    least, high = problem.at_price(0.0), problem.at_price(_DEAREST)
    if least is None or high is None:
        return []
    low = problem.at(least.bytes) or least
    points = {p.bytes: p for p in (low, high)}
    # Between two points, where the better one of them is known to be the best up to `middle`.
    gaps = [(low, low.bytes, high)]
    for _ in range(_POINTS):
        a, start, b = gap = max(gaps, key=lambda g: (g[2].bytes - g[1]) * (g[0].price - g[2].price))
        if b.bytes - start < 2 or a.price <= b.price:
            break
        gaps.remove(gap)
        middle = (start + b.bytes) // 2
        point = problem.at(middle)
        if point is None or point.price >= a.price:
            gaps.append((a, middle, b))
            continue
        points[point.bytes] = point
        gaps += [(a, start, point), (point, middle, b)]
    return [points[n] for n in sorted(points)]


def _counts(fronts: Sequence[Sequence[Point]], numbers: Sequence[int], budget: int
            ) -> list[list[int]] | None:  # fmt: skip
    """How many blocks of each class take each point of its front, for the least work."""
    points = [p for points in fronts for p in points]
    of = np.repeat(np.arange(len(fronts)), [len(points) for points in fronts])
    sizes, prices = (np.array([getattr(p, k) for p in points], float) for k in ("bytes", "price"))
    scale = max(sizes.max(initial=0), 1.0)
    each = (of == np.arange(len(fronts))[:, None]).astype(float)
    many: Any = np.asarray(numbers)
    optimize = scipy.optimize
    solution = optimize.milp(
        prices / max(prices.max(initial=0), 1.0),
        integrality=np.ones(len(points)),
        bounds=optimize.Bounds(0, many[of]),
        constraints=[
            optimize.LinearConstraint(each, many, many),
            optimize.LinearConstraint(sizes[None] / scale, -np.inf, budget / scale),
        ],
        options={"node_limit": 2_000, "mip_rel_gap": _GAP},
    )
    if solution.x is None:
        return None
    whole = np.rint(solution.x).astype(int)
    return [[int(n) for n in whole[of == k]] for k in range(len(fronts))]


def _blocks(top: Schedule) -> list[Schedule]:
    """The blocks of a Schedule, in order: what hangs together when crossing values are at hand.

    So is what is made without real work from inputs: it is not worth saving in any block.
    """
    joint, roots = top.joint, roots_of(top.joint)
    crossing = frozenset[Var]().union(*bottlenecks(joint))
    plain = [v for e in joint.backward if e.primitive is not join_p for v in reads_of(e, top.inner)]
    plain += [v for v in joint.backward_outputs if isinstance(v, Var)]
    nested = [v for e in joint.backward if e.primitive is join_p for v in reads_of(e, top.inner)]
    ends = {joint.named.get(v, v) for v in plain}
    equations = [
        eqn
        for eqn in live(joint.forward, ends.union(nested), effects=False)
        if any(v in roots and (roots[v] is v or roots[v] not in crossing) for v in eqn.outvars)
    ]
    number = {v: i for i, eqn in enumerate(equations) for v in eqn.outvars}
    leader = list(range(len(equations)))

    def find(i: int) -> int:
        while leader[i] != i:
            leader[i] = i = leader[leader[i]]
        return i

    for i, eqn in enumerate(equations):
        for v in eqn.invars:
            if isinstance(v, Var) and v in number and v not in crossing:
                a, b = find(i), find(number[v])
                leader[max(a, b)] = min(a, b)
    parts: dict[int, list[JaxprEqn]] = {}
    for i, eqn in enumerate(equations):
        parts.setdefault(find(i), []).append(eqn)
    joins = {e.params["node"]: e for e in joint.backward if e.primitive is join_p}
    return [_block(top, part, ends | crossing, joins) for part in parts.values()]


def _block(top: Schedule, part: list[JaxprEqn], ends: Iterable[Var], joins: dict[Node, JaxprEqn]
           ) -> Schedule:  # fmt: skip
    """Some equations as a Schedule of their own; what they read from outside is at hand."""
    nodes = [e.params["node"] for e in part if e.primitive is fork_p]
    joint = dataclasses.replace(
        top.joint,
        inputs=(),
        forward=tuple(part),
        backward=tuple(joins[n] for n in nodes if n in joins),
        backward_outputs=tuple(v for e in part for v in e.outvars if v in ends),
    )
    inner = {n: top.inner[n] for n in nodes}
    return dataclasses.replace(top, joint=joint, inner=inner, kept=(), reads=(), cache=Recent())


def _moved(decision: Decision, one: Joint, other: Joint) -> Decision:
    """The same decisions for another Joint of the same form."""
    if one is other:
        return decision
    pairs = list(zip(one.forward, other.forward, strict=True))
    there = {v: u for a, b in pairs for v, u in zip(a.outvars, b.outvars, strict=True)}
    nodes = {a.params["node"]: b.params["node"] for a, b in pairs if a.primitive is fork_p}
    inner = {
        nodes[n]: tuple(map(_moved, decisions, n.joints, nodes[n].joints))
        for n, decisions in decision.inner.items()
    }
    return Decision(frozenset(there[v] for v in decision.saved), inner)
