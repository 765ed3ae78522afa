"""Make plans between two given plans: split loops in two parts, of which the second saves more.

The backward pass runs the iterations in reverse. So the values of the last iterations are live for
a short time. Therefore the last iterations follow the plan that saves more, and the first ones the
plan that saves less. Loops inside other loops or inside remat regions (the parts that
`jax.checkpoint` marks) are not changed.

A *Schedule* is a plan for a program as written: which values are saved for the backward pass, and
which equations are recomputed. A `Candidate` is a Schedule with changes to the loops.
"""

from __future__ import annotations

from collections.abc import Iterator

from xform.errors import OtherProgram
from xform.interpret.joint import Schedule
from xform.interpret.node import Node
from xform.planner.candidate import Candidate
from xform.planner.candidates.large_loops import planned_loops
from xform.planner.loops import Shapes, loop_origins, reshape_loops
from xform.planner.plan.decision import Decision, decision_of, edit_decision
from xform.planner.plan.record import record
from xform.planner.problem import Problem
from xform.policies import MinCut

# A loop is divided into this many equal parts, and a split is tried after each of them.
_N_PARTS = 16


def split_candidates(problem: Problem, above: Schedule, below: Schedule) -> Iterator[Candidate]:
    """Yield candidates with split loops, in the order of their recomputed FLOPs.

    The second part of each loop saves what `above` saves, the first part what `below` saves.
    `above` saves more than `below`.
    """
    planned = planned_loops(above, problem.program)
    trips = {
        i: n for i, loop in planned.items() if not loop.inner and (n := loop.node.iterations) > 1
    }
    n_parts = min(_N_PARTS, max(trips.values(), default=0))
    for part in reversed(range(1, n_parts)):
        late_trips = {i: min(max(1, part * n // n_parts), n - 1) for i, n in trips.items()}
        shapes: Shapes = {i: ((n - late_trips[i],), (late_trips[i],)) for i, n in trips.items()}
        try:
            yield _mixed_candidate(problem, shapes, above, below)
        except OtherProgram:  # the body traces differently in a loop of another length
            return


def _mixed_candidate(
    problem: Problem, shapes: Shapes, above: Schedule, below: Schedule
) -> Candidate:
    """Return the candidate whose loops follow `below` in the first part, `above` in the second.

    Loops that are not in `shapes` follow `above`.
    """
    prog, base = problem.program, problem.schedule(MinCut(), shapes)
    planned = [planned_loops(p, prog) for p in (below, above)]
    # The Schedules of the loop bodies by the loop's index, in `below` and in `above`.
    below_above = [{i: loop.schedules for i, loop in loops.items()} for loops in planned]
    origins = loop_origins(prog, shapes)
    new_loops = planned_loops(base, reshape_loops(prog, shapes))
    origin_of = {loop.node: origins[i] for i, loop in new_loops.items() if not loop.inner}

    def as_planned(node: Node, current: Schedule) -> Decision | None:
        if node not in origin_of:
            return None
        index, part, _ = origin_of[node]
        schedules = below_above[part or index not in shapes].get(index)
        if schedules is None:
            return None
        (original,) = schedules
        if original.joint is current.joint:
            return decision_of(original)
        return record(decision_of(original), original.joint, {}).decision(current.joint, "split")

    return problem.candidate(edit_decision(base, as_planned), shapes)
