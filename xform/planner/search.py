"""Find the plan that recomputes least and whose peak memory is within a budget.

The plans come from the program's *Pareto front* (`front.py`): each plan on it recomputes more than
the one before and takes fewer bytes. A plan may offload values, that is, copy them to the host's
memory until the backward pass reads them.

The compiler decides whether a plan fits. The simulation only chooses which plans are compiled. All
simulated bytes are multiplied by one factor: the compiled bytes of the default plan, divided by its
simulated bytes. For each plan that is compiled, the excess of its compiled over its simulated bytes
corrects the estimate for the next plans. Compiled bytes from earlier searches save time but never
change the result: a search learns only from plans that it tries itself. Without a compiler the
simulation decides, with a margin.
"""

from __future__ import annotations

import dataclasses
import math

from xform.planner.candidate import Candidate
from xform.planner.candidates.as_written import has_region_without_policy
from xform.planner.candidates.stock import reference_candidates
from xform.planner.compiler import (
    MAX_BEFORE_REFUSAL,
    MAX_COMPILES,
    MAX_FIRST_COMPILES,
    Compiler,
    schedule_key,
)
from xform.planner.costs.outcome import offloaded_bytes, peak_lower_bound
from xform.planner.front import Fits, front
from xform.planner.infeasible import infeasible
from xform.planner.problem import Problem
from xform.planner.simulate.profiles import backend_profile
from xform.policies import Budget
from xform.terminal.text import human_bytes

# `first_fit` multiplies the learned excess by this factor before it chooses its last plan, and so
# chooses a smaller plan.
_LAST_EXCESS_FACTOR = 1.5
# A plan nearly fits if its scaled simulated bytes are less than the budget times _NEAR. Once a plan
# fits, plans that recompute less and nearly fit are compiled too, until _MAX_MISSES in a row do not
# fit.
_NEAR, _MAX_MISSES = 1.1, 3


def search_compiled(
    problem: Problem, budget: Budget, default: Candidate, compiler: Compiler
) -> Candidate:
    """Find the plan that recomputes least and whose compiled peak is within the budget.

    1. Compile `default`, the plan of the default policy. If it fits, return it, unless other plans
       could save more inside remat regions (the parts that `jax.checkpoint` marks). Its compiled
       bytes scale the simulation of all other plans.
    2. Compile the plan with the least recomputation that is expected to fit. If it does not fit,
       correct the estimate by its error and try the next one.
    3. Once a plan fits, compile plans that recompute less: first those that are expected to fit,
       then those that nearly fit. The result is almost monotone: a smaller budget gets a plan that
       recomputes less only if that plan was not compiled for the larger budget.
    4. If no plan fits, compile the smallest plans of the front and plans that a user could have
       written (`reference_candidates`), then refuse the budget.

    Args:
      problem: the derivative, and the device.
      budget: a budget of the peak.
      default: the plan of the default policy.
      compiler: compiles plans, and returns their bytes.

    Raises:
      BudgetInfeasible: none of the compiled plans fits. The error names the lowest compiled bytes.
    """
    default_fits = compiler.bytes(default) <= budget.bytes
    if default_fits and not _may_save_in_regions(budget, default):
        return default
    search = _Search(problem, compiler, budget.bytes, default)
    first = search.first_fit(default if default_fits else None)
    if first is not None:
        return search.least_work(first)
    if default_fits:
        return default
    last = search.last_candidates(default)
    for candidate in sorted(last, key=lambda candidate: candidate.work):
        if compiler.bytes(candidate) <= budget.bytes:
            return candidate
    lowest = min(last, key=lambda c: (compiler.bytes(c), problem.peak(c.schedule)))
    simulated = problem.peak(lowest.schedule) + problem.outside_bytes
    size, measured_by = compiler.bytes(lowest), f"compiled; {human_bytes(simulated)} simulated"
    if size == math.inf:
        size, measured_by = simulated, "simulated; the compiler refuses the program"
    raise infeasible(budget, lowest.schedule, int(size), measured_by, problem.outside_bytes)


def search_simulated(problem: Problem, budget: Budget, default: Candidate) -> Candidate:
    """Find the plan that recomputes least and whose simulated peak is within the budget.

    The simulated peak is below the budget by a margin for the error of the simulation. If no plan
    has such a peak, the smallest plan is returned if it fits without the margin. `default` is the
    plan of the default policy.

    Raises:
      BudgetInfeasible: no plan fits.
    """
    plans, backend = front(problem), problem.device.backend
    available = budget.bytes - problem.outside_bytes
    target = available - math.ceil(backend_profile(backend).margin * budget.bytes)
    # Skip the simulation if the saved values alone exceed the budget.
    fits = lambda c: (
        peak_lower_bound(c.schedule, backend) <= target and plans.bytes_of(c.schedule) <= target
    )
    chosen = default if fits(default) else None
    if chosen is None or _may_save_in_regions(budget, chosen):
        least = plans.least_recompute(fits)
        chosen = least if chosen is None or (least and least.work < chosen.work) else chosen
    # If no plan keeps the margin, take the smallest plan. Do not take the cheapest plan that fits
    # without the margin: it may recompute less than the plan of a slightly larger budget.
    chosen = chosen or plans.smallest()[0]
    if (peak := plans.bytes_of(chosen.schedule)) > available:
        total = peak + problem.outside_bytes
        raise infeasible(budget, chosen.schedule, total, "simulated", problem.outside_bytes)
    return chosen


def _may_save_in_regions(budget: Budget, default: Candidate) -> bool:
    """Return whether plans that save values in remat regions are tried, although `default` fits.

    Such plans recompute less. They exist if a region has no policy. They are not tried if the
    budget is the memory of a device.
    """
    return not budget.device and has_region_without_policy(default.schedule)


class _Search:
    """The search on a program's Pareto front for one budget of `limit` bytes.

    A compiler may copy offloaded values into another layout. So the search learns separately from
    plans that offload values and from plans that do not. As soon as a plan that offloads exceeds
    the budget, the front of the plans that do not offload is searched too.

    Attributes:
      fronts: the fronts that are searched.
      compiled: the keys of the plans that this search compiled.
      scale: the compiled bytes of the default plan, divided by its simulated bytes.
      excess: the largest excess of compiled over scaled simulated bytes so far, first of the plans
        that do not offload, then of the plans that do. It is negative if all compiled bytes were
        smaller, and None before the first such plan.
    """

    def __init__(self, problem: Problem, compiler: Compiler, limit: int, default: Candidate):
        self.problem, self.compiler, self.limit = problem, compiler, limit
        self.fronts, self.compiled = [front(problem)], set[str]()
        size = compiler.bytes(default)
        self.scale = size / max(self._peak(default), 1) if size < math.inf else 1.0
        self.excess: list[float | None] = [None, None]

    def first_fit(self, default: Candidate | None) -> Candidate | None:
        """Compile plans that are expected to fit, and return the first that fits.

        Plans that recompute as much as `default`, or more, are not tried. None: none of the
        compiled plans fits, or there is no other plan to try.
        """
        for i in range(MAX_FIRST_COMPILES):
            if i == MAX_FIRST_COMPILES - 1:
                self.excess = [excess and _LAST_EXCESS_FACTOR * excess for excess in self.excess]
            candidate = self._cheapest(
                lambda c: self._expected_bytes(c) <= self.limit
            ) or self._cheapest(
                lambda c: self._simulated_bytes(c) <= self.limit and self._is_untried(c)
            )
            if candidate is None or (default and candidate.work >= default.work):
                return None
            if self._compiled_bytes(candidate) <= self.limit:
                return candidate
            self._learn(candidate)
        return None

    def least_work(self, least: Candidate) -> Candidate:
        """Compile plans that recompute less than `least`, and return the best that fits.

        `least` fits, and is returned if no other plan does. First come the plans that are expected
        to fit with the learned excess, then the plans that nearly fit.
        """
        misses = 0
        self._learn(least)
        while misses < _MAX_MISSES and len(self.compiled) < MAX_COMPILES:
            candidate = self._cheapest(
                lambda c: self._expected_bytes(c) <= self.limit and self._is_untried(c)
            )
            if candidate is None or candidate.work >= least.work:
                break
            misses += 1
            if self._compiled_bytes(candidate) <= self.limit:
                least, misses = candidate, 0
            self._learn(candidate)
        nearly_fits = lambda c: self._simulated_bytes(c) <= _NEAR * self.limit
        cheaper = [c for plans in self.fronts for c in plans.cheaper(least, nearly_fits)]
        # If the policy dissolves remat regions, the program with its author's regions comes first.
        order = lambda c: (c.regions == self.problem.regions, self._expected_bytes(c))
        misses = 0
        for candidate in sorted(cheaper, key=order):
            if misses == _MAX_MISSES or len(self.compiled) == MAX_COMPILES:
                break
            if candidate.work >= least.work or not self._is_untried(candidate):
                continue
            misses += 1
            if self._compiled_bytes(candidate) <= self.limit:
                least, misses = candidate, 0
        return least

    def last_candidates(self, default: Candidate) -> list[Candidate]:
        """Return the plans to compile before the budget is refused, as many as the limit allows.

        They are the default, the smallest plans of the front, and plans that a user could have
        written. Plans that this search compiled come first.
        """
        plans = {schedule_key(default.schedule): default}
        for candidate in (*front(self.problem).smallest(), *reference_candidates(self.problem)):
            plans.setdefault(schedule_key(candidate.schedule), candidate)
        compiled = [c for key, c in plans.items() if c is default or key in self.compiled]
        untried = [c for key, c in plans.items() if c is not default and key not in self.compiled]
        return compiled + untried[: max(0, MAX_BEFORE_REFUSAL - 1 - len(self.compiled))]

    def _cheapest(self, fits: Fits) -> Candidate | None:
        """Return the plan on all fronts that recomputes least and fits; None if no plan fits."""
        candidates = (plans.least_recompute(fits) for plans in self.fronts)
        return min(filter(None, candidates), key=lambda c: c.work, default=None)

    def _is_untried(self, candidate: Candidate) -> bool:
        """Return whether this search has not compiled the plan yet."""
        return schedule_key(candidate.schedule) not in self.compiled

    def _compiled_bytes(self, candidate: Candidate) -> float:
        """Compile a plan, and return its bytes."""
        self.compiled.add(schedule_key(candidate.schedule))
        return self.compiler.bytes(candidate)

    def _learn(self, candidate: Candidate) -> None:
        """Correct the estimate by the excess of one compiled plan.

        If the plan offloads values, the correction applies to all plans that do, else to all plans
        that do not. Suppose that the plan exceeded the budget. Afterwards it is not expected to
        fit, and neither are plans of the same kind with the same simulated bytes.
        """
        offloads, size = bool(offloaded_bytes(candidate.schedule)), self._compiled_bytes(candidate)
        excess, largest = size - self._simulated_bytes(candidate), self.excess[offloads]
        self.excess[offloads] = excess if largest is None else max(largest, excess)
        if offloads and size > self.limit and len(self.fronts) == 1:
            self.fronts.append(front(dataclasses.replace(self.problem, offload=False)))

    def _expected_bytes(self, candidate: Candidate) -> float:
        """Return the expected bytes of a plan: scaled simulated bytes plus the learned excess."""
        return self._simulated_bytes(candidate) + (
            self.excess[bool(offloaded_bytes(candidate.schedule))] or 0
        )

    def _simulated_bytes(self, candidate: Candidate) -> float:
        """Return the scaled simulated bytes of a plan.

        If the saved values alone are clearly over the budget, the plan is not simulated. Then the
        result is a lower bound.
        """
        backend, outside_bytes = self.problem.device.backend, self.problem.outside_bytes
        bound = self.scale * (peak_lower_bound(candidate.schedule, backend) + outside_bytes)
        if bound > _NEAR * self.limit:
            return bound
        return max(bound, self.scale * self._peak(candidate))

    def _peak(self, candidate: Candidate) -> int:
        """Return the simulated peak of a plan, with the bytes outside the derivative."""
        return self.problem.peak(candidate.schedule) + self.problem.outside_bytes
