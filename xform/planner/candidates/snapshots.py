"""Plans whose loops store only some of their states (carries) and recompute the other states.

The backward pass takes one step of the loop at a time, or one chunk of steps. Inside a chunk, a
minimum cut decides what is saved. A loop is divided into chunks by nesting it: each outer iteration
is a chunk. `interpret/checkpoints.py` chooses which states are stored, and the order of
recomputation.

A *Schedule* says which values of a program are saved for its backward pass. A loop is a *node* of
it, whose body has a Schedule of its own. A `Decision` is the saved values alone, without the order
of the equations.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping

from xform.interpret.joint import Schedule
from xform.interpret.node import Node
from xform.planner.candidate import Candidate
from xform.planner.candidates.large_loops import (
    inner_loops,
    keep_large,
    large_loops,
    loop_nodes,
    loops_around,
    planned_loops,
    reshaped_nodes,
)
from xform.planner.candidates.states import Change, all_states
from xform.planner.costs.outcome import saved_bytes
from xform.planner.decide import schedule
from xform.planner.loops import Shapes, reshape_loops
from xform.planner.plan.decision import Decision, decision_of, edit_decision
from xform.planner.problem import Problem
from xform.planner.shape import Shape
from xform.policies import MinCut

# The lengths of the chunks, in steps.
_CHUNKS = (1, 4, 16)
# Each candidate stores this fraction of the states that the one before stores.
_SLOT_RATIO = 0.8

# How many states each loop stores.
Slots = Mapping[Node, int]


def snapshot_candidates(problem: Problem) -> list[Iterator[Candidate]]:
    """Return several series of candidates whose large loops store fewer and fewer states.

    A loop is large if it saves a large share of the program's saved bytes. Each series is in the
    order of recomputed FLOPs.
    """
    return [*_outermost(problem), *_inside(problem)]


def _outermost(problem: Problem) -> Iterator[Iterator[Candidate]]:
    """Yield the series for loops that are not inside other loops or remat regions."""
    large_nodes = loop_nodes(large_loops(problem))
    for shapes, policy in _chunked_shapes(large_nodes):
        base = problem.schedule(policy, shapes)
        planned = planned_loops(base, reshape_loops(problem.program, shapes))
        outer = {i: loop for i, loop in planned.items() if not loop.inner}
        loops = loop_nodes(keep_large(outer, saved_bytes(base))).values()
        decide = lambda slots, base=base: edit_decision(base, _store_states(slots))
        yield _decreasing_slots(problem, loops, shapes, decide)


def _inside(problem: Problem) -> Iterator[Iterator[Candidate]]:
    """Yield the series for loops inside other loops or remat regions.

    In one series only these loops store fewer states, in another the large loops around them too.
    """
    prog, inner = problem.program, loop_nodes(inner_loops(problem))
    around = loops_around(prog, loop_nodes(large_loops(problem)), inner)
    for shapes, policy in _chunked_shapes(inner):
        base = problem.schedule(MinCut(), shapes)
        decide = lambda slots, base=base, p=policy: edit_decision(base, all_states(p, slots))
        for indices in (inner, {**inner, **around}) if around else (inner,):
            loops = reshaped_nodes(base, prog, shapes, indices)
            yield _decreasing_slots(problem, loops, shapes, decide)


def _chunked_shapes(loops_by_index: Mapping[int, Node]) -> Iterator[tuple[Shapes, MinCut]]:
    """Yield shapes that divide the loops into chunks, each with the policy inside a chunk."""
    for chunk in _CHUNKS if loops_by_index else ():
        divided = loops_by_index.items() if chunk > 1 else ()
        shapes = {i: _chunked_shape(node.iterations, chunk) for i, node in divided}
        if not all(shapes.values()):
            return
        for policy in (MinCut(), MinCut(0.0, 0.0)):
            yield shapes, policy


def _decreasing_slots(
    problem: Problem, loops: Iterable[Node], shapes: Shapes, decide: Callable[[Slots], Decision]
) -> Iterator[Candidate]:
    """Yield candidates whose `loops` store fewer and fewer states.

    `shapes` says which loops are nested. `decide` returns the decisions of the program, given how
    many states each loop stores.
    """
    loops = [node for node in loops if not node.eqn.effects]
    longest = max((n.iterations for n in loops), default=0)
    # Storing all states but one gains nothing over the loop as written.
    max_slots = longest - 2
    while max_slots > 0:
        slots = {n: max(1, math.floor(max_slots / longest * n.iterations)) for n in loops}
        yield problem.candidate(decide(slots), shapes)
        max_slots = min(max_slots - 1, int(_SLOT_RATIO * max_slots))


def _chunked_shape(length: int, chunk: int) -> Shape:
    """Return the shape of a loop in chunks of `chunk` steps; () if there are fewer than four."""
    n_chunks, rest = divmod(length, chunk)
    return ((n_chunks, chunk), *([(rest,)] if rest else ())) if n_chunks >= 4 else ()


def _store_states(slots: Slots) -> Change:
    """Return a change for `edit_decision`: each loop in `slots` stores that many states.

    A chunked loop saves, inside a chunk, the values that it saved before. A loop without chunks
    saves all values that the backward pass of a step reads, for one step at a time.
    """

    def change(node: Node, current: Schedule) -> Decision | None:
        if node not in slots:
            return None
        has_chunks = any(n.loop for n in current.inner)
        decision = decision_of(current if has_chunks else schedule(current.joint))
        return dataclasses.replace(decision, snapshots=slots[node])

    return change
