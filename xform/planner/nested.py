"""Plans of whole programs: of their loops as they are, or as loops of loops where that serves.

A budget that a loop's states alone exceed, or that would have its whole body run again, is met by a
loop of loops (`loops`): the outer one keeps its states, the inner one is run again in each trip
and keeps, for that trip, what a minimum cut says. Or the loop stores some of its states, at the
best places (`interpret/checkpoints.py`), and is run again from them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from xform.cost import aval_bytes
from xform.errors import BudgetInfeasible, OtherProgram
from xform.interpret.joint import Joint, Plan, analyze
from xform.interpret.node import Node, fork_p, gather
from xform.ir import Mask, Program
from xform.planner.backend import backend, in_bytes
from xform.planner.budget import again_flops, fit, kept_bytes, over_budget, sent_bytes
from xform.planner.choice import Choice, choice_of
from xform.planner.decided import Plan as Decided
from xform.planner.held import held_bytes, token
from xform.planner.link import Link, link_of
from xform.planner.liveness import liveness
from xform.planner.loops import Shape, fold, loops, reshaped
from xform.planner.peak import first_within, front, infeasible
from xform.planner.record import record
from xform.planner.saved import plan
from xform.policies import Budget, MinCut, Policy, check, min_cut
from xform.source import frame

# The part of all that is kept that makes a loop worth a change.
_PART = 0.05
# How many levels of outer trips are tried.
_DEPTHS = (1, 2, 3)
# Steps between stored states that are gone back over together.
_CHUNKS = (1, 4, 16)

Shapes = dict[int, Shape]
# Bytes of a Plan, as a budget counts them.
Measure = Callable[[Plan], float]


@dataclasses.dataclass(frozen=True)
class Whole:
    """A Plan of a program whose loops have some `shapes`."""

    how: Plan
    shapes: Shapes


def planned(prog: Program, active: Mask, wanted: Mask, policy: Policy) -> Whole:
    """The Plan of a whole program, under a policy, for the backend that is planned for."""
    policy = in_bytes(check(policy))
    shapes = _recorded(policy, prog) if isinstance(policy, Decided) else {}
    joint = analyze(reshaped(prog, shapes) if shapes else prog, active, wanted)
    if not isinstance(policy, Budget):
        return Whole(plan(joint, policy, top=True), shapes)
    here = backend()
    key: Any = "whole", policy, here, link_of()
    if key not in joint.program.cache:
        peak = lambda how: liveness(how, here).total_bytes
        measure = peak if policy.of == "peak" else waiting_bytes
        found = search(prog, active, wanted, policy, measure)
        least = int(measure(found.how))
        if least > policy.bytes and policy.of == "saved":
            raise over_budget(found.how, policy, least)
        if least > policy.bytes:
            raise infeasible(policy, found.how, least, "simulated")
        joint.program.cache[key] = found
    return joint.program.cache[key]


def _recorded(made: Decided, prog: Program) -> Shapes:
    """The shapes of a recorded plan's loops; `OtherProgram` if the program has no such loops."""
    shapes, here = made.shapes(), loops(prog)
    for i, shape in shapes.items():
        then = sum(map(math.prod, shape))
        now = here[i].params["length"] if i < len(here) else None
        if now != then:
            has = f"one of {now}" if now is not None else "none"
            raise OtherProgram(
                repr(made),
                f"it was made for another program: in place {i} the plan has a loop of {then} "
                f"steps, the program {has}",
                frame(here[i]) if now is not None else "",
                "make a new plan with xform.plan for this function and these shapes",
            )
    return shapes


def search(prog: Program, active: Mask, wanted: Mask, budget: Budget, measure: Measure) -> Whole:
    """The least work within a budget, of plans with the loops as they are, split and nested.

    With the loops as they are, values may be sent to the host, if there is a link to one.
    If none is within it, the one with the fewest bytes.
    """
    joint = analyze(prog, active, wanted)
    fits = lambda w: measure(w.how) <= budget.bytes
    found = [Whole(p, {}) for p in _flat(joint, budget, measure, link_of())]
    within = list(filter(fits, found))
    if loops(prog) and not any(again_flops(w.how) == 0 for w in within):
        over = [w.how for w in found if not fits(w)]
        if within and over:
            ends = min(over, key=measure), min((w.how for w in within), key=_work(measure))
            found += split(prog, active, wanted, *ends, fits)
        found += nested(prog, active, wanted)
        found += retraced(prog, active, wanted, fits)
        within = list(filter(fits, found))
    if within:
        return min(within, key=lambda w: _work(measure)(w.how))
    return min(found, key=lambda w: measure(w.how))


def _work(measure: Measure) -> Callable[[Plan], tuple[float, float, float]]:
    return lambda how: (again_flops(how), sent_bytes(how), measure(how))


def _flat(joint: Joint, budget: Budget, measure: Measure, link: Link | None) -> list[Plan]:
    """Plans with the loops as they are, by rising work, up to the first that is within a budget."""
    make = lambda how: plan(joint, how, top=True)
    if measure(make(min_cut)) <= budget.bytes:
        return [make(min_cut)]
    if budget.of == "saved":
        try:
            return [make(MinCut()), fit(joint, budget, make, link)]
        except BudgetInfeasible:
            return [make(MinCut(0.0, 0.0))]
    key = "front", link
    if key not in joint.program.cache:
        joint.program.cache[key] = front(make, link)
    return first_within(joint.program.cache[key], measure, budget.bytes)


def split(prog: Program, active: Mask, wanted: Mask, above: Plan, below: Plan,
          fits: Callable[[Whole], bool]) -> Iterator[Whole]:  # fmt: skip
    """Between two plans: each loop as two in a row, the second of which keeps as `above` does.

    Its share is the largest that fits, of 32.
    """
    flat = reshaped(prog, {})
    joint = analyze(flat, active, wanted)
    place = _places(flat)
    nodes = [e.params["node"] for e in above.joint.first if e.primitive is fork_p]
    twins = [e.params["node"] for e in joint.first if e.primitive is fork_p]
    if len(nodes) != len(twins):
        return
    trips = {place[id(n.eqn)]: n.trips for n in twins if id(n.eqn) in place and n.trips > 1}
    parts = min(32, max(trips.values(), default=0))
    low, high, best = 0, parts, None
    while high - low > 1:
        part = (low + high) // 2
        late = {i: min(max(1, part * n // parts), n - 1) for i, n in trips.items()}
        shapes = {i: ((n - late[i],), (late[i],)) for i, n in trips.items()}
        try:
            found = _mixed(flat, active, wanted, shapes, above, below)
        except OtherProgram:  # a body that traces otherwise, in a loop of another length
            return
        low, high, best = (part, high, found) if fits(found) else (low, part, best)
    if best is not None:
        yield best


def _mixed(flat: Program, active: Mask, wanted: Mask, shapes: Shapes, above: Plan, below: Plan
           ) -> Whole:  # fmt: skip
    """The plan of split loops: what `below` keeps in the first, what `above` does in the second."""
    prog = reshaped(flat, shapes)
    joint = analyze(prog, active, wanted)
    choice = choice_of(plan(joint, MinCut(), top=True))
    place = _places(prog)
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


def _places(prog: Program) -> dict[int, int]:
    return {id(eqn): i for i, eqn in enumerate(loops(prog))}


def waiting_bytes(how: Plan) -> int:
    """Bytes that a Plan keeps, with what loops that are run again keep for their way back."""
    return kept_bytes(how) + _again_bytes(how)


def _again_bytes(how: Plan) -> int:
    """What a loop within keeps for one trip, or step, until it is gone back over."""
    kept = set(how.kept)
    most = waits = 0
    for eqn in how.joint.first:
        if eqn.primitive is fork_p:
            node = eqn.params["node"]
            plans = how.inner[node]
            own = held_bytes(token(node, plans))
            inside = max(map(_again_bytes, plans), default=0)
            if eqn.outvars[-1] not in kept:
                most = max(most, own + inside)
            else:
                most = max(most, inside)
                waits += 0 if how.slots is None else own
    return most + waits


def _large(how: Plan, flat: Program) -> dict[int, Node]:
    """The loops of a program, by their place, that keep much of what its Plan does."""
    place = _places(flat)
    return {
        place[id(node.eqn)]: node
        for node, plans in how.inner.items()
        if id(node.eqn) in place
        and node.trips >= 4
        and held_bytes(token(node, plans)) > _PART * kept_bytes(how)
    }


def nested(prog: Program, active: Mask, wanted: Mask) -> Iterator[Whole]:
    """Plans with the large loops of a program as loops of loops, of several sizes."""
    if not loops(prog):
        return
    flat = reshaped(prog, {})
    large = _large(plan(analyze(flat, active, wanted), MinCut(), top=True), flat)
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


def retraced(prog: Program, active: Mask, wanted: Mask, fits: Callable[[Whole], bool]
             ) -> Iterator[Whole]:  # fmt: skip
    """Plans whose large loops store as many states as fit, and are run again from those.

    Between two stored states are single steps, or chunks of steps within which a minimum cut says
    what is kept.
    """
    flat = reshaped(prog, {})
    large = _large(plan(analyze(flat, active, wanted), MinCut(), top=True), flat)
    for chunk in _CHUNKS if large else ():
        shapes = {i: _chunks(node.trips, chunk) for i, node in large.items() if chunk > 1}
        if not all(shapes.values()):
            return
        folded = reshaped(flat, shapes)
        joint = analyze(folded, active, wanted)
        for policy in (MinCut(), MinCut(0.0, 0.0)):
            how = plan(joint, policy, top=True)
            loops = [n for n in _large(how, folded).values() if not n.eqn.effects]
            longest = max((n.trips for n in loops), default=0)
            # With a state for each trip but one, nothing is gained over the loop as it is.
            low, high, best = 0, longest - 1, None
            while high - low > 1:
                most = (low + high) // 2
                found = Whole(plan(joint, _with_slots(how, loops, most / longest), True), shapes)
                low, high, best = (most, high, found) if fits(found) else (low, most, best)
            if best is not None:
                yield best


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
