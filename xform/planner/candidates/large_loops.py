"""Find the loops that save so many bytes that a change of the loop can pay.

A plan may split a loop in two, nest it into loops of loops, or store only some of its states. A
*Schedule* says which values of a program are saved for its backward pass; a loop is a *node* of it,
and the loop's body has a Schedule of its own. The index of a loop is its position in the program
(`planner/loops.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterator, Mapping

from xform._jax.symbolic import is_symbolic
from xform.interpret.joint import Schedule
from xform.interpret.node import Node
from xform.interpret.repeat import node_obstacles
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
    """A loop of a Schedule.

    Attributes:
      node: the loop, with the forward and the backward pass of its body.
      schedules: the Schedule of its body, in a tuple.
      runs: how often the loop is started, by all iterations of the loops around it.
      inner: whether it is inside another loop or a remat region (a part that `jax.checkpoint`
        marks). If so, its saved values are held for one iteration of that loop, or for the backward
        pass of that region.
    """

    node: Node
    schedules: tuple[Schedule, ...]
    runs: int = 1
    inner: bool = False


def planned_loops(current: Schedule, prog: Program) -> dict[int, PlannedLoop]:
    """Return the loops of `prog` that carry a derivative, by index.

    Loops of symbolic length are left out: a plan cannot split or nest them. `current` is a Schedule
    of `prog`.
    """
    indices: dict[int, list[int]] = {}
    for i, eqn in enumerate(loops(prog)):
        if is_symbolic(eqn.params["length"]):
            continue
        indices.setdefault(id(eqn), []).append(i)
    planned: dict[int, PlannedLoop] = {}
    for loop in _visit(current, 1, False) if indices else ():
        # One equation may occur several times: take its first index that has no loop yet.
        free_indices = (i for i in indices.get(id(loop.node.eqn), ()) if i not in planned)
        if (index := next(free_indices, None)) is not None:
            planned[index] = loop
    return planned


def _visit(current: Schedule, runs: int, inner: bool) -> Iterator[PlannedLoop]:
    """Yield the loops of a Schedule that runs `runs` times, an outer loop before its inner ones."""
    for node, schedules in current.inner.items():
        if node.loop:
            yield PlannedLoop(node, schedules, runs, inner)
        for p in schedules:
            yield from _visit(p, runs * node.iterations, inner or node.loop or node.region)


def keep_large(loops: dict[int, PlannedLoop], total_bytes: int) -> dict[int, PlannedLoop]:
    """Keep the loops that save a large share of `total_bytes` and have enough iterations.

    Loops whose iterations must not run twice, such as those that draw random numbers without a key,
    are left out.
    """
    return {
        index: loop
        for index, loop in loops.items()
        if loop.node.iterations >= _MIN_TRIPS
        and device_bytes(expand_token(loop.node, loop.schedules)) > _MIN_SHARE * total_bytes
        and not node_obstacles(loop.node)
    }


def large_loops(problem: Problem) -> dict[int, PlannedLoop]:
    """Return the outermost loops that save a large share of the program's saved bytes, by index."""
    save_most = problem.schedule(MinCut())
    planned = planned_loops(save_most, problem.program)
    outer = {i: loop for i, loop in planned.items() if not loop.inner}
    return keep_large(outer, saved_bytes(save_most))


def inner_loops(problem: Problem) -> dict[int, PlannedLoop]:
    """Return the large loops inside other loops or remat regions, by index.

    Such a loop is large if it saves a large share of the bytes that the plan with the fewest saved
    bytes holds.
    """
    planned = planned_loops(problem.schedule(MinCut()), problem.program)
    inner = {i: loop for i, loop in planned.items() if loop.inner}
    return keep_large(inner, residual_bytes(problem.schedule(MinCut(0.0, 0.0)))) if inner else {}


def loop_nodes(planned: Mapping[int, PlannedLoop]) -> dict[int, Node]:
    """Return the nodes of the loops, by index."""
    return {i: loop.node for i, loop in planned.items()}


def loops_around(prog: Program, outer: Mapping[int, Node], inner: Mapping[int, Node]
                 ) -> dict[int, Node]:  # fmt: skip
    """Return the `outer` loops that contain an `inner` loop, by their index in `prog`."""
    return {i: n for i, n in outer.items() if not inner.keys().isdisjoint(loops_inside(prog, i))}


def reshaped_nodes(
    current: Schedule, prog: Program, shapes: Shapes, indices: Container[int]
) -> list[Node]:
    """Return the nodes of some loops of `prog` after loops of it were split or nested.

    `current` is a Schedule of the changed program, `shapes` are the changes, and `indices` are the
    indices of the loops in `prog`. For a nested loop, the node of the outermost level is returned.
    """
    origins = loop_origins(prog, shapes)
    planned = planned_loops(current, reshape_loops(prog, shapes))
    nodes: list[Node] = []
    for index, loop in planned.items():
        if index < len(origins):
            original, _, level = origins[index]
            if original in indices and level == 0:
                nodes.append(loop.node)
    return nodes
