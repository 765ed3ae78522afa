"""Find plans for several derivatives of one step whose programs may run in slices.

The derivatives run one after the other, so the largest of their peaks is the peak of the step. The
search puts regions of each derivative whose peak is too large into slices, and leaves the others as
they are. Only regions that recompute nothing are tried: losses, whose value and gradient are
computed in one loop. If slices alone are not enough, `search_several` saves less in the derivatives
with slices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from xform.errors import BudgetInfeasible
from xform.planner.problem import Problem
from xform.planner.search_several import Candidates, search_several
from xform.planner.search_slices import PlanProblem, loss_in_slices, simulated_bytes
from xform.policies import Budget


def search_several_slices(
    problems: Mapping[str, Problem],
    budget: Budget,
    default: Candidates,
    default_of: PlanProblem,
    measure: Callable[[Candidates], float],
) -> Candidates:
    """Find the plans under which the compiled step is within the budget, with slices if necessary.

    Args:
      problems: the derivatives, by key, without slices.
      budget: the bytes of the step.
      default: the plans of the default policy.
      default_of: returns the default plan of a derivative.
      measure: compiles the step under some plans, and returns its bytes.

    Raises:
      BudgetInfeasible: the step exceeds the budget under all plans that were compiled.

    Cost: at most two compilations more than `search_several`; with a refusal, twice as many.
    """
    size = measure(default)
    if size <= budget.bytes:
        return default
    peaks = {key: simulated_bytes(problems[key], plan) for key, plan in default.items()}
    # The step is expected to fit if its simulated bytes are at most this.
    limit = int(budget.bytes / size * max(peaks.values()))
    fewest, most = {**default}, {**default}
    for key, problem in problems.items():
        if peaks[key] > limit:
            fewest[key], most[key] = loss_in_slices(problem, default[key], default_of, limit)
    if not any(plan.slices for plan in most.values()):
        return search_several(problems, budget, default, measure)
    for plans in (fewest, most):
        if measure(plans) <= budget.bytes:
            return plans
    sliced = {
        key: dataclasses.replace(problem, slices=most[key].slices)
        for key, problem in problems.items()
    }
    try:
        return search_several(sliced, budget, most, measure)
    except BudgetInfeasible as error:
        refused = error
    try:
        return search_several(problems, budget, default, measure)
    except BudgetInfeasible as error:
        raise min(refused, error, key=lambda e: e.floor_bytes) from None
