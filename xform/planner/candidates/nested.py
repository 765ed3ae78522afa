"""Loops of loops: the outer one keeps its states, the inner one is run again in each trip.

So a budget is met that a loop's states alone exceed, or that would have its whole body run again:
the inner loop keeps, for one trip of the outer one, what a minimum cut says. Where a program has
loops inside loops or remat regions, those are loops of loops too, and all that is around them keeps
its states alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from xform.cost import aval_bytes
from xform.interpret.joint import Schedule
from xform.interpret.node import Node
from xform.planner.candidate import Candidate
from xform.planner.candidates.states import all_states, outer_states
from xform.planner.candidates.worth import inner_loops, large_loops, loops_around, nodes
from xform.planner.costs.held import held_bytes, token
from xform.planner.decide import schedule
from xform.planner.loops import Shapes
from xform.planner.plan.decision import edited
from xform.planner.problem import Problem
from xform.planner.shape import Shape, fold
from xform.policies import MinCut

# How many levels of outer trips are tried.
_DEPTHS = (1, 2, 3)
# The same where loops inside others are taken apart.
_INNER_DEPTHS = (0, 1, 2)
# What the innermost loops keep: all but what fuses, or the least.
_WAYS = (MinCut(), MinCut(0.0, 0.0))


def nested(problem: Problem) -> Iterator[Candidate]:
    """Schedules with the large loops of a program as loops of loops, of several sizes."""
    outer = nodes(large_loops(problem))
    for depth, way in itertools.product(_DEPTHS, _WAYS) if outer else ():
        shapes = {i: _shape(node, way, depth) for i, node in outer.items()}
        base = problem.schedule(way, shapes)
        yield problem.candidate(edited(base, outer_states), shapes)
    inner = nodes(inner_loops(problem))
    around = loops_around(problem.program, outer, inner)
    for depth, way in itertools.product(_INNER_DEPTHS, _WAYS) if inner else ():
        shapes = {i: _shape(node, way, depth) for i, node in inner.items() if depth}
        yield _of_states(problem, shapes, way)
        if depth and around:
            shapes |= {i: _of_trips(node, depth) for i, node in around.items()}
            yield _of_states(problem, shapes, way)


def _shape(node: Node, inner: MinCut, depth: int) -> Shape:
    """The shape of a loop that keeps least, where a minimum cut says what each step keeps."""
    (joint,) = node.joints
    schedules = (schedule(joint, inner),)
    step = held_bytes(token(node, schedules)) // node.trips
    return fold(node.trips, depth, _state(node, schedules[0]), step)[0]


def _of_trips(node: Node, depth: int) -> Shape:
    """The same for a loop that keeps nothing but its states."""
    state = _state(node, schedule(node.joints[0], MinCut()))
    return fold(node.trips, depth, state, state)[0]


def _state(node: Node, inside: Schedule) -> int:
    """Bytes of what a loop hands on from trip to trip, as far as its way back reads it."""
    inputs = zip(node.copies((inside,)), inside.joint.inputs, strict=True)
    return sum(n * aval_bytes(v.aval) for n, v in inputs) // node.trips


def _of_states(problem: Problem, shapes: Shapes, way: MinCut) -> Candidate:
    """The plan of which all loops with loops inside keep states alone, the others as `way` says."""
    base = problem.schedule(MinCut(), shapes)
    return problem.candidate(edited(base, all_states(way, {})), shapes)
