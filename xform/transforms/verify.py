"""A budget of the peak, held against the compiler.

The simulation, scaled by what the compiler says of the default, says which plans to compile, and
each that takes more than was expected is a lesson for the next. The answers are kept in the
process, which saves time and changes no plan: a search goes by what it asked itself, as if it were
the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable

from xform import alive
from xform.fingerprint import fingerprint, text_of
from xform.interpret.joint import Joint, Plan
from xform.naming import digest
from xform.planner.backend import backend
from xform.planner.candidates.whole import Whole
from xform.planner.costs.outcome import least_bytes, sent_bytes
from xform.planner.front import LOWEST, Ends, Fits
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
# All that a search compiles: the default, the first, and the lowest plans before it refuses.
_MOST = 1 + max(_COMPILES, _FIRST + LOWEST)
# The last of the first is to leave so many times the room that those before show to be needed.
_LAST = 1.5
# Plans with less work than one that is within the budget are compiled too, if their simulation is
# over it by less than this factor: until so many in a row are over.
_NEAR, _OVER = 1.08, 3

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
            alive.progress(f"{self.compiles} of at most {_MOST} candidates compiled")
            size = self._measure(whole)
            self._answers[key] = math.inf if size is None else size
            self.compiles += 1
        return self._answers[key]


def within(ends: Ends, budget: Budget, compiler: Compiler) -> Whole:
    """The plan that the compiler puts within the budget, or `BudgetInfeasible`.

    The default is compiled, and scales the simulation of all others: what it cannot see (arguments
    that are sharded over `Auto` axes) is like in all of them. A budget that the default fits has
    it, but where remat regions may save more. Else the plan of the least work is compiled that is
    expected to be within it; after one that is not, the next leaves room for what that one was off
    by. When one is within the budget, those of less work are compiled: first the one of the least
    that is expected to be within it by what that one took, then also such as were passed over. What
    is over one budget is over all smaller ones: so a smaller one gets a plan of less work only
    where that one was not compiled for the larger.
    """
    default = planned(*ends, min_cut)
    fits = (size := compiler.bytes(default)) <= budget.bytes
    if fits and not may_save_more(budget, default):
        return default
    stairs = _Stairs(ends, compiler, budget.bytes, default)
    first = stairs.within(default if fits else None)
    if first is not None:
        return stairs.least_work(first)
    if fits:
        return default
    floors = front(*ends).lowest()
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
    """The staircase of a program's plans, walked for one budget of so many bytes.

    What a compiler adds to plans that send values to the host (it may copy them into another
    layout) it does not add to others: so these are learned from apart, and as soon as one of them
    takes too much, the plans that there are without a host are looked at too.
    """

    def __init__(self, ends: Ends, compiler: Compiler, most: int, default: Whole):
        self.ends, self.compiler, self.most = ends, compiler, most
        self.stairs, self.compiled = [front(*ends)], set[str]()
        size = compiler.bytes(default)
        self.scale = size / max(compiler.peak(default.plan), 1) if size < math.inf else 1.0
        # How many bytes a plan took beyond its simulation, scaled, at most (negative if all took
        # less): of those that send nothing, and of those that do; None before there is one.
        self.beyond: list[float | None] = [None, None]

    def within(self, default: Whole | None) -> Whole | None:
        """The first plan that is expected to be within the budget, and is.

        None if there is none among the first few, or if it takes no less work than the default.
        """
        for i in range(_FIRST):
            if i == _FIRST - 1:
                self.beyond = [beyond and _LAST * beyond for beyond in self.beyond]
            whole = self._first(lambda w: self._expected(w) <= self.most) or self._first(
                lambda w: self._simulated(w) <= self.most and self._untried(w)
            )
            if whole is None or (default and whole.work >= default.work):
                return None
            if self._bytes(whole) <= self.most:
                return whole
            self._learn(whole)
        return None

    def least_work(self, least: Whole) -> Whole:
        """Of a plan within the budget and the steps before it, that of the least work within it.

        First those that are expected to be within it by what plans took that were compiled.
        """
        over = 0
        self._learn(least)
        while over < _OVER and len(self.compiled) < _COMPILES:
            whole = self._first(lambda w: self._expected(w) <= self.most and self._untried(w))
            if whole is None or whole.work >= least.work:
                break
            over += 1
            if self._bytes(whole) <= self.most:
                least, over = whole, 0
            self._learn(whole)
        nearly = lambda w: self._simulated(w) <= _NEAR * self.most
        before = [w for plans in self.stairs for w in plans.before(least, nearly)]
        over = 0
        for whole in sorted(before, key=self._expected):
            if over == _OVER or len(self.compiled) == _COMPILES:
                break
            if whole.work > least.work or not self._untried(whole):
                continue
            over += 1
            if self._bytes(whole) <= self.most:
                least, over = whole, 0
        return least

    def _first(self, fits: Fits) -> Whole | None:
        """The plan of the least work that fits; None if none does."""
        found = (plans.first(fits) for plans in self.stairs)
        return min(filter(None, found), key=lambda w: w.work, default=None)

    def _untried(self, whole: Whole) -> bool:
        """Whether a plan was not compiled for this budget."""
        return _key(whole.plan) not in self.compiled

    def _bytes(self, whole: Whole) -> float:
        """Bytes of a plan by the compiler."""
        self.compiled.add(_key(whole.plan))
        return self.compiler.bytes(whole)

    def _learn(self, whole: Whole) -> None:
        """Expect all plans that send, or all others, to exceed their simulations as one did.

        So after one that was over the budget neither that one, nor one whose simulation has as
        many bytes, is expected to fit.
        """
        sends, size = bool(sent_bytes(whole.plan)), self._bytes(whole)
        beyond, known = size - self._simulated(whole), self.beyond[sends]
        self.beyond[sends] = beyond if known is None else max(known, beyond)
        if sends and size > self.most and len(self.stairs) == 1:
            self.stairs.append(front(*self.ends, offload=False))

    def _expected(self, whole: Whole) -> float:
        """Bytes of a plan by its simulation, and by what those before were beyond theirs."""
        return self._simulated(whole) + (self.beyond[bool(sent_bytes(whole.plan))] or 0)

    def _simulated(self, whole: Whole) -> float:
        """Bytes of a plan by its simulation, scaled.

        If what it keeps alone is more than is asked about anywhere, by that.
        """
        least = self.scale * (least_bytes(whole.plan, backend()) + self.compiler.beside)
        if least > _NEAR * self.most:
            return least
        return max(least, self.scale * self.compiler.peak(whole.plan))


def _key(plan: Plan) -> str:
    """The same for equal plans of equal programs."""
    if "key" not in plan.cache:
        plan.cache["key"] = digest([text_of(record(choice_of(plan), plan.joint, {}))])
    return plan.cache["key"]
