"""The loops of a program that are worth a change, where a plan meets them."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterator, Mapping

from xform.interpret.joint import Schedule
from xform.interpret.node import Node
from xform.ir import Program
from xform.planner.costs.held import held_bytes, token
from xform.planner.costs.outcome import kept_bytes, waiting_bytes
from xform.planner.loops import Shapes, inside, loops, origins, reshaped
from xform.planner.problem import Problem
from xform.policies import MinCut

# The part of all that waits that makes a loop worth a change.
_PART = 0.05
# Of a loop of fewer trips nothing is gained.
_TRIPS = 4


@dataclasses.dataclass(frozen=True)
class PlannedLoop:
    """A loop where a Schedule meets it.

    Attributes:
      node, plans: the loop, and the Schedule of its body.
      runs: how often it is run, in the trips of loops around it.
      inner: whether a loop or a remat region is around it, so that what it keeps lasts as long as
        one trip, or the region's way back, does.
    """

    node: Node
    schedules: tuple[Schedule, ...]
    runs: int = 1
    inner: bool = False


def planned_loops(current: Schedule, prog: Program) -> dict[int, PlannedLoop]:
    """The loops of a Schedule's program, by their place, as far as they carry a derivative."""
    places: dict[int, list[int]] = {}
    for i, eqn in enumerate(loops(prog)):
        places.setdefault(id(eqn), []).append(i)
    met: dict[int, PlannedLoop] = {}
    for loop in _visit(current, 1, False) if places else ():
        free = (i for i in places.get(id(loop.node.eqn), ()) if i not in met)
        if (place := next(free, None)) is not None:
            met[place] = loop
    return met


def _visit(current: Schedule, runs: int, inner: bool) -> Iterator[PlannedLoop]:
    for node, schedules in current.inner.items():
        if node.loop:
            yield PlannedLoop(node, schedules, runs, inner)
        for p in schedules:
            yield from _visit(p, runs * node.trips, inner or node.loop or node.region)


def large(loops: dict[int, PlannedLoop], whole: int) -> dict[int, PlannedLoop]:
    """Those of some loops that keep much of a `whole`."""
    return {
        place: loop
        for place, loop in loops.items()
        if loop.node.trips >= _TRIPS
        and held_bytes(token(loop.node, loop.schedules)) > _PART * whole
    }


def large_loops(problem: Problem) -> dict[int, PlannedLoop]:
    """The loops that keep much of all that a program does, by their place."""
    most = problem.schedule(MinCut())
    met = planned_loops(most, problem.program)
    outer = {i: loop for i, loop in met.items() if not loop.inner}
    return large(outer, kept_bytes(most))


def inner_loops(problem: Problem) -> dict[int, PlannedLoop]:
    """The loops inside other loops, or remat regions, that keep much while those go back."""
    met = planned_loops(problem.schedule(MinCut()), problem.program)
    inner = {i: loop for i, loop in met.items() if loop.inner}
    return large(inner, waiting_bytes(problem.schedule(MinCut(0.0, 0.0)))) if inner else {}


def nodes(some: Mapping[int, PlannedLoop]) -> dict[int, Node]:
    """Some loops alone."""
    return {i: loop.node for i, loop in some.items()}


def loops_around(prog: Program, outer: Mapping[int, Node], inner: Mapping[int, Node]
                 ) -> dict[int, Node]:  # fmt: skip
    """Those of the outer loops of a program in which some inner ones stand."""
    return {i: n for i, n in outer.items() if not inner.keys().isdisjoint(inside(prog, i))}


def at_places(
    current: Schedule, prog: Program, shapes: Shapes, places: Container[int]
) -> list[Node]:
    """The outermost loops at some places, in the Schedule of a program in other shapes."""
    origin = origins(prog, shapes)
    met = planned_loops(current, reshaped(prog, shapes))
    return [
        loop.node
        for at, loop in met.items()
        if at < len(origin) and origin[at][0] in places and not origin[at][2]
    ]
