"""Find the loops of a program that save enough for a split, a nesting or stored states to pay."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterator, Mapping

from xform.interpret.joint import Schedule
from xform.interpret.node import Node
from xform.planner.costs.outcome import residual_bytes, saved_bytes
from xform.planner.costs.saved_values import device_bytes, expand_token
from xform.planner.loops import Shapes, loop_origins, loops, loops_inside, reshape_loops
from xform.planner.problem import Problem
from xform.policies import MinCut
from xform.program.ir import Program

# A loop is large if it saves more than this share of all saved bytes.
_MIN_SHARE = 0.05
# Changing a loop with fewer iterations gains nothing.
_MIN_TRIPS = 4


@dataclasses.dataclass(frozen=True)
class PlannedLoop:
    """A loop and its Schedule.

    Attributes:
      node: the loop.
      schedules: the Schedule of its body, in a tuple.
      runs: how often the loop runs, in all iterations of the loops around it.
      inner: whether it is inside another loop or a remat region. If so, its saved values are held
        for one iteration of that loop, or for the backward pass of that region.
    """

    node: Node
    schedules: tuple[Schedule, ...]
    runs: int = 1
    inner: bool = False


def planned_loops(current: Schedule, prog: Program) -> dict[int, PlannedLoop]:
    """The loops of a Schedule that carry a derivative, by their index in `loops(prog)`."""
    places: dict[int, list[int]] = {}
    for i, eqn in enumerate(loops(prog)):
        places.setdefault(id(eqn), []).append(i)
    planned: dict[int, PlannedLoop] = {}
    for loop in _visit(current, 1, False) if places else ():
        unclaimed = (i for i in places.get(id(loop.node.eqn), ()) if i not in planned)
        if (place := next(unclaimed, None)) is not None:
            planned[place] = loop
    return planned


def _visit(current: Schedule, runs: int, inner: bool) -> Iterator[PlannedLoop]:
    for node, schedules in current.inner.items():
        if node.loop:
            yield PlannedLoop(node, schedules, runs, inner)
        for p in schedules:
            yield from _visit(p, runs * node.iterations, inner or node.loop or node.region)


def keep_large(loops: dict[int, PlannedLoop], total_bytes: int) -> dict[int, PlannedLoop]:
    """Keep the loops that save a large share of `total_bytes` and have enough iterations."""
    return {
        place: loop
        for place, loop in loops.items()
        if loop.node.iterations >= _MIN_TRIPS
        and device_bytes(expand_token(loop.node, loop.schedules)) > _MIN_SHARE * total_bytes
    }


def large_loops(problem: Problem) -> dict[int, PlannedLoop]:
    """The outermost loops that save a large share of the program's saved bytes, by index."""
    save_most = problem.schedule(MinCut())
    planned = planned_loops(save_most, problem.program)
    outer = {i: loop for i, loop in planned.items() if not loop.inner}
    return keep_large(outer, saved_bytes(save_most))


def inner_loops(problem: Problem) -> dict[int, PlannedLoop]:
    """The loops inside other loops or regions that save a large share, by index.

    The share is of the bytes that the plan with the fewest saved bytes holds.
    """
    planned = planned_loops(problem.schedule(MinCut()), problem.program)
    inner = {i: loop for i, loop in planned.items() if loop.inner}
    return keep_large(inner, residual_bytes(problem.schedule(MinCut(0.0, 0.0)))) if inner else {}


def loop_nodes(planned: Mapping[int, PlannedLoop]) -> dict[int, Node]:
    """The nodes of the loops, by index."""
    return {i: loop.node for i, loop in planned.items()}


def loops_around(prog: Program, outer: Mapping[int, Node], inner: Mapping[int, Node]
                 ) -> dict[int, Node]:  # fmt: skip
    """Keep the outer loops that contain one of the inner loops."""
    return {i: n for i, n in outer.items() if not inner.keys().isdisjoint(loops_inside(prog, i))}


def nodes_at(
    current: Schedule, prog: Program, shapes: Shapes, places: Container[int]
) -> list[Node]:
    """The nodes for some loops in the Schedule of a reshaped program.

    `places` are indices in the original program. Of a nested loop, the outermost level is returned.
    """
    origin_of = loop_origins(prog, shapes)
    planned = planned_loops(current, reshape_loops(prog, shapes))
    return [
        loop.node
        for index, loop in planned.items()
        if index < len(origin_of) and origin_of[index][0] in places and not origin_of[index][2]
    ]
