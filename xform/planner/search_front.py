"""Search the front of a program for the choice of least recomputation within a budget.

A `Choice` has a plan for each derivative of the program. The choices come from the program's front
(`choice.py`): each recomputes more than the one before, and most take fewer bytes. A plan may
offload values, that is, copy them to the host's memory until the backward pass reads them.

The compiler decides whether a choice fits. The simulation only chooses which choices are compiled.
All simulated bytes are multiplied by one factor: the compiled bytes of the default choice, divided
by its simulated bytes. For each choice that is compiled, the excess of its compiled over its
simulated bytes corrects the estimate for the next ones. Compiled bytes from earlier searches save
time but never change the result: a search learns only from choices that it tries itself. Without a
compiler the simulation decides, with a margin.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from xform.errors import BudgetInfeasible
from xform.planner.choice import Choice, ChoiceFront
from xform.planner.measure import (
    MAX_BEFORE_REFUSAL,
    MAX_COMPILES,
    MAX_FIRST_COMPILES,
    Measure,
)
from xform.planner.simulate.profiles import Profile, backend_profile
from xform.policies import Budget
from xform.terminal.text import human_bytes

# `first_fit` multiplies the learned excess by this factor before it chooses its last plan, and so
# chooses a smaller plan.
_LAST_EXCESS_FACTOR = 1.5
# A plan nearly fits if its scaled simulated bytes are less than the budget times _NEAR. Once a plan
# fits, plans that recompute less are compiled too: those that are expected to fit, until
# _MAX_MISSES in a row do not, then some of those that nearly fit.
_NEAR, _MAX_MISSES = 1.1, 3


# The search chooses plans, sets of named values (`xform/names`) or ways to evaluate a Jacobian
# (`xform/jacobians`). All have the attributes of `Choice` that this file reads: `key work peak
# lower_bound offloads has_asked_regions may_save_in_regions`.
Chosen = TypeVar("Chosen", bound=Any)


class Choices(Protocol[Chosen]):
    """Choices in the order of their recomputed FLOPs. `ChoiceFront` describes the methods."""

    def least_recompute(self, fits: Callable[[Chosen], bool]) -> Chosen | None: ...
    def cheaper(self, last: Chosen, fits: Callable[[Chosen], bool]) -> Iterable[Chosen]: ...
    def smallest(self) -> Sequence[Chosen]: ...
    def references(self) -> Sequence[Chosen]: ...
    def without_offload(self) -> Choices[Chosen]: ...
    def refusal(self, budget: Budget, lowest: Chosen, size: int, by: str) -> BudgetInfeasible: ...


def search_compiled(
    default: Chosen, budget: Budget, measure: Measure, front: Choices[Chosen]
) -> Chosen:
    """Find the choice that recomputes least and whose compiled peak is within the budget.

    1. Compile `default`, the plans of the default policy. If they fit, return them, unless other
       plans could save more inside remat regions (the parts that `jax.checkpoint` marks). Their
       compiled bytes scale the simulation of all other choices.
    2. Compile the choice with the least recomputation that is expected to fit. If it does not fit,
       correct the estimate by its error and try the next one.
    3. Once a choice fits, compile choices that recompute less: first those that are expected to
       fit, then, by bisection, those that nearly fit. The result is almost monotone: a smaller
       budget gets a choice that recomputes less only if it was not compiled for the larger budget.
    4. If none fits, compile the smallest choices of the front and plans that a user could have
       written (`ChoiceFront.references`), then refuse the budget.

    Raises:
      BudgetInfeasible: no choice that was compiled fits. The error names the lowest compiled bytes.
    """
    default_fits = measure.bytes(default) <= budget.bytes
    if default_fits and not _may_save_in_regions(budget, default):
        return default
    search = _Search(default, measure, budget.bytes, front)
    first = search.first_fit(default if default_fits else None)
    if first is not None:
        return search.least_work(first)
    if default_fits:
        return default
    last = search.last_choices(default)
    for choice in sorted(last, key=lambda choice: choice.work):
        if measure.bytes(choice) <= budget.bytes:
            return choice
    lowest = min(last, key=lambda choice: (measure.bytes(choice), choice.peak))
    simulated, size = lowest.peak, measure.bytes(lowest)
    by = f"compiled; {human_bytes(simulated)} simulated"
    if size == math.inf:
        size, by = simulated, "simulated; the compiler refuses the program"
    raise front.refusal(budget, lowest, int(size), by)


def search_simulated(default: Choice, budget: Budget) -> Choice:
    """Find the choice that recomputes least and whose simulated peak is within the budget.

    The simulated peak is below the budget by a margin for the error of the simulation. If no plan
    of a derivative has such a peak, its smallest plan is taken if it fits without the margin.

    Raises:
      BudgetInfeasible: a derivative has no plan that fits.
    """
    chosen = {k: _simulated_plan(Choice({k: problem}, {k: default.candidates[k]}), budget)
              for k, problem in default.problems.items()}  # fmt: skip
    return Choice(default.problems, {k: one.candidates[k] for k, one in chosen.items()})


def _simulated_plan(default: Choice, budget: Budget) -> Choice:
    """Do the same for one derivative."""
    plans = ChoiceFront(default.problems)
    target = budget.bytes - math.ceil(_profile(default).margin * budget.bytes)
    # Skip the simulation if the saved values alone exceed the budget.
    fits = lambda choice: choice.lower_bound <= target and choice.peak <= target
    chosen = default if fits(default) else None
    if chosen is None or _may_save_in_regions(budget, chosen):
        least = plans.least_recompute(fits)
        chosen = least if chosen is None or (least and least.work < chosen.work) else chosen
    # If no plan keeps the margin, take the smallest plan. Do not take the cheapest plan that fits
    # without the margin: it may recompute less than the plan of a slightly larger budget.
    chosen = chosen or plans.smallest()[0]
    if chosen.peak > budget.bytes:
        raise plans.refusal(budget, chosen, chosen.peak, "simulated")
    return chosen


def _profile(choice: Choice) -> Profile:
    """Return the facts of the backend that a choice is for."""
    return backend_profile(choice.problems[choice.largest].device.backend)


def _may_save_in_regions(budget: Budget, default: Any) -> bool:
    """Return whether plans that save values in remat regions are tried, although `default` fits.

    Such plans recompute less. They exist if a region has no policy. They are not tried if the
    budget is the memory of a device.
    """
    return not budget.device and default.may_save_in_regions


class _Search(Generic[Chosen]):
    """The search on a program's front for one budget of `limit` bytes.

    A compiler may copy offloaded values into another layout. So the search learns separately from
    choices that offload values and from choices that do not. As soon as a choice that offloads
    exceeds the budget, the front of the plans that do not offload is searched too.

    Attributes:
      fronts: the fronts that are searched.
      compiled: the keys of the choices that this search compiled.
      default_peak: the simulated peak of the default choice if that does not fit, else infinite.
      scale: the compiled bytes of the default choice, divided by its simulated bytes.
      excess: the largest excess of compiled over scaled simulated bytes so far, first of the
        choices that do not offload, then of those that do. It is negative if all compiled bytes
        were smaller, and None before the first such choice.
    """

    def __init__(self, default: Chosen, measure: Measure, limit: int, front: Choices[Chosen]):
        self.measure, self.limit = measure, limit
        self.fronts, self.compiled = [front], set[Hashable]()
        size = measure.bytes(default)
        self.default_peak = default.peak if size > limit else math.inf
        self.scale = size / max(default.peak, 1) if size < math.inf else 1.0
        self.excess: list[float | None] = [None, None]

    def first_fit(self, default: Chosen | None) -> Chosen | None:
        """Compile choices that are expected to fit, and return the first that fits.

        Choices that recompute as much as `default`, or more, are not tried. None: none of the
        compiled choices fits, or there is no other to try.
        """
        for i in range(MAX_FIRST_COMPILES):
            if i == MAX_FIRST_COMPILES - 1:
                self.excess = [excess and _LAST_EXCESS_FACTOR * excess for excess in self.excess]
            choice = self._cheapest(
                lambda c: self._expected_bytes(c) <= self.limit
            ) or self._cheapest(
                lambda c: self._simulated_bytes(c) <= self.limit and self._is_untried(c)
            )
            if choice is None or (default and choice.work >= default.work):
                return None
            if self._compiled_bytes(choice) <= self.limit:
                return choice
            self._learn(choice)
        return None

    def least_work(self, least: Chosen) -> Chosen:
        """Compile choices that recompute less than `least`, and return the best that fits.

        `least` fits, and is returned if no other does. First come the choices that are expected to
        fit with the learned excess, then those that nearly fit.
        """
        misses = 0
        self._learn(least)
        while misses < _MAX_MISSES and len(self.compiled) < MAX_COMPILES:
            choice = self._cheapest(
                lambda c: self._expected_bytes(c) <= self.limit and self._is_untried(c)
            )
            if choice is None or choice.work >= least.work:
                break
            misses += 1
            if self._compiled_bytes(choice) <= self.limit:
                least, misses = choice, 0
            self._learn(choice)
        # The simulation may fit the default worse than `least`, which is nearer to the limit.
        scale = min(self.scale, self._compiled_bytes(least) / max(least.peak, 1))
        nearly_fits = lambda c: scale * max(c.lower_bound, c.peak) <= _NEAR * self.limit
        near = [c for plans in self.fronts for c in plans.cheaper(least, nearly_fits)]
        # If the policy dissolves remat regions, the program with its author's regions comes first.
        for asked in (False, True):
            least = self._bisect(least, [c for c in near if c.has_asked_regions is asked])
        return least

    def _bisect(self, least: Chosen, choices: Iterable[Chosen]) -> Chosen:
        """Compile some of the choices that recompute less than `least`; return the best that fits.

        Each compilation halves the choices, in the order of their expected bytes. If the middle one
        fits, the larger ones are left, else the smaller ones. If the default does not fit, choices
        with its simulated peak are not compiled.
        """
        left = sorted(
            (c for c in choices if self._is_untried(c) and c.peak < self.default_peak),
            key=self._expected_bytes,
        )
        while len(self.compiled) < MAX_COMPILES:
            left = [choice for choice in left if choice.work < least.work]
            if not left:
                break
            middle = len(left) // 2
            if self._compiled_bytes(left[middle]) <= self.limit:
                least, left = left[middle], left[middle + 1 :]
            else:
                left = left[:middle]
        return least

    def last_choices(self, default: Chosen) -> list[Chosen]:
        """Return the choices to compile before the budget is refused, as many as the limit allows.

        They are the default, the smallest of the front, and plans that a user could have written.
        Choices that this search compiled come first.
        """
        plans = {default.key: default}
        front = self.fronts[0]
        for choice in (*front.smallest(), *front.references()):
            plans.setdefault(choice.key, choice)
        compiled = [c for key, c in plans.items() if c is default or key in self.compiled]
        untried = [c for key, c in plans.items() if c is not default and key not in self.compiled]
        return compiled + untried[: max(0, MAX_BEFORE_REFUSAL - 1 - len(self.compiled))]

    def _cheapest(self, fits: Callable[[Chosen], bool]) -> Chosen | None:
        """Return the choice on all fronts that recomputes least and fits; None if none fits."""
        choices = (plans.least_recompute(fits) for plans in self.fronts)
        return min(filter(None, choices), key=lambda c: c.work, default=None)

    def _is_untried(self, choice: Chosen) -> bool:
        """Return whether this search has not compiled the choice yet."""
        return choice.key not in self.compiled

    def _compiled_bytes(self, choice: Chosen) -> float:
        """Compile a choice, and return its bytes."""
        self.compiled.add(choice.key)
        return self.measure.bytes(choice)

    def _learn(self, choice: Chosen) -> None:
        """Correct the estimate by the excess of one compiled choice.

        If it offloads values, the correction applies to all choices that do, else to all that do
        not. Suppose that it exceeded the budget. Afterwards it is not expected to fit, and neither
        are choices of the same kind with the same simulated bytes.
        """
        size = self._compiled_bytes(choice)
        excess, largest = size - self._simulated_bytes(choice), self.excess[choice.offloads]
        self.excess[choice.offloads] = excess if largest is None else max(largest, excess)
        if choice.offloads and size > self.limit and len(self.fronts) == 1:
            self.fronts.append(self.fronts[0].without_offload())

    def _expected_bytes(self, choice: Chosen) -> float:
        """Return the expected bytes of a choice: scaled simulated bytes plus the learned excess."""
        return self._simulated_bytes(choice) + (self.excess[choice.offloads] or 0)

    def _simulated_bytes(self, choice: Chosen) -> float:
        """Return the scaled simulated bytes of a choice.

        If the saved values alone are clearly over the budget, it is not simulated. Then the result
        is a lower bound.
        """
        bound = self.scale * choice.lower_bound
        return bound if bound > _NEAR * self.limit else max(bound, self.scale * choice.peak)
