"""From a program and a policy to its Schedule: where every policy comes in."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from xform import alive
from xform.errors import BudgetInfeasible, OtherProgram
from xform.interpret.joint import Schedule
from xform.ir import Program
from xform.planner.candidate import Candidate
from xform.planner.compiler import Compiler
from xform.planner.costs.outcome import waiting_bytes
from xform.planner.cuts.fit import fit, least
from xform.planner.decide import best
from xform.planner.device import Device, in_bytes
from xform.planner.front import Front
from xform.planner.loops import Shapes, loops
from xform.planner.plan.plan import Plan
from xform.planner.problem import Problem
from xform.planner.refused import over_budget
from xform.planner.search import compiled, simulated
from xform.planner.simulate.profiles import profile
from xform.policies import Budget, MinCut, Policy, check, min_cut
from xform.regions import opening
from xform.source import frame


def planned(problem: Problem, policy: Policy, compiler: Compiler | None = None) -> Candidate:
    """The Schedule of a whole program under a policy, which says whether remat regions are open.

    The `compiler` measures plans for a budget of the peak; without one they are simulated.
    """
    with alive.working("choosing what to save"):
        policy = in_bytes(check(policy), problem.device)
        problem = dataclasses.replace(problem, regions=opening(policy))
        if isinstance(policy, Plan):
            return problem.candidate(policy, _recorded(policy, problem.program))
        if not isinstance(policy, Budget):
            return problem.candidate(_settled(policy, problem.device))
        return _budgeted(problem, policy, compiler)


def _settled(policy: Policy, device: Device) -> Policy:
    """The policy itself; of the default policy, the one with the settings of the backend."""
    if isinstance(policy, MinCut) and policy == dataclasses.replace(
        min_cut, regions=policy.regions
    ):
        by = profile(device.backend)
        return dataclasses.replace(policy, written=by.written, rounds=by.rounds)
    return policy


def _budgeted(problem: Problem, budget: Budget, compiler: Compiler | None) -> Candidate:
    """The plan of the least work within a budget."""
    cache = problem.joint().program.cache
    key: Any = "budget", problem.device, problem.link, problem.beside, budget
    if budget.of == "saved":
        choose = lambda: _saved(problem, budget)
    else:
        default = problem.candidate(_settled(min_cut, problem.device))
        if compiler is not None:
            return compiled(problem, budget, default, compiler)
        choose = lambda: simulated(problem, budget, default)
    if key not in cache:
        cache[key] = choose()
    return cache[key]


def _saved(problem: Problem, budget: Budget) -> Candidate:
    """The least work within a budget of what is saved."""
    most, link = problem.schedule(MinCut()), problem.link

    def flat() -> list[Schedule]:
        try:
            proposals = fit(budget, link, waiting_bytes)
            return [most, best(most.joint, proposals, problem.device.backend)]
        except BudgetInfeasible:
            proposals = least(most, budget, link, waiting_bytes)
            return [most, best(most.joint, proposals, problem.device.backend)]

    here = Front(problem, flat, waiting_bytes)
    chosen = here.first(lambda candidate: waiting_bytes(candidate.schedule) <= budget.bytes)
    if chosen is None:
        floor = here.lowest()[0].schedule
        raise over_budget(floor, budget, waiting_bytes(floor))
    return chosen


def _recorded(decided: Plan, prog: Program) -> Shapes:
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
