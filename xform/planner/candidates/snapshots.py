"""Loops that store some of their states, at the best places, and are run again from those.

Between two stored states are single steps, or chunks of steps within which a minimum cut says what
is kept. `interpret/checkpoints.py` says which states, and in what order they are run again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping

from xform.interpret.joint import Schedule
from xform.interpret.node import Node
from xform.planner.candidate import Candidate
from xform.planner.candidates.states import Change, all_states
from xform.planner.candidates.worth import (
    at_places,
    inner_loops,
    large,
    large_loops,
    loops_around,
    nodes,
    planned_loops,
)
from xform.planner.costs.outcome import kept_bytes
from xform.planner.decide import schedule
from xform.planner.loops import Shapes, reshaped
from xform.planner.plan.decision import Decision, decision_of, edited
from xform.planner.problem import Problem
from xform.planner.shape import Shape
from xform.policies import MinCut

# Steps between stored states that are gone back over together.
_CHUNKS = (1, 4, 16)
# How many states are stored: each number is this part of the one before.
_FALL = 0.8

Slots = Mapping[Node, int]


def stored(problem: Problem) -> list[Iterator[Candidate]]:
    """Series of candidates whose large loops store ever fewer states, by rising work."""
    return [*_flat(problem), *_inside(problem)]


def _flat(problem: Problem) -> Iterator[Iterator[Candidate]]:
    """Those of loops that nothing is around."""
    large_nodes = nodes(large_loops(problem))
    for shapes, way in _ways(large_nodes):
        base = problem.schedule(way, shapes)
        met = planned_loops(base, reshaped(problem.program, shapes))
        outer = {i: loop for i, loop in met.items() if not loop.inner}
        loops = nodes(large(outer, kept_bytes(base))).values()
        decision = lambda slots, base=base: edited(base, _storing(slots))
        yield _fewer(problem, loops, shapes, decision)


def _inside(problem: Problem) -> Iterator[Iterator[Candidate]]:
    """Those of loops inside others, or inside regions; and of both."""
    prog, inner = problem.program, nodes(inner_loops(problem))
    around = loops_around(prog, nodes(large_loops(problem)), inner)
    for shapes, way in _ways(inner):
        base = problem.schedule(MinCut(), shapes)
        decision = lambda slots, base=base, way=way: edited(base, all_states(way, slots))
        for places in (inner, {**inner, **around}) if around else (inner,):
            loops = at_places(base, prog, shapes, places)
            yield _fewer(problem, loops, shapes, decision)


def _ways(some: Mapping[int, Node]) -> Iterator[tuple[Shapes, MinCut]]:
    """Shapes of some loops, of which chunks of steps are gone back over together."""
    for chunk in _CHUNKS if some else ():
        shapes = {i: _chunks(node.trips, chunk) for i, node in some.items() if chunk > 1}
        if not all(shapes.values()):
            return
        for way in (MinCut(), MinCut(0.0, 0.0)):
            yield shapes, way


def _fewer(problem: Problem, loops: Iterable[Node], shapes: Shapes,
           decision: Callable[[Slots], Decision]) -> Iterator[Candidate]:  # fmt: skip
    """A Schedule, but that some loops store states: ever fewer of them."""
    loops = [node for node in loops if not node.eqn.effects]
    longest = max((n.trips for n in loops), default=0)
    # With a state for each trip but one, nothing is gained over the loop as it is.
    most = longest - 2
    while most > 0:
        slots = {n: max(1, math.floor(most / longest * n.trips)) for n in loops}
        yield problem.candidate(decision(slots), shapes)
        most = min(most - 1, int(_FALL * most))


def _chunks(length: int, chunk: int) -> Shape:
    """The shape of a loop in chunks of so many steps; none if they are few."""
    outer, rest = divmod(length, chunk)
    return ((outer, chunk), *([(rest,)] if rest else ())) if outer >= 4 else ()


def _storing(slots: Slots) -> Change:
    """The change by which some loops store so many states."""

    def change(node: Node, current: Schedule) -> Decision | None:
        if node not in slots:
            return None
        chunks = any(n.loop for n in current.inner)
        decision = decision_of(current if chunks else schedule(current.joint))
        return dataclasses.replace(decision, snapshots=slots[node])

    return change
