"""Find a plan within a budget for a program whose regions may run in slices.

The default plan of the program without slices comes first. If it does not fit, regions around the
largest values become loops over slices. A few regions are proposed, each with the most slices, and
the peaks of their default plans are simulated. Then the search tries, in this order:

1. Regions that recompute nothing: losses, whose value and gradient are computed in one loop. The
   ones with the lowest peaks are compiled. If one fits, it gets the fewest slices that fit.
2. Plans that save less, for the program without slices and for those of step 1. The programs whose
   smallest plans have the lowest simulated peaks are searched like any program. The slices of a
   loss may save less for their own backward passes: as much as is expected to fit. Of a plan of the
   first kind and one of the second, the one that recomputes less is chosen.
3. Regions that are recomputed in the backward pass, one more in each round. Again those with the
   lowest peaks are compiled, and the smallest program is searched.

The simulation only chooses what is compiled. Its bytes are multiplied by a factor: the compiled
bytes of a program's default plan, divided by its simulated bytes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable

from xform.errors import BudgetInfeasible
from xform.planner.candidate import Candidate
from xform.planner.front import front
from xform.planner.problem import Problem
from xform.planner.sliced.decision import describe, regions_of_slices
from xform.planner.sliced.loss import loss_position
from xform.planner.sliced.slice_plan import fewer_saved_bytes, most_saved_bytes
from xform.policies import Budget
from xform.slices.candidates import RegionChoice, choices, fewest_slices
from xform.slices.decision import decision_for
from xform.slices.opened import opened
from xform.slices.region import Region
from xform.terminal.text import human_bytes

# How many regions are simulated in each round, how many of these are compiled, and how many regions
# that are recomputed run in slices.
_SIMULATED, _COMPILED, _ROUNDS = 5, 2, 2
# How many programs are searched for plans that save less, and how far the scaled simulated bytes of
# the smallest plan of the second may be above the budget.
_SEARCHED, _NEAR = 2, 1.05
# How often the bytes that a slice saves are bisected, for the most that are expected to fit.
_BISECTIONS = 4
# A region must lower the bytes at least by this factor to stay in slices.
_GAIN = 0.97
# How many numbers of slices are compiled to find the fewest that fit.
_FEWEST = 3
# Of larger programs, a refusal does not say what slices would reach.
_MAX_EQUATIONS = 20_000

PlanProblem = Callable[[Problem], Candidate]
BytesOf = Callable[[Problem, Candidate], float]


@dataclasses.dataclass(frozen=True, eq=False)
class _Proposal:
    """A program under its default plan, with regions in slices or without.

    Attributes:
      problem: the derivative of the program.
      candidate: its default plan.
      bytes_of: returns the bytes of a plan of a derivative.
      choice: the region that was sliced last, with several numbers of slices; None if there is no
        region in slices.
      scale: compiled bytes over simulated bytes, of a similar program.
    """

    problem: Problem
    candidate: Candidate
    bytes_of: BytesOf
    choice: RegionChoice | None = None
    scale: float = 1.0

    @property
    def expected(self) -> float:
        """The simulated peak, scaled."""
        return self.scale * self.peak

    @functools.cached_property
    def peak(self) -> int:
        """The simulated peak."""
        return simulated_bytes(self.problem, self.candidate)

    @functools.cached_property
    def bytes(self) -> float:
        """The bytes of the plan: compiled, or simulated with a margin."""
        return self.bytes_of(self.problem, self.candidate)

    @functools.cached_property
    def floor(self) -> float:
        """The expected bytes of the smallest plan: its simulated bytes, scaled."""
        smallest = front(self.problem).smallest()[0]
        return self.bytes / self.peak * simulated_bytes(self.problem, smallest)


def search_slices(
    problem: Problem,
    budget: Budget,
    default: Candidate,
    default_of: PlanProblem,
    search: Callable[[Problem, Candidate], Candidate],
    bytes_of: BytesOf,
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
    limit = budget.bytes
    start = _Proposal(problem, default, bytes_of)
    if start.bytes <= limit:
        return search(problem, default)
    refusals: list[BudgetInfeasible] = []

    def searched(base: _Proposal) -> Candidate | None:
        try:
            return search(base.problem, base.candidate)
        except BudgetInfeasible as error:
            refusals.append(_with_slices(error, base.problem))
            return None

    proposals = _proposals(start, default_of)
    free = [p for p in proposals if p.candidate.work <= default.work][:_COMPILED]
    if (fitting := _first_fit(free, limit)) is not None:
        return _with_fewest_slices(start, fitting, default_of, limit)
    saving = _with_less_saved(start, free, default_of, limit)
    least_work = sorted((p for p in saving if p.expected <= limit), key=lambda p: p.candidate.work)
    fitting = _first_fit(least_work[: _COMPILED + 1], limit)
    bases = sorted([start, *free], key=lambda p: p.floor)[:_SEARCHED]
    for i, base in enumerate(bases):
        wanted = base.floor <= limit if fitting else i == 0 or base.floor <= _NEAR * limit
        if wanted and (found := searched(base)):
            return min(found, fitting.candidate if fitting else found, key=lambda c: c.work)
    if fitting is not None:
        return fitting.candidate
    if saving and (found := searched(min(saving, key=lambda p: p.expected))):
        return found
    base = min((start, *free), key=lambda p: p.bytes)
    for _ in range(_ROUNDS):
        if base is not start:
            proposals = _proposals(base, default_of)
        rest = [p for p in proposals if p not in free][:_COMPILED]
        if (fitting := _first_fit(rest, limit)) is not None:
            return _with_fewest_slices(base, fitting, default_of, limit)
        smallest = min(rest, key=lambda p: p.bytes, default=base)
        if smallest.bytes > _GAIN * base.bytes:
            break
        base = smallest
        if found := searched(base):
            return found
    raise min(refusals, key=lambda error: error.floor_bytes)


def search_unsliced(
    problem: Problem,
    default: Candidate,
    default_of: PlanProblem,
    search: Callable[[Problem, Candidate], Candidate],
    compiled_bytes: BytesOf | None,
) -> Candidate:
    """Find a plan without slices. If none fits, the error says what slices would reach.

    These are the bytes of the program with the region in slices whose simulated peak is lowest. If
    `compiled_bytes` is given, the compiler tells them. The other arguments are those of
    `search_slices`. For a program of more than _MAX_EQUATIONS equations, the error does not say it:
    the search for regions would take longer than planning.
    """
    try:
        return search(problem, default)
    except BudgetInfeasible as error:
        if len(problem.program.equations) > _MAX_EQUATIONS:
            raise
        start = _Proposal(problem, default, compiled_bytes or simulated_bytes)
        smallest = _proposals(start, default_of)[:1]
        least = min((p.bytes for p in smallest), default=error.floor_bytes)
        if least >= error.floor_bytes:
            raise
        measured = "compiled" if compiled_bytes else "simulated"
        remedy = (
            f"{error.remedy}, or let regions of the program run in slices, with slices=True "
            f"(slices:budget:... as text): that takes {human_bytes(int(least))} ({measured})"
        )
        raise BudgetInfeasible(
            error.request, error.problem, error.where, remedy, error.floor_bytes
        ) from None


def loss_in_slices(
    problem: Problem, default: Candidate, default_of: PlanProblem, limit: int
) -> tuple[Candidate, Candidate]:
    """Return default plans with a region in slices that recomputes nothing, by simulation alone.

    The region is the one with the lowest peak. It has the fewest slices whose simulated bytes are
    at most `limit` in the first plan, and the most slices in the second. Both are `default` if no
    such region lowers the peak.
    """
    start = _Proposal(problem, default, simulated_bytes)
    proposals = _proposals(start, default_of)
    free = [p for p in proposals if p.candidate.work <= default.work and p.peak < start.peak]
    if not free:
        return default, default
    most = free[0]
    assert most.choice is not None
    propose = lambda region: _proposal(start, default_of, most.choice, region)
    fewest = fewest_slices(most.choice, most, propose, lambda p: p.peak <= limit)
    return fewest.candidate, most.candidate


def simulated_bytes(problem: Problem, candidate: Candidate) -> int:
    """Return the simulated bytes of a plan, with the bytes outside the derivative."""
    return problem.peak(candidate.schedule) + problem.outside_bytes


def _proposals(base: _Proposal, default_of: PlanProblem) -> list[_Proposal]:
    """Return programs with one more region in slices, the lowest simulated peak first.

    Each has the most slices.
    """
    made = [_proposal(base, default_of, choice, choice.regions[-1])
            for choice in choices(opened(base.problem.program))[:_SIMULATED]]  # fmt: skip
    return sorted(made, key=lambda p: p.peak)


def _proposal(
    base: _Proposal, default_of: PlanProblem, choice: RegionChoice | None, region: Region,
    saved_bytes: int | None = None,
) -> _Proposal:  # fmt: skip
    """Return the program with one more region in slices, under its default plan.

    `saved_bytes` is as in `SlicedValue`.
    """
    slices = (*base.problem.slices, decision_for(region, saved_bytes))
    problem = dataclasses.replace(base.problem, slices=slices)
    return _Proposal(problem, default_of(problem), base.bytes_of, choice)


def _first_fit(proposals: Iterable[_Proposal], limit: int) -> _Proposal | None:
    """Return the first proposal within `limit` bytes; None if no proposal is."""
    return next((p for p in proposals if p.bytes <= limit), None)


def _with_less_saved(
    start: _Proposal, free: Iterable[_Proposal], default_of: PlanProblem, limit: int
) -> list[_Proposal]:
    """Return programs whose slices save less for their own backward passes.

    `free` are programs in slices that recompute nothing and do not fit. The smallest keeps its
    slices. If its region is no loss, the list is empty. The list has some numbers of saved bytes
    over the whole range, and the most that are expected to fit within `limit`, by bisection.
    """
    base = min(free, key=lambda p: p.bytes, default=start)
    if base.choice is None:
        return []
    region = base.choice.regions[-1]
    if (loss := loss_position(region, start.problem.wanted)) is None:
        return []

    def saving(saved: int) -> _Proposal:
        made = _proposal(start, default_of, base.choice, region, saved)
        return dataclasses.replace(made, scale=base.bytes / base.peak)

    numbers = fewer_saved_bytes(region, loss)
    made = [saving(n) for n in numbers]
    fitting = [i for i, p in enumerate(made) if p.expected <= limit]
    if not fitting:
        return made
    i = fitting[0]
    low, high, best = numbers[i], numbers[i - 1] if i else most_saved_bytes(region, loss), made[i]
    for _ in range(_BISECTIONS):
        middle = (low + high) // 2
        if (more := saving(middle)).expected <= limit:
            low, best = middle, more
        else:
            high = middle
    return made if best.candidate.work >= made[i].candidate.work else [best, *made]


def _with_fewest_slices(
    base: _Proposal, most: _Proposal, default_of: PlanProblem, limit: int
) -> Candidate:
    """Return the plan with the fewest slices that fits; `most` has the most slices, and fits.

    The simulation tells the fewest slices that are expected to fit. If the compiler disagrees, more
    slices are compiled.
    """
    choice = most.choice
    assert choice is not None
    made: dict[Region, _Proposal] = {choice.regions[-1]: most}

    def propose(region: Region) -> _Proposal:
        if region not in made:
            made[region] = _proposal(base, default_of, choice, region)
        return made[region]

    expected = lambda p: most.bytes / most.peak * p.peak <= limit
    fewest = fewest_slices(choice, most, propose, expected)
    (i,) = [i for i, region in enumerate(choice.regions) if made.get(region) is fewest]
    tried = choice.regions[i : i + _FEWEST]
    return (_first_fit(map(propose, tried), limit) or most).candidate


def sliced_regions(problem: Problem) -> tuple[str, ...]:
    """Return a text for each region of a program that runs in slices."""
    regions = regions_of_slices(problem.unsliced, problem.slices, problem.wanted)
    return tuple(describe(region, problem.wanted, decision.saved_bytes)
                 for region, decision in zip(regions, problem.slices, strict=True))  # fmt: skip


def _with_slices(error: BudgetInfeasible, problem: Problem) -> BudgetInfeasible:
    """Return the error of a program, which names its slices if it has any."""
    if not problem.slices:
        return error
    return BudgetInfeasible(
        error.request,
        f"{error.problem}, with {'; '.join(sliced_regions(problem))}",
        error.where,
        error.remedy,
        error.floor_bytes,
    )
