"""Loops as two in a row, of which the second keeps more: between two plans of one program.

What is made late is read early. So of two plans that keep little and much in each trip, the last
trips may do as the one does, and those before as the other. Loops inside others, or inside regions,
stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator

from xform.errors import OtherProgram
from xform.interpret.joint import Schedule
from xform.interpret.node import Node
from xform.planner.candidate import Candidate
from xform.planner.candidates.worth import planned_loops
from xform.planner.loops import Shapes, origins, reshaped
from xform.planner.plan.decision import Decision, decision_of, edited
from xform.planner.plan.record import record
from xform.planner.problem import Problem
from xform.policies import MinCut

# In how many parts a loop's trips are counted.
_PARTS = 16


def split(problem: Problem, above: Schedule, below: Schedule) -> Iterator[Candidate]:
    """By rising work: each loop as two, the second of which keeps as `above` does."""
    met = planned_loops(above, problem.program)
    trips = {i: n for i, x in met.items() if not x.inner and (n := x.node.trips) > 1}
    parts = min(_PARTS, max(trips.values(), default=0))
    for part in reversed(range(1, parts)):
        late = {i: min(max(1, part * n // parts), n - 1) for i, n in trips.items()}
        shapes: Shapes = {i: ((n - late[i],), (late[i],)) for i, n in trips.items()}
        try:
            yield _mixed(problem, shapes, above, below)
        except OtherProgram:  # a body that traces otherwise, in a loop of another length
            return


def _mixed(problem: Problem, shapes: Shapes, above: Schedule, below: Schedule) -> Candidate:
    """The plan of split loops: what `below` keeps in the first, what `above` does in the second."""
    prog, most = problem.program, problem.schedule(MinCut(), shapes)
    apart = reshaped(prog, shapes)
    sources = [{i: x.schedules for i, x in planned_loops(p, prog).items()} for p in (below, above)]
    origin = origins(prog, shapes)
    parts = {x.node: origin[i] for i, x in planned_loops(most, apart).items() if not x.inner}

    def as_before(node: Node, now: Schedule) -> Decision | None:
        if node not in parts:
            return None
        i, later, _ = parts[node]
        kept = sources[later or i not in shapes].get(i)
        if kept is None:
            return None
        (was,) = kept
        if was.joint is now.joint:
            return decision_of(was)
        return record(decision_of(was), was.joint, {}).decision(now.joint, "split")

    return problem.candidate(edited(most, as_before), shapes)
