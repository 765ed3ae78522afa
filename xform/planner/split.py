"""Loops as two in a row, of which the second keeps more: between two plans of one program.

What is made late is read early. So of two plans that keep little and much in each trip, the last
trips may do as the one does, and those before as the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from xform.errors import OtherProgram
from xform.interpret.joint import Plan, analyze
from xform.interpret.node import Node, fork_p
from xform.ir import Mask, Program
from xform.planner.choice import choice_of
from xform.planner.loops import loops, reshaped
from xform.planner.record import record
from xform.planner.saved import plan
from xform.planner.whole import Shapes, Whole, places
from xform.policies import MinCut

# In how many parts a loop's trips are counted.
_PARTS = 16


def split(prog: Program, active: Mask, wanted: Mask, above: Plan, below: Plan) -> Iterator[Whole]:
    """By rising work: each loop as two, the second of which keeps as `above` does."""
    flat = reshaped(prog, {})
    joint = analyze(flat, active, wanted)
    place = places(flat)
    nodes = [e.params["node"] for e in above.joint.first if e.primitive is fork_p]
    twins = [e.params["node"] for e in joint.first if e.primitive is fork_p]
    if len(nodes) != len(twins):
        return
    trips = {place[id(n.eqn)]: n.trips for n in twins if id(n.eqn) in place and n.trips > 1}
    parts = min(_PARTS, max(trips.values(), default=0))
    for part in reversed(range(1, parts)):
        late = {i: min(max(1, part * n // parts), n - 1) for i, n in trips.items()}
        shapes: Shapes = {i: ((n - late[i],), (late[i],)) for i, n in trips.items()}
        try:
            yield _mixed(flat, active, wanted, shapes, above, below)
        except OtherProgram:  # a body that traces otherwise, in a loop of another length
            return


def _mixed(flat: Program, active: Mask, wanted: Mask, shapes: Shapes, above: Plan, below: Plan
           ) -> Whole:  # fmt: skip
    """The plan of split loops: what `below` keeps in the first, what `above` does in the second."""
    prog = reshaped(flat, shapes)
    joint = analyze(prog, active, wanted)
    choice = choice_of(plan(joint, MinCut(), top=True))
    place = places(prog)
    # Of each loop of the new program: which loop it was, and whether it is the later part.
    origins = [(i, k > 0) for i, _ in enumerate(loops(flat)) for k in range(1 + (i in shapes))]
    sources = {late: _by_place(p, flat) for late, p in ((True, above), (False, below))}
    inner = dict(choice.inner)
    for node in choice.inner:
        if id(node.eqn) not in place:
            continue
        i, late = origins[place[id(node.eqn)]]
        kept = sources[late or i not in shapes].get(i)
        if kept is not None:
            (as_was,), (now,) = kept.joints, node.joints
            how = (above if late else below).inner[kept][0]
            inner[node] = (record(choice_of(how), as_was, {}).choice(now, "split"),)
    return Whole(plan(joint, dataclasses.replace(choice, inner=inner), True), shapes)


def _by_place(how: Plan, flat: Program) -> dict[int, Node]:
    """The loops of a plan's program, by their place."""
    found: dict[int, Node] = {}
    for node in how.inner:
        body = node.eqn.params.get("jaxpr")
        bodies = enumerate(eqn.params["jaxpr"] for eqn in loops(flat))
        i = next((i for i, jaxpr in bodies if i not in found and jaxpr is body), None)
        if node.loop and i is not None:
            found[i] = node
    return found
