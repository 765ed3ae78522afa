"""Plans between two plans of a program: each loop is split in two, and the second part saves more.

Values that are computed late are read early, so they are live for a short time. Therefore the last
iterations follow the plan that saves more, and the first ones the plan that saves less. Loops
inside other loops or inside regions are not changed.
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

# A split is tried after each of so many equal parts of a loop.
_N_PARTS = 16


def split_candidates(problem: Problem, above: Schedule, below: Schedule) -> Iterator[Candidate]:
    """Yield candidates with split loops, in the order of their recomputed FLOPs.

    The second part of each loop saves what `above` saves, the first part what `below` saves.
    """
    planned = planned_loops(above, problem.program)
    trips = {
        i: n for i, loop in planned.items() if not loop.inner and (n := loop.node.iterations) > 1
    }
    parts = min(_N_PARTS, max(trips.values(), default=0))
    for part in reversed(range(1, parts)):
        late_trips = {i: min(max(1, part * n // parts), n - 1) for i, n in trips.items()}
        shapes: Shapes = {i: ((n - late_trips[i],), (late_trips[i],)) for i, n in trips.items()}
        try:
            yield _mixed_candidate(problem, shapes, above, below)
        except OtherProgram:  # the body traces differently in a loop of another length
            return


def _mixed_candidate(
    problem: Problem, shapes: Shapes, above: Schedule, below: Schedule
) -> Candidate:
    """The candidate whose loops follow `below` in their first part and `above` in the second."""
    prog, base = problem.program, problem.schedule(MinCut(), shapes)
    planned = [planned_loops(p, prog) for p in (below, above)]
    sources = [{i: loop.schedules for i, loop in loops.items()} for loops in planned]
    origin_of = loop_origins(prog, shapes)
    new_loops = planned_loops(base, reshape_loops(prog, shapes))
    parts = {loop.node: origin_of[i] for i, loop in new_loops.items() if not loop.inner}

    def as_planned(node: Node, current: Schedule) -> Decision | None:
        if node not in parts:
            return None
        i, later, _ = parts[node]
        schedules = sources[later or i not in shapes].get(i)
        if schedules is None:
            return None
        (original,) = schedules
        if original.joint is current.joint:
            return decision_of(original)
        return record(decision_of(original), original.joint, {}).decision(current.joint, "split")

    return problem.candidate(edit_decision(base, as_planned), shapes)
