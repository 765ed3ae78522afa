"""Loops that store some of their states, at the best places, and are run again from those.

Between two stored states are single steps, or chunks of steps within which a minimum cut says what
is kept. `interpret/checkpoints.py` says which states, and in what order they are run again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from xform.interpret.joint import Plan, analyze
from xform.interpret.node import Node
from xform.ir import Mask, Program
from xform.planner.choice import Choice, choice_of
from xform.planner.loops import Shape, reshaped
from xform.planner.saved import plan
from xform.planner.whole import Shapes, Whole, large, large_loops
from xform.policies import MinCut

# Steps between stored states that are gone back over together.
_CHUNKS = (1, 4, 16)
# How many states are stored: each number is this part of the one before.
_FALL = 0.8


def stored(prog: Program, active: Mask, wanted: Mask) -> list[Iterator[Whole]]:
    """Plans whose large loops store ever fewer states: for each way one series, by rising work."""
    flat, found = large_loops(prog, active, wanted)
    series: list[Iterator[Whole]] = []
    for chunk in _CHUNKS if found else ():
        shapes = {i: _chunks(node.trips, chunk) for i, node in found.items() if chunk > 1}
        if not all(shapes.values()):
            break
        folded = reshaped(flat, shapes)
        joint = analyze(folded, active, wanted)
        for policy in (MinCut(), MinCut(0.0, 0.0)):
            how = plan(joint, policy, top=True)
            loops = [n for n in large(how, folded).values() if not n.eqn.effects]
            series.append(_fewer(how, loops, shapes))
    return series


def _fewer(how: Plan, loops: Sequence[Node], shapes: Shapes) -> Iterator[Whole]:
    """A Plan, but that some loops store states: ever fewer of them."""
    longest = max((n.trips for n in loops), default=0)
    # With a state for each trip but one, nothing is gained over the loop as it is.
    most = longest - 2
    while most > 0:
        yield Whole(plan(how.joint, _with_slots(how, loops, most / longest), True), shapes)
        most = min(most - 1, int(_FALL * most))


def _chunks(length: int, chunk: int) -> Shape:
    """The shape of a loop in chunks of so many steps; none if they are few."""
    outer, rest = divmod(length, chunk)
    return ((outer, chunk), *([(rest,)] if rest else ())) if outer >= 4 else ()


def _with_slots(how: Plan, loops: Sequence[Node], share: float) -> Choice:
    """The decisions of a Plan, but that some loops store states in a share of their trips."""
    inner = dict(choice_of(how).inner)
    for node in loops:
        (plans,) = how.inner[node]
        chunks = any(n.loop for n in plans.inner)
        choice = choice_of(plans if chunks else plan(plans.joint))
        slots = max(1, math.floor(share * node.trips))
        inner[node] = (dataclasses.replace(choice, slots=slots),)
    return dataclasses.replace(choice_of(how), inner=inner)
