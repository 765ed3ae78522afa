"""Plan all derivatives of one compiled program, so that the program is within a budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from xform.planner.candidate import Candidate
from xform.planner.compiler import Compiler
from xform.planner.plan_program import default_plan, search_by_simulation, search_with_compiler
from xform.planner.problem import Problem
from xform.planner.search_several import Candidates, search_several
from xform.planner.search_several_slices import search_several_slices
from xform.policies import Budget


def plan_several(
    problems: Mapping[str, Problem],
    budget: Budget,
    default: Candidates,
    measure: Callable[[Candidates], float],
) -> Candidates:
    """Return a plan for each derivative of a program, by the derivative's key.

    Args:
      problems: the derivatives, by key. There is at least one.
      budget: the bytes of the whole program.
      default: the plans of the default policy, which are tried first.
      measure: compiles the program under some plans, and returns its bytes; infinite if the
        compiler refuses the program without a size.

    Raises:
      BudgetInfeasible: the program exceeds the budget under all plans that were tried.

    Cost: at most eight compilations; none if `budget.verify` is false, as the simulation decides
    then.
    """
    if not budget.verify:
        return {k: search_by_simulation(p, budget, default[k]) for k, p in problems.items()}
    if len(problems) > 1:
        if budget.slices:
            return search_several_slices(problems, budget, default, default_plan, measure)
        return search_several(problems, budget, default, measure)
    ((key, problem),) = problems.items()

    def bytes_of(candidate: Candidate) -> int | None:
        size = measure({key: candidate})
        return None if size == math.inf else int(size)

    # The last argument is equal to no other object, so the bytes of other programs are not used.
    compiler = Compiler(problem, bytes_of, object())
    return {key: search_with_compiler(problem, budget, default[key], compiler)}
