"""Plan a program under any policy: the entry point of the planner."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

from xform.errors import BudgetInfeasible, OtherProgram
from xform.interpret.cost import aval_bytes
from xform.interpret.joint import Schedule
from xform.planner.candidate import Candidate
from xform.planner.compiler import Compiler
from xform.planner.costs.outcome import residual_bytes
from xform.planner.cuts.fit import propose_smallest, propose_within
from xform.planner.decide import best_of_proposals
from xform.planner.device import resolve_fit
from xform.planner.front import Front
from xform.planner.infeasible import over_budget
from xform.planner.loops import Shapes, loops
from xform.planner.plan.plan import Plan
from xform.planner.problem import Problem
from xform.planner.search import search_compiled, search_simulated
from xform.planner.simulate.profiles import backend_profile
from xform.policies import Budget, MinCut, Policy, min_cut, parse, save_everything
from xform.policies.regions import regions_of
from xform.program.ir import Program
from xform.program.source import frame
from xform.terminal import progress_line

# Beside the saved values, at most as many bytes are taken to be live as this number of the largest
# value.
_N_LIVE_VALUES = 16


def plan_program(problem: Problem, policy: Policy, compiler: Compiler | None = None) -> Candidate:
    """Return the Schedule of a whole program under `policy`, as a Candidate.

    The policy also says whether remat regions are open. For a budget of the peak, `compiler`
    measures the plans; if it is None, their peaks are simulated.
    """
    with progress_line.show("choosing what to save"):
        policy = resolve_fit(parse(policy), problem.device)
        problem = dataclasses.replace(problem, regions=regions_of(policy))
        if isinstance(policy, Plan):
            return problem.candidate(policy, _recorded_shapes(policy, problem.program))
        if isinstance(policy, Budget):
            return _plan_for_budget(problem, policy, compiler)
        if policy == dataclasses.replace(min_cut, regions=problem.regions):
            return _default(problem)
        return problem.candidate(policy)


def _default(problem: Problem) -> Candidate:
    """The plan of the default policy: a minimum cut, unless it raises the peak.

    A minimum cut lowers the bytes of the saved values. If they are not live at the peak, recomputed
    values can raise it. Then saving everything takes less memory, and less time.
    """
    compiler = backend_profile(problem.device.backend)
    policy = dataclasses.replace(
        min_cut,
        regions=problem.regions,
        fused_save_price=compiler.fused_save_price,
        rounds_operands=compiler.rounds_operands,
        slow_price=compiler.slow_price,
    )
    cut = problem.candidate(policy)
    if not cut.schedule.recomputed:
        return cut
    everything = problem.candidate(save_everything)
    if not _may_raise_the_peak(cut.schedule, everything.schedule):
        return cut
    lowest = (1 - compiler.margin) * problem.peak(cut.schedule)
    return everything if problem.peak(everything.schedule) < lowest else cut


def _may_raise_the_peak(cut: Schedule, everything: Schedule) -> bool:
    """Whether a minimum cut may have a higher peak than a Schedule that saves everything.

    Recomputed values are live for a few operations. So if a cut spares more bytes than these
    values take, as in a deep network, it lowers the peak, and nothing has to be simulated.
    """
    values = (v.aval for eqn in cut.joint.forward for v in eqn.outvars)
    live = _N_LIVE_VALUES * max(map(aval_bytes, values), default=0)
    return residual_bytes(everything) <= residual_bytes(cut) + live


def _plan_for_budget(problem: Problem, budget: Budget, compiler: Compiler | None) -> Candidate:
    """The plan within a budget that recomputes least."""
    cache = problem.joint().program.cache
    key: Any = "budget", problem.device, problem.link, problem.outside_bytes, budget
    if budget.of == "saved":
        choose = lambda: _plan_for_saved_bytes(problem, budget)
    else:
        default = _default(problem)
        if compiler is not None:
            return search_compiled(problem, budget, default, compiler)
        choose = lambda: search_simulated(problem, budget, default)
    if key not in cache:
        cache[key] = choose()
    return cache[key]


def _plan_for_saved_bytes(problem: Problem, budget: Budget) -> Candidate:
    """The plan that recomputes least within a budget of the saved bytes."""
    save_most, link = problem.schedule(MinCut()), problem.link

    def flat() -> list[Schedule]:
        best = functools.partial(best_of_proposals, save_most.joint, backend=problem.device.backend)
        try:
            return [save_most, best(propose_within(budget, link, residual_bytes))]
        except BudgetInfeasible:
            return [save_most, best(propose_smallest(save_most, budget, link, residual_bytes))]

    front = Front(problem, flat, residual_bytes)
    chosen = front.least_recompute(
        lambda candidate: residual_bytes(candidate.schedule) <= budget.bytes
    )
    if chosen is None:
        floor = front.smallest()[0].schedule
        raise over_budget(floor, budget, residual_bytes(floor))
    return chosen


def _recorded_shapes(plan: Plan, prog: Program) -> Shapes:
    """The loop shapes of a recorded plan. Raises OtherProgram if the program's loops differ."""
    shapes, program_loops = plan.shapes(), loops(prog)
    for i, shape in shapes.items():
        recorded = sum(map(math.prod, shape))
        actual = program_loops[i].params["length"] if i < len(program_loops) else None
        if actual != recorded:
            exists = actual is not None
            program_has = f"{actual} in the program" if exists else "the program has no such loop"
            raise OtherProgram(
                repr(plan),
                f"it was made for another program: loop {i} has {recorded} iterations in the plan, "
                f"{program_has}",
                frame(program_loops[i]) if exists else "",
                "make a new plan with xform.plan for this function and these shapes",
            )
    return shapes
