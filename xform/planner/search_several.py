"""Find plans for all derivatives of one step, so that the compiled step is within a budget.

The derivatives of a step share its memory, and they run one after another. So all of them get the
same *level*: each takes the plan that recomputes least and whose simulated peak is at most the
level. The compiler tells the bytes of the step under these plans, and the search adjusts the level.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from xform.planner.candidate import Candidate
from xform.planner.front import front
from xform.planner.infeasible import infeasible
from xform.planner.problem import Problem
from xform.policies import Budget
from xform.terminal.text import human_bytes

# The most sets of plans that are compiled, besides the default plans and the smallest plans.
_COMPILES = 6

# A plan for each derivative, by its key.
Candidates = Mapping[str, Candidate]


def search_several(
    problems: Mapping[str, Problem],
    budget: Budget,
    default: Candidates,
    measure: Callable[[Candidates], float],
) -> Candidates:
    """Find the plans that recompute least and under which the compiled step is within the budget.

    Args:
      problems: the derivatives, by key.
      budget: the bytes of the step.
      default: the plans of the default policy.
      measure: compiles the step under some plans, and returns its bytes.

    Raises:
      BudgetInfeasible: the step exceeds the budget under all plans that were compiled, the smallest
        of each derivative among them.

    Cost: at most eight compilations.
    """
    measure = _remembered(measure)
    size = measure(default)
    if size <= budget.bytes:
        return default
    # A level at which the step is too large, and the largest level so far at which it fits.
    above, below = float(_peak(problems, default)), -math.inf
    level, fitting = above - (size - budget.bytes), None
    for _ in range(_COMPILES):
        candidates = _at_level(problems, level)
        if candidates is None:
            break
        size = measure(candidates)
        if size <= budget.bytes:
            fitting, below = candidates, level
            level = min((level + above) / 2, level + budget.bytes - size)
        else:
            above = min(level, _peak(problems, candidates))
            level = (below + above) / 2 if fitting else above - (size - budget.bytes)
        if not below < level < above or (fitting and above - below < budget.bytes / 100):
            break
    if fitting is not None:
        return fitting
    smallest = {key: front(problem).smallest()[0] for key, problem in problems.items()}
    if (size := measure(smallest)) <= budget.bytes:
        return smallest
    largest = max(problems, key=lambda key: problems[key].peak(smallest[key].schedule))
    simulated = human_bytes(_peak(problems, smallest) + problems[largest].outside_bytes)
    least = min(size, measure(default))
    raise infeasible(
        budget,
        smallest[largest].schedule,
        int(least) if least < math.inf else 0,
        f"compiled; {simulated} simulated; the figures that follow are those of the largest of "
        f"{len(problems)} derivatives",
        problems[largest].outside_bytes,
    )


def _remembered(measure: Callable[[Candidates], float]) -> Callable[[Candidates], float]:
    """Return a function that measures each set of plans once: two levels may have the same set."""
    known: list[tuple[Candidates, float]] = []

    def remembered(candidates: Candidates) -> float:
        for measured, size in known:
            if all(measured[key].schedule is candidates[key].schedule for key in candidates):
                return size
        known.append((candidates, measure(candidates)))
        return known[-1][1]

    return remembered


def _at_level(problems: Mapping[str, Problem], level: float) -> Candidates | None:
    """Return for each derivative the plan of least recomputation whose peak is at most `level`.

    A derivative without such a plan gets its smallest plan. None: no derivative has such a plan.
    """
    fitting = {
        key: front(problem).least_recompute(
            lambda candidate, problem=problem: problem.peak(candidate.schedule) <= level
        )
        for key, problem in problems.items()
    }
    if not any(fitting.values()):
        return None
    return {
        key: candidate or front(problems[key]).smallest()[0] for key, candidate in fitting.items()
    }


def _peak(problems: Mapping[str, Problem], candidates: Candidates) -> int:
    """Return the largest simulated peak of the derivatives, without bytes outside of them."""
    return max(problem.peak(candidates[key].schedule) for key, problem in problems.items())
