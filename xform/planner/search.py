"""`search`: the one search for plans within a budget of the peak.

It takes a map from derivatives to problems. One derivative is the map with one entry. Everything
that keeps a budget calls it: `xform.jit`, `xform.plan`, a budget inside `jit`, products with a
Hessian. `search_front.py` searches the front of the program, and `search_slices.py` runs regions
in slices.
"""

from __future__ import annotations

from xform.planner.choice import Candidates, Choice, ChoiceFront, Problems
from xform.planner.default_plan import default_plan
from xform.planner.measure import Measure
from xform.planner.search_front import search_compiled, search_simulated
from xform.planner.search_slices import search_slices, search_unsliced
from xform.planner.simulate.profiles import backend_profile
from xform.policies import Budget


def search(
    problems: Problems, budget: Budget, default: Candidates, measure: Measure | None = None
) -> Candidates:
    """Return the plans that recompute least within a budget of the peak, by key.

    Args:
      problems: the derivatives of the program, by key. There is at least one.
      budget: the bytes of the whole program; with `budget.slices`, regions of the program run in
        slices if the default plans do not fit.
      default: the plans of the default policy, which are tried first.
      measure: compiles the program under some plans; None: the simulation decides, with a margin.

    Raises:
      BudgetInfeasible: the program exceeds the budget under all plans that were tried.

    Cost: at most eight compilations. With slices, about ten; a refusal takes twice as many.
    """
    start = Choice(problems, default)
    if measure is not None:
        bytes_of, compiled = measure.bytes, measure.bytes
        one_search = lambda choice: search_compiled(
            choice, budget, measure, ChoiceFront(choice.problems)
        )
    else:
        margins = (backend_profile(p.device.backend).margin for p in problems.values())
        margin = max(margins) * budget.bytes
        bytes_of, compiled = lambda choice: choice.peak + margin, None
        one_search = lambda choice: search_simulated(choice, budget)
    if budget.slices:
        found = search_slices(start, budget.bytes, default_plan, one_search, bytes_of)
    else:
        found = search_unsliced(start, budget.bytes, default_plan, one_search, compiled)
    return found.candidates
