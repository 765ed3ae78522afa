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
from xform.planner.candidates.whole import Shapes, Whole
from xform.planner.compiler import Compiler
from xform.planner.costs.link import link_of
from xform.planner.costs.outcome import waiting_bytes
from xform.planner.cuts.fit import fit, least
from xform.planner.decide import best, plan
from xform.planner.front import Front
from xform.planner.loops import loops, reshaped
from xform.planner.plan.plan import Plan as Decided
from xform.planner.refused import over_budget
from xform.planner.search import compiled, simulated
from xform.planner.simulate.profiles import profile
from xform.policies import Budget, MinCut, Policy, check, min_cut
from xform.regions import opening
from xform.source import frame


def planned(prog: Program, active: Mask, wanted: Mask, policy: Policy,
            compiler: Compiler | None = None, beside: int = 0) -> Whole:  # fmt: skip
    """The Plan of a whole program, under a policy, for the backend that is planned for.

    The `compiler` measures plans for a budget of the peak; without one they are simulated. `beside`
    are the bytes that a step holds besides its derivative, such as an optimizer's state.
    """
    with alive.working("choosing what to save"):
        here = _here(in_bytes(check(policy)))
        return _planned(with_regions(opening(here), prog), active, wanted, here, compiler, beside)


def _planned(prog: Program, active: Mask, wanted: Mask, policy: Policy,
             compiler: Compiler | None, beside: int) -> Whole:  # fmt: skip
    shapes = _recorded(policy, prog) if isinstance(policy, Decided) else {}
    joint, ends = analyze(reshaped(prog, shapes), active, wanted), (prog, active, wanted)
    if not isinstance(policy, Budget):
        return Whole(plan(joint, policy, top=True), shapes)
    if policy.of == "saved":
        choose = lambda: _saved(*ends, policy)
    else:
        default = Whole(plan(joint, _here(min_cut), top=True), {})
        if compiler is not None:
            return compiled(ends, policy, default, compiler)
        choose = lambda: simulated(ends, policy, default, beside)
    key: Any = "whole", policy, backend(), link_of(), beside
    if key not in joint.program.cache:
        joint.program.cache[key] = choose()
    return joint.program.cache[key]


def _here(policy: Policy) -> Policy:
    """Fill in the backend's settings for the default policy."""
    if isinstance(policy, MinCut) and policy == dataclasses.replace(
        min_cut, regions=policy.regions
    ):
        by = profile(backend())
        return dataclasses.replace(policy, written=by.written, rounds=by.rounds)
    return policy


def with_regions(regions: Regions, prog: Program) -> Program:
    """The program with its remat regions as they are marked, or without, where they are open."""
    return OpenRegions().program(prog) if regions == "open" else prog


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
