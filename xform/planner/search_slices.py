"""Find a plan within a budget for a program whose regions may run in slices.

The program without slices comes first. If no plan of it fits, regions around its largest values
become loops over slices, one region more in each round. A round makes a few proposals, each with
the most slices, and simulates their peaks under the default plan. The proposals with the lowest
peaks are compiled. Of those that fit, the one that recomputes least is taken, with the fewest
slices that fit. If none fits, the smallest one is searched like any program: its plans may save
less. If that fails too, the next round slices one more region of it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

from xform.errors import BudgetInfeasible
from xform.planner.candidate import Candidate
from xform.planner.problem import Problem
from xform.planner.sliced.decision import describe, regions_of_slices
from xform.policies import Budget
from xform.slices.candidates import RegionChoice, choices, fewest_slices
from xform.slices.decision import decision_for
from xform.slices.opened import opened
from xform.slices.region import Region
from xform.terminal.text import human_bytes

# How many regions are simulated in each round, how many of these are compiled, and how many rounds.
_SIMULATED, _COMPILED, _ROUNDS = 5, 3, 3
# A region must lower the bytes at least by this factor to stay in slices.
_GAIN = 0.97

PlanProblem = Callable[[Problem], Candidate]


class _Proposal(NamedTuple):
    """A program with one more region in slices, under the default plan.

    Attributes:
      choice: the region, with several numbers of slices.
      problem: the derivative of the program.
      candidate: its default plan.
    """

    choice: RegionChoice
    problem: Problem
    candidate: Candidate

    @property
    def peak(self) -> int:
        """The simulated peak of the plan."""
        return self.problem.peak(self.candidate.schedule)


def search_slices(
    problem: Problem,
    budget: Budget,
    default: Candidate,
    default_of: PlanProblem,
    search: Callable[[Problem, Candidate], Candidate],
    bytes_of: Callable[[Problem, Candidate], float],
) -> Candidate:
    """Find a plan within a budget, without slices or else with few.

    Args:
      problem: the derivative, without slices.
      budget: the budget of the peak.
      default: the default plan of `problem`.
      default_of: returns the default plan of a derivative.
      search: returns a plan of a derivative that fits, from its default plan, or raises
        BudgetInfeasible.
      bytes_of: returns the bytes of a plan of a derivative: compiled, or simulated with a margin.

    Raises:
      BudgetInfeasible: no plan that was tried fits, with slices or without.
    """
    try:
        return search(problem, default)
    except BudgetInfeasible as error:
        refusal = error
    base, base_bytes = problem, bytes_of(problem, default)
    for _ in range(_ROUNDS):
        proposals = _proposals(base, default_of)
        sizes = [bytes_of(p.problem, p.candidate) for p in proposals]
        fitting = [p for p, size in zip(proposals, sizes, strict=True) if size <= budget.bytes]
        if fitting:
            best = min(fitting, key=lambda p: p.candidate.work)
            fits = lambda p: bytes_of(p.problem, p.candidate) <= budget.bytes
            propose = functools.partial(_proposal, base, default_of, best.choice)
            return fewest_slices(best.choice, best, propose, fits).candidate
        least = min(sizes, default=math.inf)
        if least > _GAIN * base_bytes:
            break
        best = proposals[sizes.index(least)]
        try:
            return search(best.problem, best.candidate)
        except BudgetInfeasible as error:
            if 0 < error.floor_bytes < (refusal.floor_bytes or math.inf):
                refusal = _with_slices(error, best.problem)
        base, base_bytes = best.problem, least
    raise refusal


def search_unsliced(
    problem: Problem,
    default: Candidate,
    default_of: PlanProblem,
    search: Callable[[Problem, Candidate], Candidate],
) -> Candidate:
    """Find a plan without slices. If none fits, the error says what slices would reach.

    That is the lowest simulated peak of the program with one region in slices, if it is below the
    lowest peak without slices. The arguments are those of `search_slices`.
    """
    try:
        return search(problem, default)
    except BudgetInfeasible as error:
        peaks = (proposal.peak for proposal in _proposals(problem, default_of))
        least = min(peaks, default=math.inf) + problem.outside_bytes
        if least >= error.floor_bytes:
            raise
        remedy = (
            f"{error.remedy}, or let regions of the program run in slices, with slices=True: that "
            f"takes {human_bytes(int(least))} (simulated)"
        )
        raise BudgetInfeasible(
            error.request, error.problem, error.where, remedy, error.floor_bytes
        ) from None


def _proposals(base: Problem, default_of: PlanProblem) -> list[_Proposal]:
    """Return programs with one more region in slices, by their simulated peak under their default.

    Each has the most slices.
    """
    made = [_proposal(base, default_of, choice, choice.regions[-1])
            for choice in choices(opened(base.program))[:_SIMULATED]]  # fmt: skip
    return sorted(made, key=lambda p: p.peak)[:_COMPILED]


def _proposal(
    base: Problem, default_of: PlanProblem, choice: RegionChoice, region: Region
) -> _Proposal:
    """Return the program with one more region in slices, under its default plan."""
    problem = dataclasses.replace(base, slices=(*base.slices, decision_for(region)))
    return _Proposal(choice, problem, default_of(problem))


def sliced_regions(problem: Problem) -> tuple[str, ...]:
    """Return a text for each region of a program that runs in slices."""
    return tuple(map(describe, regions_of_slices(problem.unsliced, problem.slices)))


def _with_slices(error: BudgetInfeasible, problem: Problem) -> BudgetInfeasible:
    """Return the error of a program in slices; the message names the slices."""
    return BudgetInfeasible(
        error.request,
        f"{error.problem}, with {'; '.join(sliced_regions(problem))}",
        error.where,
        error.remedy,
        error.floor_bytes,
    )
