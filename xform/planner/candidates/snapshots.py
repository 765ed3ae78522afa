"""Loops that store some of their states, at the best places, and are run again from those.

Between two stored states are single steps, or chunks of steps within which a minimum cut says what
is kept. `interpret/checkpoints.py` says which states, and in what order they are run again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping

from xform.interpret.joint import Plan, analyze
from xform.interpret.node import Node
from xform.ir import Mask, Program
from xform.planner.candidates.states import Change, all_states
from xform.planner.candidates.whole import Shapes, Whole
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
from xform.planner.decide import plan
from xform.planner.loops import reshaped
from xform.planner.plan.choice import Choice, choice_of, edited
from xform.planner.shape import Shape
from xform.policies import MinCut

# Steps between stored states that are gone back over together.
_CHUNKS = (1, 4, 16)
# How many states are stored: each number is this part of the one before.
_FALL = 0.8

Slots = Mapping[Node, int]


def stored(prog: Program, active: Mask, wanted: Mask) -> list[Iterator[Whole]]:
    """Plans whose large loops store ever fewer states: for each way one series, by rising work."""
    return [*_flat(prog, active, wanted), *_inside(prog, active, wanted)]


def _flat(prog: Program, active: Mask, wanted: Mask) -> Iterator[Iterator[Whole]]:
    """Those of loops that nothing is around."""
    large_nodes = nodes(large_loops(prog, active, wanted))
    for shapes, way in _ways(large_nodes):
        folded = reshaped(prog, shapes)
        base = plan(analyze(folded, active, wanted), way, top=True)
        outer = {i: loop for i, loop in planned_loops(base, folded).items() if not loop.inner}
        loops = nodes(large(outer, kept_bytes(base))).values()
        yield _fewer(base, loops, shapes, lambda slots, base=base: edited(base, _storing(slots)))


def _inside(prog: Program, active: Mask, wanted: Mask) -> Iterator[Iterator[Whole]]:
    """Those of loops inside others, or inside regions; and of both."""
    ends = prog, active, wanted
    inner = nodes(inner_loops(*ends))
    around = loops_around(prog, nodes(large_loops(*ends)), inner)
    for shapes, way in _ways(inner):
        folded = reshaped(prog, shapes)
        base = plan(analyze(folded, active, wanted), MinCut(), top=True)
        choice = lambda slots, base=base, way=way: edited(base, all_states(way, slots))
        for places in (inner, {**inner, **around}) if around else (inner,):
            loops = at_places(base, prog, shapes, places)
            yield _fewer(base, loops, shapes, choice)


def _ways(some: Mapping[int, Node]) -> Iterator[tuple[Shapes, MinCut]]:
    """Shapes of some loops, of which chunks of steps are gone back over together."""
    for chunk in _CHUNKS if some else ():
        shapes = {i: _chunks(node.trips, chunk) for i, node in some.items() if chunk > 1}
        if not all(shapes.values()):
            return
        for way in (MinCut(), MinCut(0.0, 0.0)):
            yield shapes, way


def _fewer(base: Plan, loops: Iterable[Node], shapes: Shapes, choice: Callable[[Slots], Choice]
           ) -> Iterator[Whole]:  # fmt: skip
    """A Plan, but that some loops store states: ever fewer of them."""
    loops = [node for node in loops if not node.eqn.effects]
    longest = max((n.trips for n in loops), default=0)
    # With a state for each trip but one, nothing is gained over the loop as it is.
    most = longest - 2
    while most > 0:
        slots = {n: max(1, math.floor(most / longest * n.trips)) for n in loops}
        yield Whole(plan(base.joint, choice(slots), True), shapes)
        most = min(most - 1, int(_FALL * most))


def _chunks(length: int, chunk: int) -> Shape:
    """The shape of a loop in chunks of so many steps; none if they are few."""
    outer, rest = divmod(length, chunk)
    return ((outer, chunk), *([(rest,)] if rest else ())) if outer >= 4 else ()


def _storing(slots: Slots) -> Change:
    """The change by which some loops store so many states."""

    def change(node: Node, current: Plan) -> Choice | None:
        if node not in slots:
            return None
        chunks = any(n.loop for n in current.inner)
        choice = choice_of(current if chunks else plan(current.joint))
        return dataclasses.replace(choice, snapshots=slots[node])

    return change
