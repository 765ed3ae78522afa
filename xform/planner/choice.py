"""`Choice`: a plan for each derivative of a program, and the front of all choices.

The program is a training step, or one derivative. Its derivatives share the memory, and they run
one after another. So the peak of a choice is the largest of its derivatives' peaks, and its work is
the sum of their work.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

from xform.errors import BudgetInfeasible
from xform.interpret.joint import Schedule
from xform.planner.candidate import Candidate
from xform.planner.candidates.as_written import has_region_without_policy
from xform.planner.candidates.stock import reference_candidates
from xform.planner.costs.outcome import peak_lower_bound
from xform.planner.front import front
from xform.planner.infeasible import infeasible
from xform.planner.plan.decision import decision_of
from xform.planner.plan.record import record
from xform.planner.problem import Problem
from xform.policies import Budget
from xform.program.fingerprint import text_of
from xform.program.naming import digest

# The derivatives of a program, and a plan for each, by a key.
Problems = Mapping[str, Problem]
Candidates = Mapping[str, Candidate]
# Returns whether a choice fits a budget.
Fits = Callable[["Choice"], bool]


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """A plan for each derivative of a program.

    Attributes:
      problems: the derivatives, by key. There is at least one.
      candidates: their plans.
    """

    problems: Problems
    candidates: Candidates

    @functools.cached_property
    def work(self) -> tuple[int, int]:
        """Recomputed FLOPs, then bytes sent to the host. Choices are ordered by this pair."""
        work = [candidate.work for candidate in self.candidates.values()]
        return sum(flops for flops, _ in work), sum(sent for _, sent in work)

    @functools.cached_property
    def key(self) -> Hashable:
        """What identifies the plans: equal plans of equal programs have equal keys."""
        return plans_key(self.candidates)

    @property
    def offloads(self) -> bool:
        """Whether a plan sends values to the host's memory."""
        return self.work[1] > 0

    @property
    def in_slices(self) -> bool:
        """Whether a plan runs regions in slices."""
        return any(c.slices for c in self.candidates.values())

    @property
    def has_asked_regions(self) -> bool:
        """Whether the plans keep or dissolve remat regions as the problems say."""
        return all(c.regions == self.problems[k].regions for k, c in self.candidates.items())

    @property
    def may_save_in_regions(self) -> bool:
        """Whether a remat region without a policy may save more."""
        return any(has_region_without_policy(c.schedule) for c in self.candidates.values())

    @property
    def peaks(self) -> dict[str, int]:
        """The simulated bytes of each derivative, with the bytes outside of it."""
        return {k: p.peak(self.candidates[k].schedule) + p.outside_bytes
                for k, p in self.problems.items()}  # fmt: skip

    @functools.cached_property
    def peak(self) -> int:
        """The simulated bytes of the program."""
        return max(self.peaks.values())

    @property
    def lower_bound(self) -> int:
        """A lower bound on the simulated bytes, which takes no simulation."""
        return max(
            peak_lower_bound(self.candidates[k].schedule, p.device.backend) + p.outside_bytes
            for k, p in self.problems.items()
        )

    @property
    def largest(self) -> str:
        """The key of the derivative with the largest simulated peak."""
        peaks = self.peaks
        return max(peaks, key=peaks.__getitem__)

    def with_changes(self, problems: Problems, candidates: Candidates) -> Choice:
        """Return this choice with other problems and plans for some derivatives."""
        return Choice({**self.problems, **problems}, {**self.candidates, **candidates})


class ChoiceFront:
    """The choices of plans for a program, in the order of their recomputed FLOPs.

    With one derivative, these are the plans of its front. With several, the first choice has the
    plan of least work for each. In each later choice, the derivative whose peak is largest has the
    next plan of its front, with a smaller peak.
    """

    def __init__(self, problems: Problems):
        self._problems = problems
        self._fronts = {k: front(problem) for k, problem in problems.items()}
        self._choices: list[Choice] = []

    def least_recompute(self, fits: Fits) -> Choice | None:
        """Return the choice with the least recomputation that fits; None if none fits."""
        if len(self._problems) == 1:
            (one,) = self._fronts.values()
            found = one.least_recompute(lambda candidate: fits(self._only(candidate)))
            return found and self._only(found)
        return next(filter(fits, self), None)

    def cheaper(self, last: Choice, fits: Fits) -> Iterator[Choice]:
        """Yield the choices that fit and recompute less than `last`."""
        if len(self._problems) == 1:
            (one,), (candidate,) = self._fronts.values(), last.candidates.values()
            found = one.cheaper(candidate, lambda candidate: fits(self._only(candidate)))
            yield from map(self._only, found)
            return
        for choice in self:
            if choice.work >= last.work:
                return
            if fits(choice):
                yield choice

    def smallest(self) -> list[Choice]:
        """Return the smallest choices, the smallest first."""
        return self._zipped({k: one.smallest() for k, one in self._fronts.items()})

    def references(self) -> list[Choice]:
        """Return choices of plans that a user could have written."""
        return self._zipped({k: reference_candidates(p) for k, p in self._problems.items()})

    def without_offload(self) -> ChoiceFront:
        """Return the front of the plans that offload nothing."""
        kept = {k: dataclasses.replace(p, offload=False) for k, p in self._problems.items()}
        return ChoiceFront(kept)

    def refusal(self, budget: Budget, lowest: Choice, size: int, by: str) -> BudgetInfeasible:
        """Return the error for a budget.

        `lowest` has the lowest peak that was found, of `size` bytes, and `by` says how it was
        measured.
        """
        key, n = lowest.largest, len(lowest.problems)
        if n > 1:
            by += f"; the figures that follow are those of the largest of {n} derivatives"
        outside_bytes = lowest.problems[key].outside_bytes
        return infeasible(budget, lowest.candidates[key].schedule, size, by, outside_bytes)

    def __iter__(self) -> Iterator[Choice]:
        i = 0
        while i < len(self._choices) or self._make_next():
            yield self._choices[i]
            i += 1

    def _make_next(self) -> bool:
        """Make one more choice, if there is one; return whether there is."""
        if not self._choices:
            first = {k: one.least_recompute(lambda _: True) for k, one in self._fronts.items()}
            self._choices.append(self._choice(first))
            return True
        last = self._choices[-1]
        key, problem = last.largest, self._problems[last.largest]
        peak = problem.peak(last.candidates[key].schedule)
        smaller = self._fronts[key].least_recompute(lambda c: problem.peak(c.schedule) < peak)
        if smaller is None:
            return False
        self._choices.append(self._choice({**last.candidates, key: smaller}))
        return True

    def _zipped(self, several: Mapping[str, list[Candidate]]) -> list[Choice]:
        """Return the choice of the first plans of all lists, then of the second plans, and so on.

        The last plan of a shorter list stands for the missing ones.
        """
        n = max(map(len, several.values()))
        return [self._choice({k: plans[min(i, len(plans) - 1)] for k, plans in several.items()})
                for i in range(n)]  # fmt: skip

    def _only(self, candidate: Candidate) -> Choice:
        """Return the choice of a plan for the only derivative."""
        return self._choice(dict.fromkeys(self._problems, candidate))

    def _choice(self, candidates: Any) -> Choice:
        return Choice(self._problems, candidates)


def plans_key(candidates: Candidates) -> Hashable:
    """Return what identifies the plans of a program."""
    return tuple((k, schedule_key(c.schedule)) for k, c in sorted(candidates.items()))


def schedule_key(schedule: Schedule) -> str:
    """Return a text that identifies a plan: equal decisions for equal programs have equal keys.

    A Schedule says which values of a program are saved and which equations are recomputed.
    """
    if "key" not in schedule.cache:
        decisions = record(decision_of(schedule), schedule.joint, {})
        schedule.cache["key"] = digest([text_of((decisions, schedule.sample))])
    return schedule.cache["key"]
