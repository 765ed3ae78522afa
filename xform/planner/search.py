"""Find the plan that recomputes least and whose peak memory is within a budget.

The compiler decides whether a plan fits. The simulation only chooses which plans are compiled. It
is scaled by the compiled bytes of the default plan. For each plan that is tried, the difference of
compiled and simulated bytes corrects the estimate of the next ones. Compiled bytes from earlier
searches save time but never change the result: a search learns only from plans that it tries
itself. Without a compiler the simulation decides, with a margin.
"""

from __future__ import annotations

import dataclasses
import math

from xform.planner.candidate import Candidate
from xform.planner.candidates.as_written import free_regions
from xform.planner.candidates.stock import reference_candidate
from xform.planner.compiler import COMPILES, FIRST, Compiler, schedule_key
from xform.planner.costs.outcome import offloaded_bytes, peak_lower_bound
from xform.planner.front import Fits, front
from xform.planner.infeasible import infeasible
from xform.planner.problem import Problem
from xform.planner.simulate.profiles import backend_profile
from xform.policies import Budget
from xform.terminal.text import human_bytes

# `first_fit` compiles at most FIRST plans. Before the last one, the learned excess is multiplied by
# this factor.
_LAST_ROOM = 1.5
# Once a plan fits, plans that recompute less are compiled too if their scaled simulation exceeds
# the budget by less than the factor _NEAR, until _MAX_MISSES in a row do not fit.
_NEAR, _MAX_MISSES = 1.08, 3


def search_compiled(
    problem: Problem, budget: Budget, default: Candidate, compiler: Compiler
) -> Candidate:
    """Find the plan that recomputes least and whose compiled peak is within the budget.

    1. Compile the default. If it fits, return it, unless remat regions could save more. Its
       compiled bytes scale the simulation of all other plans.
    2. Compile the plan with the least recomputation that is expected to fit. If it does not fit,
       correct the estimate by its error and try the next one.
    3. Once a plan fits, compile plans that recompute less: first those that are expected to fit,
       then those that nearly fit, beginning with the program as its author marked it. The result is
       almost monotone: a smaller budget gets less recomputation only through a plan that was not
       compiled for the larger budget.
    4. If no plan fits, compile the smallest plans of the front and one plan that a user could have
       written (`reference_candidate`) before refusing the budget.

    Raises:
      BudgetInfeasible: none of the compiled plans fits. The error names the lowest compiled bytes.
    """
    fits = (size := compiler.bytes(default)) <= budget.bytes
    if fits and not _may_open_regions(budget, default):
        return default
    search = _Search(problem, compiler, budget.bytes, default)
    first = search.first_fit(default if fits else None)
    if first is not None:
        return search.least_work(first)
    if fits:
        return default
    floors = [*front(problem).smallest(), reference_candidate(problem)]
    for candidate in sorted(floors, key=lambda candidate: candidate.work):
        if compiler.bytes(candidate) <= budget.bytes:
            return candidate
    least = min((*floors, default), key=compiler.bytes)
    simulated = problem.peak(floors[0].schedule) + problem.outside_bytes
    if (size := compiler.bytes(least)) == math.inf:
        measured_by = "simulated; the compiler refuses the program"
        raise infeasible(budget, floors[0].schedule, simulated, measured_by, problem.outside_bytes)
    measured_by = f"compiled; {human_bytes(simulated)} simulated"
    raise infeasible(budget, least.schedule, int(size), measured_by, problem.outside_bytes)


def search_simulated(problem: Problem, budget: Budget, default: Candidate) -> Candidate:
    """Find the plan that recomputes least and whose simulated peak is within the budget.

    The simulated peak stays below the budget by a margin for the error of the simulation. If no
    plan does, only the smallest plan is tried without the margin.

    Raises:
      BudgetInfeasible: no plan fits.
    """
    plans, backend = front(problem), problem.device.backend
    available = budget.bytes - problem.outside_bytes
    target = available - math.ceil(backend_profile(backend).margin * budget.bytes)
    # Skip the simulation if the saved values alone exceed the budget.
    fits = lambda c: (
        peak_lower_bound(c.schedule, backend) <= target and plans.peak(c.schedule) <= target
    )
    chosen = default if fits(default) else None
    if chosen is None or _may_open_regions(budget, chosen):
        less = plans.least_recompute(fits)
        chosen = less if chosen is None or (less and less.work < chosen.work) else chosen
    # If no plan keeps the margin, take the smallest plan. The cheapest plan that fits without the
    # margin may recompute less than the plan of a larger budget, which keeps the margin.
    chosen = chosen or plans.smallest()[0]
    if (least := plans.peak(chosen.schedule)) > available:
        raise infeasible(
            budget,
            chosen.schedule,
            least + problem.outside_bytes,
            "simulated",
            problem.outside_bytes,
        )
    return chosen


def _may_open_regions(budget: Budget, default: Candidate) -> bool:
    """Whether plans that save more in remat regions are tried although the default fits.

    They are not tried if the budget is the memory of a device: a default that fits is returned.
    """
    return not budget.device and free_regions(default.schedule)


class _Search:
    """The search on a program's Pareto front for one budget of `limit` bytes.

    A compiler may copy offloaded values into another layout. So the search learns separately from
    plans that offload values and from plans that do not. As soon as a plan that offloads exceeds
    the budget, the front without offloading is searched too.
    """

    def __init__(self, problem: Problem, compiler: Compiler, limit: int, default: Candidate):
        self.problem, self.compiler, self.limit = problem, compiler, limit
        self.fronts, self.compiled = [front(problem)], set[str]()
        size = compiler.bytes(default)
        self.scale = size / max(self._peak(default), 1) if size < math.inf else 1.0
        # The largest excess of compiled over simulated bytes so far (negative if all were smaller):
        # of plans without offloading, then of plans with it. None before the first such plan.
        self.excess: list[float | None] = [None, None]

    def first_fit(self, default: Candidate | None) -> Candidate | None:
        """The first plan that is expected to fit and does.

        None if the FIRST plans do not fit, or if the plan does not recompute less than `default`.
        """
        for i in range(FIRST):
            if i == FIRST - 1:
                self.excess = [excess and _LAST_ROOM * excess for excess in self.excess]
            candidate = self._cheapest(
                lambda c: self._expected_bytes(c) <= self.limit
            ) or self._cheapest(
                lambda c: self._simulated_bytes(c) <= self.limit and self._is_untried(c)
            )
            if candidate is None or (default and candidate.work >= default.work):
                return None
            if self._bytes(candidate) <= self.limit:
                return candidate
            self._learn(candidate)
        return None

    def least_work(self, least: Candidate) -> Candidate:
        """The plan that recomputes least and fits: `least`, or one before it on the front.

        First come the plans that are expected to fit with the learned excess, then the plans whose
        simulation nearly fits.
        """
        misses = 0
        self._learn(least)
        while misses < _MAX_MISSES and len(self.compiled) < COMPILES:
            candidate = self._cheapest(
                lambda c: self._expected_bytes(c) <= self.limit and self._is_untried(c)
            )
            if candidate is None or candidate.work >= least.work:
                break
            misses += 1
            if self._bytes(candidate) <= self.limit:
                least, misses = candidate, 0
            self._learn(candidate)
        nearly = lambda c: self._simulated_bytes(c) <= _NEAR * self.limit
        cheaper = [c for plans in self.fronts for c in plans.cheaper(least, nearly)]
        # The program as its author marked it comes first: if regions are open, its regions differ.
        order = lambda c: (c.regions == self.problem.regions, self._expected_bytes(c))
        misses = 0
        for candidate in sorted(cheaper, key=order):
            if misses == _MAX_MISSES or len(self.compiled) == COMPILES:
                break
            if candidate.work >= least.work or not self._is_untried(candidate):
                continue
            misses += 1
            if self._bytes(candidate) <= self.limit:
                least, misses = candidate, 0
        return least

    def _cheapest(self, fits: Fits) -> Candidate | None:
        """The plan on all fronts that recomputes least and fits; None if no plan fits."""
        candidates = (plans.least_recompute(fits) for plans in self.fronts)
        return min(filter(None, candidates), key=lambda c: c.work, default=None)

    def _is_untried(self, candidate: Candidate) -> bool:
        """Whether this search has not compiled the plan yet."""
        return schedule_key(candidate.schedule) not in self.compiled

    def _bytes(self, candidate: Candidate) -> float:
        """Compiled bytes of a plan."""
        self.compiled.add(schedule_key(candidate.schedule))
        return self.compiler.bytes(candidate)

    def _learn(self, candidate: Candidate) -> None:
        """Correct the estimate by the excess of one compiled plan.

        The correction applies to all plans that offload, or to all that do not, as this plan does.
        So if the plan exceeded the budget, neither it nor any plan with the same simulated bytes is
        expected to fit.
        """
        sends, size = bool(offloaded_bytes(candidate.schedule)), self._bytes(candidate)
        excess, largest = size - self._simulated_bytes(candidate), self.excess[sends]
        self.excess[sends] = excess if largest is None else max(largest, excess)
        if sends and size > self.limit and len(self.fronts) == 1:
            self.fronts.append(front(dataclasses.replace(self.problem, offload=False)))

    def _expected_bytes(self, candidate: Candidate) -> float:
        """Expected bytes of a plan: the scaled simulation plus the learned excess."""
        return self._simulated_bytes(candidate) + (
            self.excess[bool(offloaded_bytes(candidate.schedule))] or 0
        )

    def _simulated_bytes(self, candidate: Candidate) -> float:
        """Simulated bytes of a plan, scaled.

        If the saved values alone are clearly over the budget, their scaled bytes are returned
        without a simulation.
        """
        backend, outside_bytes = self.problem.device.backend, self.problem.outside_bytes
        least = self.scale * (peak_lower_bound(candidate.schedule, backend) + outside_bytes)
        if least > _NEAR * self.limit:
            return least
        return max(least, self.scale * self._peak(candidate))

    def _peak(self, candidate: Candidate) -> int:
        """Simulated bytes of a plan, including the bytes outside the derivative."""
        return self.problem.peak(candidate.schedule) + self.problem.outside_bytes
