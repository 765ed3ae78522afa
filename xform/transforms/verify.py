"""A budget of the peak, held against the compiler.

The simulation, scaled by what the compiler says of the default, says which plans to compile. The
answers are kept in the process, which saves time and changes no plan: a search goes by what it
asked itself, as if it were the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable

from xform.fingerprint import fingerprint, said
from xform.interpret.joint import Joint, Plan
from xform.naming import digest
from xform.planner.backend import backend
from xform.planner.candidates.whole import Whole
from xform.planner.costs.outcome import least_bytes
from xform.planner.plan.choice import choice_of
from xform.planner.plan.record import record
from xform.planner.planned import front, may_save_more
from xform.planner.refused import infeasible
from xform.policies import Budget, min_cut
from xform.recent import Recent
from xform.text import human_bytes
from xform.transforms.inspect import At

# How many plans are compiled, at most, to find one for a budget, besides the default.
_COMPILES = 5
# A plan with less work than one that fits is compiled too, if it is over by less than this factor.
_NEAR = 1.08

# Bytes of compiled plans, by program and plan.
_remembered: Recent[Hashable, dict[str, float]] = Recent(64)


class Compiler:
    """What the compiler says of plans of one program.

    Args:
      as_written: the program, with its loops as they are.
      peak: bytes of a plan by the simulation.
      spared: bytes of arguments that are donated, which are not in a peak.
      measure: bytes of a plan by the compiler, which is run for it; None if it does not say them.
      decides: what a plan's bytes depend on besides the plan: the backend, what is donated.

    Attributes:
      compiles: how many programs were compiled; others had been, in this process.
    """

    def __init__(self, as_written: Joint, peak: Callable[[Plan], int], spared: int,
                 measure: Callable[[Whole], int | None], *decides: Hashable) -> None:  # fmt: skip
        self.peak, self.spared, self._measure = peak, spared, measure
        program = fingerprint(as_written.program), as_written.active, as_written.seeded
        key = (*program, *decides)
        _remembered[key] = self._answers = _remembered.get(key, {})
        self._asked: set[str] = set()
        self.compiles = 0

    def bytes(self, whole: Whole) -> float:
        """Bytes of a plan's program, compiled; infinite if the compiler refuses it without them."""
        key = _key(whole.how)
        if key not in self._answers:
            said = self._measure(whole)
            self._answers[key] = math.inf if said is None else said
            self.compiles += 1
        self._asked.add(key)
        return self._answers[key]

    def known(self, how: Plan) -> float | None:
        """The bytes of a plan of which was asked."""
        key = _key(how)
        return self._answers[key] if key in self._asked else None


def within(at: At, budget: Budget, compiler: Compiler) -> Whole:
    """The plan that the compiler puts within the budget, or `BudgetInfeasible`.

    The default is compiled, and scales the simulation of all others: what it cannot see (arguments
    that are sharded over `Auto` axes) is like in all of them. Those that it puts within the budget
    are compiled by rising work, until one is; then the one before it, if it is nearly within. One
    that the default fits has it, but where remat regions may save more.
    """
    default, plans = at.planned(min_cut), front(*at.ends)
    fits = (size := compiler.bytes(default)) <= budget.bytes
    if fits and not may_save_more(budget, default):
        return default
    scale = size / max(compiler.peak(default.how), 1) if size < math.inf else 1.0
    tried: list[Whole] = []

    def expected(whole: Whole, most: float) -> bool:
        if (known := compiler.known(whole.how)) is not None:
            return known <= most
        least = least_bytes(whole.how, backend()) - compiler.spared
        return scale * least <= most and scale * compiler.peak(whole.how) <= most

    for i in range(_COMPILES):
        if i == _COMPILES - 1:  # as far off as the worst of those before
            scale = max(compiler.bytes(w) / max(compiler.peak(w.how), 1) for w in tried)
        whole = plans.first(lambda w: expected(w, budget.bytes))
        if whole is None or (fits and whole.work >= default.work):
            break
        tried.append(whole)
        if compiler.bytes(whole) <= budget.bytes:
            less = plans.first(lambda w: expected(w, _NEAR * budget.bytes))
            if less is None or less.work >= whole.work or compiler.bytes(less) > budget.bytes:
                return whole
            return less
    if fits:
        return default
    floors = plans.lowest()
    least = min((*floors, default), key=lambda w: compiler.bytes(w))
    if (size := compiler.bytes(least)) <= budget.bytes:
        return least
    simulated = compiler.peak(floors[0].how)
    if size == math.inf:
        raise infeasible(budget, floors[0].how, simulated, "simulated; the compiler refuses it")
    by = f"compiled; {human_bytes(simulated)} simulated"
    raise infeasible(budget, least.how, int(size), by)


def _key(how: Plan) -> str:
    """The same for equal plans of equal programs."""
    if "key" not in how.cache:
        how.cache["key"] = digest([said(record(choice_of(how), how.joint, {}))])
    return how.cache["key"]
