"""A plan of a whole program, whose loops may have been taken apart for it."""

from __future__ import annotations

import dataclasses

from xform.interpret.joint import Plan, analyze
from xform.interpret.node import Node
from xform.ir import Mask, Program
from xform.planner.held import held_bytes, token
from xform.planner.loops import Shape, loops, reshaped
from xform.planner.outcome import again_flops, kept_bytes, sent_bytes
from xform.planner.saved import plan
from xform.policies import MinCut

# The part of all that is kept that makes a loop worth a change.
_PART = 0.05
# Of a loop of fewer trips nothing is gained.
_TRIPS = 4

Shapes = dict[int, Shape]


@dataclasses.dataclass(frozen=True)
class Whole:
    """A Plan of a program whose loops have some `shapes`."""

    how: Plan
    shapes: Shapes

    @property
    def work(self) -> tuple[int, int]:
        """What is run again, and then what is sent: by this plans are compared."""
        return again_flops(self.how), sent_bytes(self.how)


def places(prog: Program) -> dict[int, int]:
    """The place of each loop of a program, by its equation's `id`."""
    return {id(eqn): i for i, eqn in enumerate(loops(prog))}


def large(how: Plan, flat: Program) -> dict[int, Node]:
    """The loops of a program, by their place, that keep much of what its Plan does."""
    place = places(flat)
    return {
        place[id(node.eqn)]: node
        for node, plans in how.inner.items()
        if id(node.eqn) in place
        and node.trips >= _TRIPS
        and held_bytes(token(node, plans)) > _PART * kept_bytes(how)
    }


def large_loops(prog: Program, active: Mask, wanted: Mask) -> tuple[Program, dict[int, Node]]:
    """The program with calls that hold loops opened, and the loops that keep much of all."""
    flat = reshaped(prog, {})
    return flat, large(plan(analyze(flat, active, wanted), MinCut(), top=True), flat)
