"""Find plans within a budget for a program whose regions may run in slices.

The default plans without slices come first. If they do not fit, regions around the largest values
become loops over slices: in each derivative that is too large. A few regions are proposed, each
with the most slices, and the peaks of their default plans are simulated. Then the search tries, in
this order:

1. Regions that recompute nothing: losses, whose value and gradient are computed in one loop. The
   ones with the lowest peaks are compiled. If one fits, it gets the fewest slices that fit.
2. Plans that save less, for the program without slices and for those of step 1. The programs whose
   smallest plans have the lowest simulated peaks are searched like any program. The slices of a
   loss may save less for their own backward passes: as much as is expected to fit. Of plans of the
   first kind and of the second, those that recompute less are chosen.
3. Regions that are recomputed in the backward pass, one more in each round. Again those with the
   lowest peaks are compiled, and the smallest program is searched.

The simulation only chooses what is compiled. Its bytes are multiplied by a factor: the compiled
bytes of a program's default plans, divided by their simulated bytes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping

from xform.errors import BudgetInfeasible
from xform.planner.candidate import Candidate
from xform.planner.choice import Choice, ChoiceFront
from xform.planner.problem import Problem
from xform.planner.sliced.decision import describe, regions_of_slices
from xform.planner.sliced.loss import loss_position
from xform.planner.sliced.slice_plan import fewer_saved_bytes, most_saved_bytes
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
BytesOf = Callable[[Choice], float]
# Regions by the key of their derivative, each with the most bytes that its slices save, or None.
_Regions = Mapping[str, tuple[Region, int | None]]


@dataclasses.dataclass(frozen=True, eq=False)
class _Proposal:
    """A program under its default plans, with regions in slices or without.

    Attributes:
      choice: the derivatives, and their default plans.
      bytes_of: returns the bytes of a choice.
      sliced: for each derivative whose region was sliced last, this region with several numbers of
        slices.
      scale: compiled bytes over simulated bytes, of a similar program.
    """

    choice: Choice
    bytes_of: BytesOf
    sliced: Mapping[str, RegionChoice] = dataclasses.field(default_factory=dict)
    scale: float = 1.0

    @property
    def work(self) -> tuple[int, int]:
        """Recomputed FLOPs, then bytes sent to the host."""
        return self.choice.work

    @property
    def peak(self) -> int:
        """The simulated peak."""
        return self.choice.peak

    @property
    def expected(self) -> float:
        """The simulated peak, scaled."""
        return self.scale * self.peak

    @functools.cached_property
    def bytes(self) -> float:
        """The bytes of the plans: compiled, or simulated with a margin."""
        return self.bytes_of(self.choice)

    @functools.cached_property
    def floor(self) -> float:
        """The expected bytes of the smallest plans: their simulated bytes, scaled."""
        smallest = ChoiceFront(self.choice.problems).smallest()[0]
        return self.bytes / self.peak * smallest.peak


def search_slices(
    default: Choice,
    limit: int,
    default_of: PlanProblem,
    search: Callable[[Choice], Choice],
    bytes_of: BytesOf,
) -> Choice:
    """Find plans within `limit` bytes, without slices or else with few.

    Args:
      default: the derivatives without slices, and their default plans.
      limit: the bytes of the budget.
      default_of: returns the default plan of a derivative.
      search: returns plans that fit, from default plans, or raises BudgetInfeasible.
      bytes_of: returns the bytes of a choice: compiled, or simulated with a margin.

    Raises:
      BudgetInfeasible: no plans that were tried fit, with slices or without.
    """
    start = _Proposal(default, bytes_of)
    if start.bytes <= limit:
        return search(default)
    refusals: list[BudgetInfeasible] = []

    def searched(base: _Proposal) -> Choice | None:
        try:
            return search(base.choice)
        except BudgetInfeasible as error:
            refusals.append(_with_slices(error, base.choice))
            return None

    proposals = _proposals(start, default_of, limit)
    free = [p for p in proposals if p.work <= default.work][:_COMPILED]
    if (fitting := _first_fit(free, limit)) is not None:
        return _with_fewest_slices(start, fitting, default_of, limit)
    saving = _with_less_saved(start, free, default_of, limit)
    least_work = sorted((p for p in saving if p.expected <= limit), key=lambda p: p.work)
    fitting = _first_fit(least_work[: _COMPILED + 1], limit)
    bases = sorted([start, *free], key=lambda p: p.floor)[:_SEARCHED]
    for i, base in enumerate(bases):
        wanted = base.floor <= limit if fitting else i == 0 or base.floor <= _NEAR * limit
        if wanted and (found := searched(base)):
            return min(found, fitting.choice if fitting else found, key=lambda c: c.work)
    if fitting is not None:
        return fitting.choice
    if saving and (found := searched(min(saving, key=lambda p: p.expected))):
        return found
    base = min((start, *free), key=lambda p: p.bytes)
    for _ in range(_ROUNDS):
        if base is not start:
            proposals = _proposals(base, default_of, limit)
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
    default: Choice,
    limit: int,
    default_of: PlanProblem,
    search: Callable[[Choice], Choice],
    bytes_of: BytesOf | None,
) -> Choice:
    """Find plans without slices. If none fit, the error says what slices would reach.

    These are the bytes of the program with the regions in slices whose simulated peak is lowest.
    If `bytes_of` is given, the compiler tells them. The other arguments are those of
    `search_slices`. For a program of more than _MAX_EQUATIONS equations, the error does not say it:
    the search for regions would take longer than planning.
    """
    try:
        return search(default)
    except BudgetInfeasible as error:
        if sum(len(p.program.equations) for p in default.problems.values()) > _MAX_EQUATIONS:
            raise
        start = _Proposal(default, bytes_of or (lambda choice: choice.peak))
        smallest = _proposals(start, default_of, limit)[:1]
        least = min((p.bytes for p in smallest), default=error.floor_bytes)
        if least >= error.floor_bytes:
            raise
        measured = "compiled" if bytes_of else "simulated"
        remedy = (
            f"{error.remedy}, or let regions of the program run in slices, with slices=True "
            f"(slices:budget:... as text): that takes {human_bytes(int(least))} ({measured})"
        )
        raise BudgetInfeasible(
            error.request, error.problem, error.where, remedy, error.floor_bytes
        ) from None


def _proposals(base: _Proposal, default_of: PlanProblem, limit: int) -> list[_Proposal]:
    """Return programs with one more region in slices, the lowest simulated peak first.

    Each has the most slices. If several derivatives are too large, each of these has one more
    region in slices: first the best of each, then the second of each, and so on. Regions that
    recompute nothing are also taken together.
    """
    most = limit / base.bytes * base.peak
    large = [k for k, peak in base.choice.peaks.items() if peak > most] or [base.choice.largest]
    alone: dict[str, list[_Proposal]] = {}
    for key in large:
        found = choices(opened(base.choice.problems[key].program))[:_SIMULATED]
        made = [_proposal(base, default_of, {key: c}, {key: (c.regions[-1], None)}) for c in found]
        if made:
            alone[key] = sorted(made, key=lambda p: p.choice.peaks[key])
    if len(alone) < 2:
        return sorted((p for several in alone.values() for p in several), key=lambda p: p.peak)
    free = {k: [p for p in made if p.work <= base.work] for k, made in alone.items()}
    together = [*_zipped(free, base, default_of), *_zipped(alone, base, default_of)]
    return sorted(together, key=lambda p: p.peak)


def _zipped(alone: Mapping[str, list[_Proposal]], base: _Proposal, default_of: PlanProblem
            ) -> list[_Proposal]:  # fmt: skip
    """Return programs with the first proposal of each derivative, then with the second, ..."""
    made: list[_Proposal] = []
    for i in range(max(map(len, alone.values()), default=0)):
        sliced = {k: several[i].sliced[k] for k, several in alone.items() if i < len(several)}
        regions: _Regions = {k: (c.regions[-1], None) for k, c in sliced.items()}
        made.append(_proposal(base, default_of, sliced, regions))
    return made


def _proposal(base: _Proposal, default_of: PlanProblem, sliced: Mapping[str, RegionChoice],
              regions: _Regions) -> _Proposal:  # fmt: skip
    """Return the program with one more region in slices in some derivatives, by default plans."""
    problems = {
        k: dataclasses.replace(p, slices=(*p.slices, decision_for(*regions[k])))
        for k, p in base.choice.problems.items()
        if k in regions
    }
    plans = {k: default_of(problem) for k, problem in problems.items()}
    return _Proposal(base.choice.with_changes(problems, plans), base.bytes_of, sliced)


def _first_fit(proposals: Iterable[_Proposal], limit: int) -> _Proposal | None:
    """Return the first proposal within `limit` bytes; None if no proposal is."""
    return next((p for p in proposals if p.bytes <= limit), None)


def _with_less_saved(
    start: _Proposal, free: Iterable[_Proposal], default_of: PlanProblem, limit: int
) -> list[_Proposal]:
    """Return programs whose slices save less for their own backward passes.

    `free` are programs in slices that recompute nothing and do not fit. The smallest keeps its
    slices. The list is empty if its region is no loss, or if it has several. It has some numbers
    of saved bytes over the whole range, and the most that are expected to fit within `limit`, by
    bisection.
    """
    base = min(free, key=lambda p: p.bytes, default=start)
    if len(base.sliced) != 1:
        return []
    ((key, choice),) = base.sliced.items()
    region = choice.regions[-1]
    if (loss := loss_position(region, start.choice.problems[key].wanted)) is None:
        return []

    def saving(saved: int) -> _Proposal:
        made = _proposal(start, default_of, base.sliced, {key: (region, saved)})
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
    return made if best.work >= made[i].work else [best, *made]


def _with_fewest_slices(
    base: _Proposal, most: _Proposal, default_of: PlanProblem, limit: int
) -> Choice:
    """Return the plans with the fewest slices that fit; `most` has the most slices, and fits.

    The simulation tells the fewest slices of each derivative that are expected to fit. If the
    compiler disagrees, more slices are compiled.
    """
    scale, numbers = most.bytes / most.peak, dict[str, int]()
    known: dict[tuple[int, ...], _Proposal] = {}

    def propose(at: Mapping[str, int]) -> _Proposal:
        """Return the program with the number of slices at these positions."""
        regions = {k: c.regions[min(at[k], len(c.regions) - 1)] for k, c in most.sliced.items()}
        numbers = tuple(region.n for region in regions.values())
        if numbers not in known:
            pairs: _Regions = {k: (region, None) for k, region in regions.items()}
            known[numbers] = _proposal(base, default_of, most.sliced, pairs)
        return known[numbers]

    last = {k: len(c.regions) - 1 for k, c in most.sliced.items()}
    known[tuple(c.regions[-1].n for c in most.sliced.values())] = most
    for key, choice in most.sliced.items():
        positions = {region: i for i, region in enumerate(choice.regions)}
        made = lambda region, key=key, of=positions: propose({**last, **numbers, key: of[region]})
        fewest = fewest_slices(choice, most, made, lambda p: scale * p.peak <= limit)
        n = fewest.choice.problems[key].slices[-1].n
        (numbers[key],) = [i for i, region in enumerate(choice.regions) if region.n == n]
    tried = [{k: i + more for k, i in numbers.items()} for more in range(_FEWEST)]
    return (_first_fit(map(propose, tried), limit) or most).choice


def sliced_regions(problem: Problem) -> tuple[str, ...]:
    """Return a text for each region of a program that runs in slices."""
    regions = regions_of_slices(problem.unsliced, problem.slices, problem.wanted)
    return tuple(describe(region, problem.wanted, decision.saved_bytes)
                 for region, decision in zip(regions, problem.slices, strict=True))  # fmt: skip


def _with_slices(error: BudgetInfeasible, choice: Choice) -> BudgetInfeasible:
    """Return the error of a program, which names its slices if it has any."""
    if not choice.in_slices:
        return error
    rows = [row for problem in choice.problems.values() for row in sliced_regions(problem)]
    return BudgetInfeasible(
        error.request,
        f"{error.problem}, with {'; '.join(rows)}",
        error.where,
        error.remedy,
        error.floor_bytes,
    )
