"""Choose the saved values of a large program: solve each distinct block, combine the solutions.

A *Joint* is the forward and the backward pass of a program as one program. A *Schedule* says which
forward values of a Joint are saved. A loop, branch or call in a Joint is a *node*. Its equation is
`fork_p` in the forward pass, `join_p` in the backward pass.

A place in the forward pass is narrow if few bytes cross it (`bottleneck.py`). The narrow places cut
the forward pass into blocks. A value that crosses a narrow place counts as needed: the block that
computes it either saves it or recomputes it. Then the decisions of one block do not change the work
of another, and bytes and work add up over blocks.

A block is written as text: its equations with numbered variables, and which of its values are read
after it. Blocks with the same text are equal and form a class, as the layers of a model do. Each
class is solved with `integer_program.py` at several budgets. A second integer program then chooses
how many blocks of each class use which solution.

Cost: linear in the number of equations, plus the solutions of each class. 96 equal layers cost as
much as one.
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
from xform.planner.cuts.integer_program import (
    MAX_EQUATIONS,
    IntegerProgram,
    Solution,
    equation_count,
)
from xform.planner.plan.decision import Decision
from xform.program.dimensions import SampledCache
from xform.program.fingerprint import lines

# How many solutions are computed for each class of blocks, between the one of the fewest bytes and
# the one of the least work.
_POINTS = 16
# A price of a FLOP in bytes, so high that everything useful is saved.
_HIGHEST_PRICE = 16.0
# A combination of solutions is accepted if it is optimal up to this fraction of the work.
_GAP = 1e-4


def decide_by_blocks(top: Schedule, budget: int) -> Decision | None:
    """Return a decision that saves at most `budget` bytes and recomputes little work.

    `top` is a Schedule of the whole derivative. The result is None if a block is too large for the
    integer program, or if no combination fits. The classes and their solutions are cached on the
    Schedule, for other budgets.
    """
    if "blocks" not in top.cache:
        classes = equal_blocks(top)
        solvable = all(equation_count(blocks[0]) <= MAX_EQUATIONS for blocks in classes)
        solutions = [block_solutions(blocks[0]) for blocks in classes] if solvable else [[]]
        top.cache["blocks"] = classes, solutions
    classes, fronts = top.cache["blocks"]
    counts = _counts(fronts, [len(blocks) for blocks in classes], budget) if all(fronts) else None
    if counts is None:
        return None
    saved: set[Var] = set()
    inner: dict[Node, tuple[Decision, ...]] = {}
    for blocks, front, numbers in zip(classes, fronts, counts, strict=True):
        chosen = [s.decision for s, n in zip(front, numbers, strict=True) for _ in range(n)]
        for block, decision in zip(blocks, chosen, strict=True):
            transferred = _transfer(decision, blocks[0].joint, block.joint)
            saved |= transferred.saved
            inner |= transferred.inner
    return Decision(frozenset(saved), inner)


def equal_blocks(top: Schedule) -> list[list[Schedule]]:
    """Return the blocks of a Schedule, each as a Schedule of its own, grouped into equal ones."""
    classes: dict[Any, list[Schedule]] = {}
    for block in _blocks(top):
        joint = block.joint
        names: dict[Any, str] = {}
        text = (
            *lines((*joint.forward, *joint.backward), names),
            *map(names.get, joint.backward_outputs),
        )
        classes.setdefault(text, []).append(block)
    return list(classes.values())


def block_solutions(block: Schedule) -> list[Solution]:
    """Return the Pareto front of one block, from the fewest bytes to the least work.

    The solutions of the fewest bytes and of the least work are computed first. Each further
    solution is searched between the two neighbours that enclose the largest area of bytes x work.
    The list is empty if one of the first two is not found.
    """
    program = IntegerProgram(block)
    fewest, largest = program.solve_at_price(0.0), program.solve_at_price(_HIGHEST_PRICE)
    if fewest is None or largest is None:
        return []
    smallest = program.solve(fewest.bytes) or fewest
    front = {solution.bytes: solution for solution in (smallest, largest)}
    # Two neighbours a and b, as (a, start, b): no solution of at most `start` bytes is better than
    # a.
    gaps = [(smallest, smallest.bytes, largest)]
    for _ in range(_POINTS):
        a, start, b = gap = max(gaps, key=lambda g: (g[2].bytes - g[1]) * (g[0].price - g[2].price))
        if b.bytes - start < 2 or a.price <= b.price:
            break
        gaps.remove(gap)
        middle = (start + b.bytes) // 2
        solution = program.solve(middle)
        if solution is None or solution.price >= a.price:
            gaps.append((a, middle, b))
            continue
        front[solution.bytes] = solution
        gaps += [(a, start, solution), (solution, middle, b)]
    return [front[n] for n in sorted(front)]


def _counts(fronts: Sequence[Sequence[Solution]], class_sizes: Sequence[int], budget: int
            ) -> list[list[int]] | None:  # fmt: skip
    """Return how many blocks of each class use each solution, for the least total work.

    `fronts` has the solutions of each class, `class_sizes` the number of its blocks. None: no
    combination is within the budget.
    """
    solutions = [s for front in fronts for s in front]
    class_of = np.repeat(np.arange(len(fronts)), [len(front) for front in fronts])
    sizes = np.array([s.bytes for s in solutions], float)
    prices = np.array([s.price for s in solutions], float)
    scale = max(sizes.max(initial=0), 1.0)
    in_class = (class_of == np.arange(len(fronts))[:, None]).astype(float)
    n_blocks: Any = np.asarray(class_sizes)
    optimize = scipy.optimize
    result = optimize.milp(
        prices / max(prices.max(initial=0), 1.0),
        integrality=np.ones(len(solutions)),
        bounds=optimize.Bounds(0, n_blocks[class_of]),
        constraints=[
            optimize.LinearConstraint(in_class, n_blocks, n_blocks),
            optimize.LinearConstraint(sizes[None] / scale, -np.inf, budget / scale),
        ],
        options={"node_limit": 2_000, "mip_rel_gap": _GAP},
    )
    if result.x is None:
        return None
    counts = np.rint(result.x).astype(int)
    return [[int(n) for n in counts[class_of == k]] for k in range(len(fronts))]


def _blocks(top: Schedule) -> list[Schedule]:
    """Return the blocks of a Schedule, in program order.

    A block is a set of equations that are connected through values that do not cross a narrow
    place. Values that are cheaply computed from inputs are left out: no block would save them.
    """
    joint, roots = top.joint, roots_of(top.joint)
    crossing = frozenset[Var]().union(*bottlenecks(joint))
    # The values that the backward pass reads: in equations of its own, and inside nodes.
    read = [v for e in joint.backward if e.primitive is not join_p for v in reads_of(e, top.inner)]
    read += [v for v in joint.backward_outputs if isinstance(v, Var)]
    node_joins = [e for e in joint.backward if e.primitive is join_p]
    read_by_nodes = [v for e in node_joins for v in reads_of(e, top.inner)]
    joins = {e.params["node"]: e for e in node_joins}
    needed = {joint.named_copy.get(v, v) for v in read}
    equations = [
        eqn
        for eqn in live(joint.forward, needed.union(read_by_nodes), effects=False)
        if any(v in roots and (roots[v] is v or roots[v] not in crossing) for v in eqn.outvars)
    ]
    producer = {v: i for i, eqn in enumerate(equations) for v in eqn.outvars}
    # Union-find: equations with the same leader are connected.
    leader = list(range(len(equations)))

    def leader_of(i: int) -> int:
        while leader[i] != i:
            leader[i] = i = leader[leader[i]]
        return i

    for i, eqn in enumerate(equations):
        for v in eqn.invars:
            if isinstance(v, Var) and v in producer and v not in crossing:
                a, b = leader_of(i), leader_of(producer[v])
                leader[max(a, b)] = min(a, b)
    parts: dict[int, list[JaxprEqn]] = {}
    for i, eqn in enumerate(equations):
        parts.setdefault(leader_of(i), []).append(eqn)
    return [_block(top, part, needed | crossing, joins) for part in parts.values()]


def _block(top: Schedule, part: list[JaxprEqn], needed: Iterable[Var], joins: dict[Node, JaxprEqn]
           ) -> Schedule:  # fmt: skip
    """Return some forward equations as a Schedule of their own.

    Its backward pass reads the `needed` values, and runs the backward pass of the loops, branches
    and calls among the equations: `joins` has the equation for each. All values from outside are
    available to it.
    """
    nodes = [e.params["node"] for e in part if e.primitive is fork_p]
    joint = dataclasses.replace(
        top.joint,
        inputs=(),
        forward=tuple(part),
        backward=tuple(joins[n] for n in nodes if n in joins),
        backward_outputs=tuple(v for e in part for v in e.outvars if v in needed),
    )
    inner = {n: top.inner[n] for n in nodes}
    return dataclasses.replace(
        top, joint=joint, inner=inner, saved=(), reads=(), cache=SampledCache()
    )


def _transfer(decision: Decision, one: Joint, other: Joint) -> Decision:
    """Return the decisions for the Joint `one`, transferred to `other`, which has the same text."""
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
