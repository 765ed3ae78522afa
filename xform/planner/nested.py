"""Loops of loops: the outer one keeps its states, the inner one is run again in each trip.

So a budget is met that a loop's states alone exceed, or that would have its whole body run again:
the inner loop keeps, for one trip of the outer one, what a minimum cut says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from xform.cost import aval_bytes
from xform.interpret.joint import Plan, analyze
from xform.interpret.node import Node, gather
from xform.ir import Mask, Program
from xform.planner.choice import Choice, choice_of
from xform.planner.held import held_bytes, token
from xform.planner.loops import Shape, fold, reshaped
from xform.planner.saved import plan
from xform.planner.whole import Whole, large_loops
from xform.policies import MinCut

# How many levels of outer trips are tried.
_DEPTHS = (1, 2, 3)


def nested(prog: Program, active: Mask, wanted: Mask) -> Iterator[Whole]:
    """Plans with the large loops of a program as loops of loops, of several sizes."""
    flat, large = large_loops(prog, active, wanted)
    for depth in _DEPTHS if large else ():
        for inner in (MinCut(), MinCut(0.0, 0.0)):
            shapes = {i: _shape(node, inner, depth) for i, node in large.items()}
            joint = analyze(reshaped(flat, shapes), active, wanted)
            found = plan(joint, _outer_states(plan(joint, inner, top=True)), True)
            yield Whole(found, shapes)


def _shape(node: Node, inner: MinCut, depth: int) -> Shape:
    """The shape of a loop that keeps least, where a minimum cut says what each step keeps."""
    (joint,) = node.joints
    plans = (plan(joint, inner),)
    inputs = zip(node.copies(plans), joint.inputs, strict=True)
    state = sum(n * aval_bytes(v.aval) for n, v in inputs) // node.trips
    step = held_bytes(token(node, plans)) // node.trips
    return fold(node.trips, depth, state, step)[0]


def _outer_states(how: Plan) -> Choice:
    """The decisions of a Plan, but that loops of loops keep their outer states alone."""
    inner = {node: _nest(node, plans) for node, plans in how.inner.items()}
    return dataclasses.replace(choice_of(how), inner=inner)


def _nest(node: Node, plans: tuple[Plan, ...]) -> tuple[Choice, ...]:
    if not (node.loop and len(plans) == 1 and any(n.loop for n in plans[0].inner)):
        return tuple(map(choice_of, plans))
    (plan,) = plans
    once = frozenset(gather(plan.kept, node.hoisted(plan)))
    inner = {n: _nest(n, ps) for n, ps in plan.inner.items()}
    return (Choice(once, inner),)
