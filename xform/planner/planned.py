"""From a program and a policy to its Plan: where every policy comes in."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from xform import alive
from xform.budgets import Regions
from xform.errors import BudgetInfeasible, OtherProgram
from xform.interpret.joint import analyze
from xform.ir import Mask, Program
from xform.passes.open_regions import OpenRegions
from xform.planner.backend import backend, in_bytes
from xform.planner.candidates.as_written import cuts, free_regions
from xform.planner.candidates.whole import Shapes, Whole
from xform.planner.costs.link import link_of
from xform.planner.costs.outcome import least_bytes, waiting_bytes
from xform.planner.cuts.fit import fit, least
from xform.planner.decide import best, plan
from xform.planner.front import Front
from xform.planner.loops import loops, reshaped
from xform.planner.plan.plan import Plan as Decided
from xform.planner.refused import infeasible, over_budget
from xform.planner.simulate.liveness import liveness
from xform.planner.simulate.profiles import profile
from xform.policies import Budget, MinCut, Policy, check, min_cut
from xform.regions import opening
from xform.source import frame


def planned(prog: Program, active: Mask, wanted: Mask, policy: Policy) -> Whole:
    """The Plan of a whole program, under a policy, for the backend that is planned for."""
    with alive.working("choosing what to save"):
        return _planned(prog, active, wanted, _here(in_bytes(check(policy))))


def _planned(prog: Program, active: Mask, wanted: Mask, policy: Policy) -> Whole:
    prog = with_regions(opening(policy), prog)
    shapes = _recorded(policy, prog) if isinstance(policy, Decided) else {}
    joint = analyze(reshaped(prog, shapes), active, wanted)
    if not isinstance(policy, Budget):
        return Whole(plan(joint, policy, top=True), shapes)
    key: Any = "whole", policy, backend(), link_of()
    if key not in joint.program.cache:
        within = within_peak if policy.of == "peak" else _saved
        joint.program.cache[key] = within(prog, active, wanted, policy)
    return joint.program.cache[key]


def _here(policy: Policy) -> Policy:
    """A policy, but that the default is what it is on the backend that is planned for."""
    if isinstance(policy, MinCut) and policy == dataclasses.replace(
        min_cut, regions=policy.regions
    ):
        by = profile(backend())
        return dataclasses.replace(policy, written=by.written, rounds=by.rounds)
    return policy


def with_regions(regions: Regions, prog: Program) -> Program:
    """The program with its remat regions as they are marked, or without, where they are open."""
    return OpenRegions().program(prog) if regions == "open" else prog


def front(prog: Program, active: Mask, wanted: Mask, offload: bool = True) -> Front:
    """The plans from which a budget of the peak is chosen, on the backend that is planned for.

    Without `offload` it is as if that had no link to its host.
    """
    here, link = backend(), link_of() if offload else None
    joint = analyze(prog, active, wanted)
    key: Any = "front", here, link
    if key not in joint.program.cache:
        peak = lambda candidate: liveness(candidate, here).total_bytes
        staircase = Front((prog, active, wanted), lambda: cuts(joint, link), peak)
        joint.program.cache[key] = staircase
    return joint.program.cache[key]


def within_peak(prog: Program, active: Mask, wanted: Mask, budget: Budget, beside: int = 0
                ) -> Whole:  # fmt: skip
    """The least work within a budget of the peak, by simulation, with a margin if it can be had.

    So many bytes of it are `beside` the derivative: an optimizer's state, say; those of donated
    arguments, which outputs take, are taken off.
    """
    plans, joint = front(prog, active, wanted), analyze(prog, active, wanted)
    most = budget.bytes - beside
    wished = most - math.ceil(profile(backend()).margin * budget.bytes)
    # A plan is not simulated of which what it keeps alone is too much.
    fits = lambda w: least_bytes(w.plan, backend()) <= wished and plans.peak(w.plan) <= wished
    default = Whole(plan(joint, _here(min_cut), top=True), {})
    chosen = default if fits(default) else None
    if chosen is None or may_save_more(budget, chosen):
        less = plans.first(fits)
        chosen = less if chosen is None or (less and less.work < chosen.work) else chosen
    # Not any plan without the margin: a smaller budget would have one of less work.
    chosen = chosen or plans.lowest()[0]
    if (least := plans.peak(chosen.plan)) > most:
        raise infeasible(budget, chosen.plan, least + beside, "simulated", beside)
    return chosen


def may_save_more(budget: Budget, default: Whole) -> bool:
    """Whether a budget that the default fits may save more than it: in remat regions.

    What is to fit a device is left as it is where it does.
    """
    return not budget.device and free_regions(default.plan)


def _saved(prog: Program, active: Mask, wanted: Mask, budget: Budget) -> Whole:
    """The least work within a budget of what is saved."""
    joint = analyze(prog, active, wanted)
    most = plan(joint, MinCut(), top=True)

    def flat() -> list[Any]:
        try:
            return [most, best(joint, fit(budget, link_of(), waiting_bytes))]
        except BudgetInfeasible:
            return [most, best(joint, least(most, budget, link_of(), waiting_bytes))]

    here = Front((prog, active, wanted), flat, waiting_bytes)
    chosen = here.first(lambda whole: waiting_bytes(whole.plan) <= budget.bytes)
    if chosen is None:
        floor = here.lowest()[0].plan
        raise over_budget(floor, budget, waiting_bytes(floor))
    return chosen


def _recorded(decided: Decided, prog: Program) -> Shapes:
    """The shapes of a recorded plan's loops; `OtherProgram` if the program has no such loops."""
    shapes, here = decided.shapes(), loops(prog)
    for i, shape in shapes.items():
        then = sum(map(math.prod, shape))
        now = here[i].params["length"] if i < len(here) else None
        if now != then:
            has = f"one of {now}" if now is not None else "none"
            raise OtherProgram(
                repr(decided),
                f"it was made for another program: in place {i} the plan has a loop of {then} "
                f"steps, the program {has}",
                frame(here[i]) if now is not None else "",
                "make a new plan with xform.plan for this function and these shapes",
            )
    return shapes
