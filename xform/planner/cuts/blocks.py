"""Budgets for large programs: solve each distinct block once, then combine the solutions.

The narrow places of the forward part (`bottleneck.py`) cut it into blocks. A value that crosses a
narrow place counts as needed: the block that makes it either saves it or recomputes it. Then the
decisions of one block do not change the work of another, and bytes and work add up over blocks.

A block is written as text: its equations with numbered variables, and which of its values are read
after it. Blocks with the same text are equal and form a class, as layers do. Each class is solved
with `integer_program.py` at several budgets. A second integer program then chooses how many blocks
of each class use which solution.

Cost: linear in equations, plus the solutions of each distinct block. 96 equal layers cost as much
as one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import scipy  # its parts are imported when they are first used

from xform._jax import JaxprEqn, Var
from xform.interpret.joint import Joint, Schedule, reads_of
from xform.interpret.node import Node, fork_p, join_p
from xform.passes.dce import live
from xform.planner.cuts.bottleneck import bottlenecks, roots_of
from xform.planner.cuts.integer_program import MOST, IntegerProgram, Solution, size
from xform.planner.plan.decision import Decision
from xform.program.fingerprint import lines
from xform.storage.bounded_cache import BoundedCache

# How many solutions are computed for each class of blocks, beside the two ends.
_POINTS = 16
# A price of a FLOP in bytes, so high that everything useful is saved.
_HIGHEST_PRICE = 16.0
_GAP = 1e-4


def choose(top: Schedule, budget: int) -> Decision | None:
    """Return a decision within `budget` bytes that recomputes little work.

    Returns None if a block is too large for the integer program, or if no combination fits. The
    classes and their solutions are cached on the Schedule, for other budgets.
    """
    if "blocks" not in top.cache:
        equal = equal_blocks(top)
        small = all(size(same[0]) <= MOST for same in equal)
        top.cache["blocks"] = equal, [block_solutions(same[0]) for same in equal] if small else [[]]
    equal, fronts = top.cache["blocks"]
    counts = _counts(fronts, [len(same) for same in equal], budget) if all(fronts) else None
    if counts is None:
        return None
    saved: set[Var] = set()
    inner: dict[Node, tuple[Decision, ...]] = {}
    for same, points, numbers in zip(equal, fronts, counts, strict=True):
        chosen = [p.decision for p, n in zip(points, numbers, strict=True) for _ in range(n)]
        for block, decision in zip(same, chosen, strict=True):
            own = _transfer(decision, same[0].joint, block.joint)
            saved |= own.saved
            inner |= own.inner
    return Decision(frozenset(saved), inner)


def equal_blocks(top: Schedule) -> list[list[Schedule]]:
    """Return the blocks of a Schedule, each as a Schedule of its own, grouped into equal ones."""
    alike: dict[Any, list[Schedule]] = {}
    for block in _blocks(top):
        joint = block.joint
        names: dict[Any, str] = {}
        text = (
            *lines((*joint.forward, *joint.backward), names),
            *map(names.get, joint.backward_outputs),
        )
        alike.setdefault(text, []).append(block)
    return list(alike.values())


def block_solutions(block: Schedule) -> list[Solution]:
    """Return the Pareto front of one block, from the fewest bytes to the least work.

    It first computes the two ends. Each further point is searched between the two neighbours that
    enclose the largest area of bytes x work. The list is empty if an end was not found.
    """
    problem = IntegerProgram(block)
    least, high = problem.solve_at_price(0.0), problem.solve_at_price(_HIGHEST_PRICE)
    if least is None or high is None:
        return []
    low = problem.solve(least.bytes) or least
    points = {p.bytes: p for p in (low, high)}
    # Pairs of neighbours (a, start, b): no solution of at most `start` bytes is better than a.
    gaps = [(low, low.bytes, high)]
    for _ in range(_POINTS):
        a, start, b = gap = max(gaps, key=lambda g: (g[2].bytes - g[1]) * (g[0].price - g[2].price))
        if b.bytes - start < 2 or a.price <= b.price:
            break
        gaps.remove(gap)
        middle = (start + b.bytes) // 2
        point = problem.solve(middle)
        if point is None or point.price >= a.price:
            gaps.append((a, middle, b))
            continue
        points[point.bytes] = point
        gaps += [(a, start, point), (point, middle, b)]
    return [points[n] for n in sorted(points)]


def _counts(fronts: Sequence[Sequence[Solution]], numbers: Sequence[int], budget: int
            ) -> list[list[int]] | None:  # fmt: skip
    """How many blocks of each class use each point of its front, for the least total work.

    None if no combination is within the budget.
    """
    points = [p for points in fronts for p in points]
    of = np.repeat(np.arange(len(fronts)), [len(points) for points in fronts])
    sizes, prices = (np.array([getattr(p, k) for p in points], float) for k in ("bytes", "price"))
    scale = max(sizes.max(initial=0), 1.0)
    each = (of == np.arange(len(fronts))[:, None]).astype(float)
    class_sizes: Any = np.asarray(numbers)
    optimize = scipy.optimize
    solution = optimize.milp(
        prices / max(prices.max(initial=0), 1.0),
        integrality=np.ones(len(points)),
        bounds=optimize.Bounds(0, class_sizes[of]),
        constraints=[
            optimize.LinearConstraint(each, class_sizes, class_sizes),
            optimize.LinearConstraint(sizes[None] / scale, -np.inf, budget / scale),
        ],
        options={"node_limit": 2_000, "mip_rel_gap": _GAP},
    )
    if solution.x is None:
        return None
    counts = np.rint(solution.x).astype(int)
    return [[int(n) for n in counts[of == k]] for k in range(len(fronts))]


def _blocks(top: Schedule) -> list[Schedule]:
    """The blocks of a Schedule, in program order.

    A block is a set of equations that are connected through values that do not cross a narrow
    place. Values that are cheaply computed from inputs are left out: no block would save them.
    """
    joint, roots = top.joint, roots_of(top.joint)
    crossing = frozenset[Var]().union(*bottlenecks(joint))
    plain = [v for e in joint.backward if e.primitive is not join_p for v in reads_of(e, top.inner)]
    plain += [v for v in joint.backward_outputs if isinstance(v, Var)]
    nested = [v for e in joint.backward if e.primitive is join_p for v in reads_of(e, top.inner)]
    ends = {joint.named_copy.get(v, v) for v in plain}
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
    """Some equations as a Schedule of their own. The values from outside are available to it."""
    nodes = [e.params["node"] for e in part if e.primitive is fork_p]
    joint = dataclasses.replace(
        top.joint,
        inputs=(),
        forward=tuple(part),
        backward=tuple(joins[n] for n in nodes if n in joins),
        backward_outputs=tuple(v for e in part for v in e.outvars if v in ends),
    )
    inner = {n: top.inner[n] for n in nodes}
    return dataclasses.replace(
        top, joint=joint, inner=inner, saved=(), reads=(), cache=BoundedCache()
    )


def _transfer(decision: Decision, one: Joint, other: Joint) -> Decision:
    """The decisions for one Joint, transferred to another Joint with the same text."""
    if one is other:
        return decision
    pairs = list(zip(one.forward, other.forward, strict=True))
    match = {v: u for a, b in pairs for v, u in zip(a.outvars, b.outvars, strict=True)}
    nodes = {a.params["node"]: b.params["node"] for a, b in pairs if a.primitive is fork_p}
    inner = {
        nodes[n]: tuple(map(_transfer, decisions, n.joints, nodes[n].joints))
        for n, decisions in decision.inner.items()
    }
    return Decision(frozenset(match[v] for v in decision.saved), inner)
