"""A budget of the peak, held against the compiler.

The simulation, scaled by what the compiler says of the default, says which plans to compile. The
answers are kept in the process, which saves time and changes no plan: a search goes by what it
asked itself, as if it were the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable

from xform.fingerprint import fingerprint, text_of
from xform.interpret.joint import Joint, Plan
from xform.naming import digest
from xform.planner.backend import backend
from xform.planner.candidates.whole import Whole
from xform.planner.costs.outcome import least_bytes
from xform.planner.front import Ends, Front
from xform.planner.plan.choice import choice_of
from xform.planner.plan.record import record
from xform.planner.planned import front, may_save_more, planned
from xform.planner.refused import infeasible
from xform.policies import Budget, min_cut
from xform.recent import Recent
from xform.text import human_bytes

# How many plans are compiled, at most, to find one for a budget, besides the default: until one is
# within it, and in all.
_FIRST, _COMPILES = 5, 6
# Plans with less work than one that is within the budget are compiled too, if they are expected to
# be over it by less than this factor: until so many in a row are over.
_NEAR, _OVER = 1.08, 2

# Bytes of compiled plans, by program and plan.
_remembered: Recent[Hashable, dict[str, float]] = Recent(64)


class Compiler:
    """What the compiler says of plans of one program.

    Args:
      as_written: the program, with its loops as they are.
      peak: bytes of a plan by the simulation.
      beside: bytes of a peak that are not the derivative's.
      measure: bytes of a plan by the compiler, which is run for it; None if it does not say them.
      decides: what a plan's bytes depend on besides the plan: the backend, what is donated.

    Attributes:
      compiles: how many programs were compiled; others had been, in this process.
    """

    def __init__(self, as_written: Joint, peak: Callable[[Plan], int], beside: int,
                 measure: Callable[[Whole], int | None], *decides: Hashable) -> None:  # fmt: skip
        self.peak, self.beside, self._measure = peak, beside, measure
        program = fingerprint(as_written.program), as_written.active, as_written.seeded
        key = (*program, *decides)
        _remembered[key] = self._answers = _remembered.get(key, {})
        self.compiles = 0

    def bytes(self, whole: Whole) -> float:
        """Bytes of a plan's program, compiled; infinite if the compiler refuses it without them."""
        key = _key(whole.plan)
        if key not in self._answers:
            size = self._measure(whole)
            self._answers[key] = math.inf if size is None else size
            self.compiles += 1
        return self._answers[key]


def within(ends: Ends, budget: Budget, compiler: Compiler) -> Whole:
    """The plan that the compiler puts within the budget, or `BudgetInfeasible`.

    The default is compiled, and scales the simulation of all others: what it cannot see (arguments
    that are sharded over `Auto` axes) is like in all of them. A budget that the default fits has
    it, but where remat regions may save more. Else the plans are compiled by rising work until one
    is within the budget, and then those before it on the staircase, as long as they are. What is
    over one budget is over all smaller ones: so a smaller one gets no plan of less work.
    """
    default, plans = planned(*ends, min_cut), front(*ends)
    fits = (size := compiler.bytes(default)) <= budget.bytes
    if fits and not may_save_more(budget, default):
        return default
    stairs = _Stairs(plans, compiler, budget.bytes, default)
    first = stairs.within(default if fits else None)
    if first is not None:
        return stairs.least_work(first)
    if fits:
        return default
    floors = plans.lowest()
    for whole in reversed(floors):
        if compiler.bytes(whole) <= budget.bytes:
            return whole
    least = min((*floors, default), key=compiler.bytes)
    simulated = compiler.peak(floors[0].plan)
    if (size := compiler.bytes(least)) == math.inf:
        by = "simulated; the compiler refuses it"
        raise infeasible(budget, floors[0].plan, simulated, by, compiler.beside)
    by = f"compiled; {human_bytes(simulated)} simulated"
    raise infeasible(budget, least.plan, int(size), by, compiler.beside)


class _Stairs:
    """The staircase of a program's plans, walked for one budget of so many bytes."""

    def __init__(self, plans: Front, compiler: Compiler, most: int, default: Whole):
        self.plans, self.compiler, self.most = plans, compiler, most
        self.scale, self.compiled = self._ratio(default), 0

    def within(self, default: Whole | None) -> Whole | None:
        """The first plan that is expected to be within the budget, and is.

        None if there is none among the first few, or if it takes no less work than the default.
        """
        over: list[Whole] = []
        for i in range(_FIRST):
            if i == _FIRST - 1:  # as far off as the worst of those before
                self.scale = max(map(self._ratio, over))
            whole = self.plans.first(lambda w: w not in over and self._expected(w, self.most))
            if whole is None or (default and whole.work >= default.work):
                return None
            if self._bytes(whole) <= self.most:
                return whole
            over.append(whole)
        return None

    def least_work(self, least: Whole) -> Whole:
        """Of a plan within the budget and the steps before it, the first that is within it."""
        over = 0
        for whole in self.plans.before(least, lambda w: self._expected(w, _NEAR * self.most)):
            if over == _OVER or self.compiled == _COMPILES:
                break
            over += 1
            if self._bytes(whole) <= self.most:
                least, over = whole, 0
        return least

    def _bytes(self, whole: Whole) -> float:
        self.compiled += 1
        return self.compiler.bytes(whole)

    def _ratio(self, whole: Whole) -> float:
        """Bytes by the compiler, for each that is simulated."""
        size = self.compiler.bytes(whole)
        return size / max(self.compiler.peak(whole.plan), 1) if size < math.inf else 1.0

    def _expected(self, whole: Whole, most: float) -> bool:
        """Whether a plan takes at most so many bytes by its simulation.

        It is not simulated if what it keeps alone is too much.
        """
        least = least_bytes(whole.plan, backend()) + self.compiler.beside
        return self.scale * least <= most and self.scale * self.compiler.peak(whole.plan) <= most


def _key(plan: Plan) -> str:
    """The same for equal plans of equal programs."""
    if "key" not in plan.cache:
        plan.cache["key"] = digest([text_of(record(choice_of(plan), plan.joint, {}))])
    return plan.cache["key"]
