"""Plan a derivative under any policy: the entry point of the planner.

`plan_program` returns a `Candidate`: changes to the program's loops, and a *Schedule* of the whole
program. A Schedule says which values are saved for the backward pass and which equations are
recomputed. `decide.py` applies most policies. Two kinds of policies need more:

- The default policy is a minimum cut. If saving everything has a lower peak, it saves everything.
- A budget takes the plan that recomputes least within its bytes. `search.py` finds it for a budget
  of the peak, `_plan_for_saved_bytes` for a budget of the saved bytes.
"""

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
from xform.planner.search_slices import search_slices, search_unsliced
from xform.planner.simulate.profiles import backend_profile
from xform.policies import Budget, MinCut, Policy, min_cut, parse, save_everything
from xform.policies.regions import regions_of
from xform.policies.sample import sample_for
from xform.program.dimensions import at_sample
from xform.program.ir import Program
from xform.program.source import frame
from xform.terminal import progress_line

# The recomputed values that are live at once are assumed to take at most the bytes of the largest
# forward value, times this number.
_N_LIVE_VALUES = 32


def plan_program(problem: Problem, policy: Policy, compiler: Compiler | None = None) -> Candidate:
    """Return the plan of a whole program under `policy`.

    Args:
      problem: the derivative, and the device that the plan is for. The policy replaces its
        `regions` and `slices`.
      policy: any policy of `xform.policies`, a recorded `Plan`, or a policy in JAX's protocol.
      compiler: measures the plans for a budget of the peak; None: their peaks are simulated.

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
            return _plan_for_budget(problem, policy, compiler)
        if policy == dataclasses.replace(min_cut, regions=problem.regions):
            return default_plan(problem)
        return problem.candidate(policy)


def default_plan(problem: Problem) -> Candidate:
    """Return the plan of the default policy: a minimum cut, unless it raises the peak.

    A minimum cut lowers the bytes of the saved values. If the saved values are not live at the peak
    anyway, the recomputed values can raise the peak. Then saving everything takes less memory, and
    less time. The same holds on a TPU if all saved values fit into the memory on the chip.
    """
    backend = backend_profile(problem.device.backend)
    policy = dataclasses.replace(
        min_cut,
        regions=problem.regions,
        fused_save_price=backend.fused_save_price,
        rounds_operands=backend.rounds_operands,
        slow_price=backend.slow_price,
    )
    cut = problem.candidate(policy)
    if not cut.schedule.recomputed:
        return cut
    everything = problem.candidate(save_everything)
    saved = residual_bytes(everything.schedule)
    fits_on_chip = saved <= backend.on_chip_bytes
    if not (fits_on_chip or _may_raise_the_peak(cut.schedule, saved)):
        return cut
    cut_peak, other_peak = (problem.peak(c.schedule) for c in (cut, everything))
    if fits_on_chip:  # saved values take no memory, so recomputing must lower the peak
        return everything if other_peak <= cut_peak else cut
    return everything if other_peak < (1 - backend.doubt) * cut_peak else cut


def _may_raise_the_peak(cut: Schedule, saved_bytes: int) -> bool:
    """Return whether a minimum cut may have a higher peak than a plan that saves everything.

    `saved_bytes` are the saved bytes of that plan.

    Each recomputed value is live for a few operations only. Suppose that the cut saves fewer bytes
    than that plan, and that the difference is larger than the recomputed values that are live at
    once. Then the cut lowers the peak, and nothing has to be simulated. This is usual in a deep
    network.
    """
    types = (v.aval for eqn in cut.joint.forward for v in eqn.outvars)
    recomputed_bytes = _N_LIVE_VALUES * max(map(aval_bytes, types), default=0)
    return saved_bytes <= residual_bytes(cut) + recomputed_bytes


def _plan_for_budget(problem: Problem, budget: Budget, compiler: Compiler | None) -> Candidate:
    """Return the plan within a budget that recomputes least. Simulated plans are cached."""
    cache = problem.joint().program.cache
    key: Any = "budget", problem.device, problem.link, problem.outside_bytes, budget
    if budget.of == "saved":
        choose = lambda: _plan_for_saved_bytes(problem, budget)
    else:
        if compiler is not None:
            return search_with_compiler(problem, budget, default_plan(problem), compiler)
        choose = lambda: search_by_simulation(problem, budget, default_plan(problem))
    if key not in cache:
        cache[key] = choose()
    return cache[key]


def search_with_compiler(
    problem: Problem, budget: Budget, default: Candidate, compiler: Compiler
) -> Candidate:
    """Return the plan within a budget of the peak that recomputes least, by compiled bytes.

    With `budget.slices`, regions of the program run in slices if the default plan does not fit.
    """
    search = lambda problem, default: search_compiled(problem, budget, default, compiler)
    measure = lambda problem, candidate: compiler.bytes(candidate)
    if not budget.slices:
        return search_unsliced(problem, default, default_plan, search, measure)
    return search_slices(problem, budget, default, default_plan, search, measure)


def search_by_simulation(problem: Problem, budget: Budget, default: Candidate) -> Candidate:
    """Return the same by simulated bytes."""
    search = lambda problem, default: search_simulated(problem, budget, default)
    if not budget.slices:
        return search_unsliced(problem, default, default_plan, search, None)
    margin = backend_profile(problem.device.backend).margin

    def measure(problem: Problem, candidate: Candidate) -> float:
        return problem.peak(candidate.schedule) + problem.outside_bytes + margin * budget.bytes

    return search_slices(problem, budget, default, default_plan, search, measure)


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
