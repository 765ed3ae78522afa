"""Plan a derivative under any policy: the entry point of the planner.

`plan_program` returns a `Candidate`: changes to the program's loops, and a *Schedule* of the whole
program. A Schedule says which values are saved for the backward pass and which equations are
recomputed. `decide.py` applies most policies. Two kinds of policies need more:

- The default policy is a minimum cut, or saves everything (`default_plan.py`).
- A budget takes the plan that recomputes least within its bytes. `search.py` finds it for a budget
  of the peak, `_plan_for_saved_bytes` for a budget of the saved bytes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

from xform.errors import BudgetInfeasible, OtherProgram
from xform.interpret.joint import Schedule
from xform.planner.candidate import Candidate
from xform.planner.costs.outcome import residual_bytes
from xform.planner.cuts.fit import propose_smallest, propose_within
from xform.planner.decide import best_of_proposals
from xform.planner.default_plan import default_plan
from xform.planner.device import resolve_fit
from xform.planner.front import Front
from xform.planner.infeasible import over_budget
from xform.planner.loops import Shapes, loops
from xform.planner.measure import Measure
from xform.planner.plan.plan import Plan
from xform.planner.problem import Problem
from xform.planner.search import search
from xform.policies import Budget, MinCut, Policy, min_cut, parse
from xform.policies.regions import regions_of
from xform.policies.sample import sample_for
from xform.program.dimensions import at_sample
from xform.program.ir import Program
from xform.program.source import frame
from xform.terminal import progress_line


def plan_program(problem: Problem, policy: Policy, measure: Measure | None = None) -> Candidate:
    """Return the plan of a whole program under `policy`.

    Args:
      problem: the derivative, and the device that the plan is for. The policy replaces its
        `regions` and `slices`.
      policy: any policy of `xform.policies`, a recorded `Plan`, or a policy in JAX's protocol.
      measure: compiles the plans for a budget of the peak; None: their peaks are simulated.

    Raises:
      BudgetInfeasible: no plan fits the budget.
      OtherProgram: a recorded Plan was made for another program.
    """
    policy = resolve_fit(parse(policy), problem.device)
    sample = sample_for(policy, problem.marked.in_avals)
    with progress_line.show("choosing what to save"), at_sample(sample):
        slices = policy.slices if isinstance(policy, Plan) else ()
        problem = dataclasses.replace(problem, regions=regions_of(policy), slices=slices)
        if isinstance(policy, Plan):
            return problem.candidate(policy, _recorded_shapes(policy, problem.program))
        if isinstance(policy, Budget):
            return _plan_for_budget(problem, policy, measure)
        if policy == dataclasses.replace(min_cut, regions=problem.regions):
            return default_plan(problem)
        return problem.candidate(policy)


def _plan_for_budget(problem: Problem, budget: Budget, measure: Measure | None) -> Candidate:
    """Return the plan within a budget that recomputes least. Simulated plans are cached."""
    if budget.of == "peak" and measure is not None:
        return _only_plan(problem, budget, measure)
    cache = problem.joint().program.cache
    key: Any = "budget", problem.device, problem.link, problem.outside_bytes, budget
    if key not in cache:
        saved = budget.of == "saved"
        cache[key] = (_plan_for_saved_bytes if saved else _only_plan)(problem, budget)
    return cache[key]


def _only_plan(problem: Problem, budget: Budget, measure: Measure | None = None) -> Candidate:
    """Search for the plan of one derivative within a budget of the peak."""
    (chosen,) = search({"": problem}, budget, {"": default_plan(problem)}, measure).values()
    return chosen


def _plan_for_saved_bytes(problem: Problem, budget: Budget) -> Candidate:
    """Return the plan that recomputes least within a budget of the saved bytes.

    Plans with split or nested loops are tried too: the Front makes them.
    """
    save_most, link = problem.schedule(MinCut()), problem.link

    def schedules_with_loops_as_written() -> list[Schedule]:
        best = functools.partial(best_of_proposals, save_most.joint, backend=problem.device.backend)
        try:
            return [save_most, best(propose_within(budget, link, residual_bytes))]
        except BudgetInfeasible:
            return [save_most, best(propose_smallest(save_most, budget, link, residual_bytes))]

    front = Front(problem, schedules_with_loops_as_written, residual_bytes)
    chosen = front.least_recompute(
        lambda candidate: residual_bytes(candidate.schedule) <= budget.bytes
    )
    if chosen is None:
        smallest = front.smallest()[0].schedule
        raise over_budget(smallest, budget, residual_bytes(smallest))
    return chosen


def _recorded_shapes(plan: Plan, prog: Program) -> Shapes:
    """Return how a recorded plan splits and nests loops.

    Raises:
      OtherProgram: a loop does not exist in the program, or has another length.
    """
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
