"""Plans of whole programs: of their loops as they are, or as loops of loops where that serves.

A budget that a loop's states alone exceed, or that would have its whole body run again, is met by a
loop of loops (`loops`): the outer one keeps its states, the inner one is run again in each trip
and keeps, for that trip, what a minimum cut says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax

from xform.errors import BudgetInfeasible
from xform.interpret.joint import Plan, analyze
from xform.interpret.node import Node, fork_p, gather
from xform.ir import Mask, Program
from xform.planner.budget import again_flops, kept_bytes
from xform.planner.choice import Choice, choice_of
from xform.planner.cost import aval_bytes
from xform.planner.decided import Plan as Decided
from xform.planner.held import held_bytes, token
from xform.planner.loops import Shape, fold, loops, reshaped
from xform.planner.peak import liveness
from xform.planner.saved import plan
from xform.policies import Budget, MinCut, Policy, check

# The part of all that is kept that makes a loop worth a change.
_PART = 0.05
# How many levels of outer trips are tried.
_DEPTHS = (1, 2, 3)

Shapes = dict[int, Shape]
# Bytes of a Plan, as a budget counts them.
Measure = Callable[[Plan], float]


@dataclasses.dataclass(frozen=True)
class Whole:
    """A Plan of a program whose loops have some `shapes`."""

    how: Plan
    shapes: Shapes


def planned(prog: Program, active: Mask, wanted: Mask, policy: Policy) -> Whole:
    """The Plan of a whole program without constants, under a policy."""
    policy = check(policy)
    shapes = policy.shapes() if isinstance(policy, Decided) else {}
    joint = analyze(reshaped(prog, shapes) if shapes else prog, active, wanted)
    if not isinstance(policy, Budget):
        return Whole(plan(joint, policy, top=True), shapes)
    backend = jax.default_backend()
    key: Any = "whole", policy, backend
    if key not in joint.program.cache:
        peak = lambda how: liveness(how, backend).total_bytes
        measure = peak if policy.of == "peak" else waiting_bytes
        flat = lambda: Whole(plan(joint, policy, top=True), {})
        found = best(flat, nested(prog, active, wanted), measure, policy.bytes)
        joint.program.cache[key] = found
    return joint.program.cache[key]


def best(flat: Callable[[], Whole], others: Iterator[Whole], measure: Measure, most: float
         ) -> Whole:  # fmt: skip
    """The least work within `most`, of a plan of the loops as they are and of others."""
    error = None
    try:
        found = [flat()]
    except BudgetInfeasible as caught:
        found, error = [], caught
    if not found or again_flops(found[0].how):
        found += (w for w in others if measure(w.how) <= most)
    if not found:
        assert error is not None
        raise error
    return min(found, key=lambda w: again_flops(w.how))


def waiting_bytes(how: Plan) -> int:
    """Bytes that a Plan keeps, with what loops that are run again keep for their way back."""
    return kept_bytes(how) + _again_bytes(how)


def _again_bytes(how: Plan) -> int:
    kept = set(how.kept)
    most = 0
    for eqn in how.joint.first:
        if eqn.primitive is fork_p:
            node = eqn.params["node"]
            plans = how.inner[node]
            own = 0 if eqn.outvars[-1] in kept else held_bytes(token(node, plans))
            most = max(most, own + max(map(_again_bytes, plans), default=0))
    return most


def nested(prog: Program, active: Mask, wanted: Mask) -> Iterator[Whole]:
    """Plans with the large loops of a program as loops of loops, of several sizes."""
    if not loops(prog):
        return
    flat = reshaped(prog, {})
    how = plan(analyze(flat, active, wanted), MinCut(), top=True)
    place = {id(eqn): i for i, eqn in enumerate(loops(flat))}
    large = {
        place[id(node.eqn)]: node
        for node, plans in how.inner.items()
        if id(node.eqn) in place
        and held_bytes(token(node, plans)) > _PART * kept_bytes(how)
        and node.trips >= 4
    }
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
