"""The plan of the least work within a budget of the peak.

The compiler decides. The simulation only chooses the plans that are compiled. It is scaled by the
compiled bytes of the default, and each plan that takes more than expected corrects it for the next.
Compiled bytes from earlier searches save time and change no plan: a search learns from the plans
that it tries itself, as if it were the first. Without a compiler the simulation decides, with a
margin.
"""

from __future__ import annotations

import dataclasses
import math

from xform.planner.candidate import Candidate
from xform.planner.candidates.as_written import free_regions
from xform.planner.candidates.stock import reference
from xform.planner.compiler import COMPILES, FIRST, Compiler, key_of
from xform.planner.costs.outcome import least_bytes, sent_bytes
from xform.planner.front import Fits, front
from xform.planner.problem import Problem
from xform.planner.refused import infeasible
from xform.planner.simulate.profiles import profile
from xform.policies import Budget
from xform.text import human_bytes

# The last of the first is to leave so many times the room that those before show to be needed.
_LAST = 1.5
# Schedules with less work than one that is within the budget are compiled too, if their simulation
# is over it by less than this factor: until so many in a row are over.
_NEAR, _OVER = 1.08, 3


def compiled(problem: Problem, budget: Budget, default: Candidate, compiler: Compiler) -> Candidate:
    """The plan of the least work that the compiler puts within a budget of the peak.

    1. The default is compiled. If it fits, it is the plan, unless remat regions may save more. Its
       compiled bytes scale the simulation of all other plans.
    2. The plan of the least work that is expected to fit is compiled. If it does not fit, the next
       one leaves room for the error of the expectation.
    3. Once a plan fits, plans of less work are compiled: the author's own program first, then those
       that are expected to be smallest. A plan that is over one budget is over all smaller ones. So
       a smaller budget gets less work only from a plan that was not compiled for the larger one.
    4. If no plan fits, four of the lowest plans are compiled before the budget is refused.

    Raises:
      BudgetInfeasible: none of the compiled plans fits; with the lowest compiled bytes.
    """
    fits = (size := compiler.bytes(default)) <= budget.bytes
    if fits and not _may_save_more(budget, default):
        return default
    stairs = _Stairs(problem, compiler, budget.bytes, default)
    first = stairs.within(default if fits else None)
    if first is not None:
        return stairs.least_work(first)
    if fits:
        return default
    floors = [*front(problem).lowest(), reference(problem)]
    for candidate in sorted(floors, key=lambda candidate: candidate.work):
        if compiler.bytes(candidate) <= budget.bytes:
            return candidate
    least = min((*floors, default), key=compiler.bytes)
    simulated = problem.peak(floors[0].schedule) + problem.beside
    if (size := compiler.bytes(least)) == math.inf:
        by = "simulated; the compiler refuses it"
        raise infeasible(budget, floors[0].schedule, simulated, by, problem.beside)
    by = f"compiled; {human_bytes(simulated)} simulated"
    raise infeasible(budget, least.schedule, int(size), by, problem.beside)


def simulated(problem: Problem, budget: Budget, default: Candidate) -> Candidate:
    """The plan of the least work that the simulation puts within a budget of the peak.

    With a margin, if there is such a plan.

    Raises:
      BudgetInfeasible: no plan is within it.
    """
    plans, most, on = front(problem), budget.bytes - problem.beside, problem.device.backend
    wished = most - math.ceil(profile(on).margin * budget.bytes)
    # A plan whose saved values alone are too much is not simulated.
    fits = lambda w: least_bytes(w.schedule, on) <= wished and plans.peak(w.schedule) <= wished
    chosen = default if fits(default) else None
    if chosen is None or _may_save_more(budget, chosen):
        less = plans.first(fits)
        chosen = less if chosen is None or (less and less.work < chosen.work) else chosen
    # Not any plan without the margin: a smaller budget would have one of less work.
    chosen = chosen or plans.lowest()[0]
    if (least := plans.peak(chosen.schedule)) > most:
        raise infeasible(
            budget, chosen.schedule, least + problem.beside, "simulated", problem.beside
        )
    return chosen


def _may_save_more(budget: Budget, default: Candidate) -> bool:
    """Whether a budget that the default fits may save more than the default: in remat regions.

    A program that has to fit a device is left as it is if it does.
    """
    return not budget.device and free_regions(default.schedule)


class _Stairs:
    """The staircase of a program's plans, walked for one budget of so many bytes.

    A compiler may copy values that are sent to the host into another layout. So the search learns
    from plans that send values apart from others. As soon as one of them takes too much, it also
    looks at the plans that send nothing.
    """

    def __init__(self, problem: Problem, compiler: Compiler, most: int, default: Candidate):
        self.problem, self.compiler, self.most = problem, compiler, most
        self.stairs, self.compiled = [front(problem)], set[str]()
        size = compiler.bytes(default)
        self.scale = size / max(self._peak(default), 1) if size < math.inf else 1.0
        # How many bytes a plan took beyond its simulation, scaled, at most (negative if all took
        # less): of those that send nothing, and of those that do; None before there is one.
        self.beyond: list[float | None] = [None, None]

    def within(self, default: Candidate | None) -> Candidate | None:
        """The first plan that is expected to be within the budget, and is.

        None if there is none among the first few, or if it takes no less work than the default.
        """
        for i in range(FIRST):
            if i == FIRST - 1:
                self.beyond = [beyond and _LAST * beyond for beyond in self.beyond]
            candidate = self._first(lambda w: self._expected(w) <= self.most) or self._first(
                lambda w: self._simulated(w) <= self.most and self._untried(w)
            )
            if candidate is None or (default and candidate.work >= default.work):
                return None
            if self._bytes(candidate) <= self.most:
                return candidate
            self._learn(candidate)
        return None

    def least_work(self, least: Candidate) -> Candidate:
        """Of a plan within the budget and the steps before it, that of the least work within it.

        First those that are expected to be within it by what plans took that were compiled.
        """
        over = 0
        self._learn(least)
        while over < _OVER and len(self.compiled) < COMPILES:
            candidate = self._first(lambda w: self._expected(w) <= self.most and self._untried(w))
            if candidate is None or candidate.work >= least.work:
                break
            over += 1
            if self._bytes(candidate) <= self.most:
                least, over = candidate, 0
            self._learn(candidate)
        nearly = lambda w: self._simulated(w) <= _NEAR * self.most
        before = [w for plans in self.stairs for w in plans.before(least, nearly)]
        # The author's own program first.
        order = lambda w: (w.regions == self.problem.regions, self._expected(w))
        over = 0
        for candidate in sorted(before, key=order):
            if over == _OVER or len(self.compiled) == COMPILES:
                break
            if candidate.work >= least.work or not self._untried(candidate):
                continue
            over += 1
            if self._bytes(candidate) <= self.most:
                least, over = candidate, 0
        return least

    def _first(self, fits: Fits) -> Candidate | None:
        """The plan of the least work that fits; None if none does."""
        found = (plans.first(fits) for plans in self.stairs)
        return min(filter(None, found), key=lambda w: w.work, default=None)

    def _untried(self, candidate: Candidate) -> bool:
        """Whether a plan was not compiled for this budget."""
        return key_of(candidate.schedule) not in self.compiled

    def _bytes(self, candidate: Candidate) -> float:
        """Bytes of a plan by the compiler."""
        self.compiled.add(key_of(candidate.schedule))
        return self.compiler.bytes(candidate)

    def _learn(self, candidate: Candidate) -> None:
        """Expect all plans that send, or all others, to exceed their simulations as one did.

        So after one that was over the budget neither that one, nor one whose simulation has as
        many bytes, is expected to fit.
        """
        sends, size = bool(sent_bytes(candidate.schedule)), self._bytes(candidate)
        beyond, known = size - self._simulated(candidate), self.beyond[sends]
        self.beyond[sends] = beyond if known is None else max(known, beyond)
        if sends and size > self.most and len(self.stairs) == 1:
            self.stairs.append(front(dataclasses.replace(self.problem, offload=False)))

    def _expected(self, candidate: Candidate) -> float:
        """Bytes of a plan by its simulation, and by what those before were beyond theirs."""
        return self._simulated(candidate) + (self.beyond[bool(sent_bytes(candidate.schedule))] or 0)

    def _simulated(self, candidate: Candidate) -> float:
        """Bytes of a plan by its simulation, scaled.

        If what it keeps alone is more than is asked about anywhere, by that.
        """
        on, beside = self.problem.device.backend, self.problem.beside
        least = self.scale * (least_bytes(candidate.schedule, on) + beside)
        if least > _NEAR * self.most:
            return least
        return max(least, self.scale * self._peak(candidate))

    def _peak(self, candidate: Candidate) -> int:
        """Simulated bytes of a plan, with the bytes beside the derivative."""
        return self.problem.peak(candidate.schedule) + self.problem.beside
