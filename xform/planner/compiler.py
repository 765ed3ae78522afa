"""The compiled bytes of plans: each plan of a program is compiled once in a process."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable

from xform import alive
from xform.fingerprint import fingerprint, text_of
from xform.interpret.joint import Joint, Plan
from xform.naming import digest
from xform.planner.candidates.whole import Whole
from xform.planner.front import LOWEST
from xform.planner.plan.choice import choice_of
from xform.planner.plan.record import record
from xform.recent import Recent

# How many plans are compiled, at most, to find one for a budget, besides the default: until one is
# within it, and in all.
FIRST, COMPILES = 5, 6
# All that a search compiles: the default, the first, and the lowest plans before it refuses.
_MOST = 1 + max(COMPILES, FIRST + LOWEST)
# Bytes of compiled plans, by program and plan.
_remembered: Recent[Hashable, dict[str, float]] = Recent(64)


class Compiler:
    """The compiler, asked for the bytes of plans of one program.

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
        key = key_of(whole.plan)
        if key not in self._answers:
            alive.progress(f"{self.compiles} of at most {_MOST} candidates compiled")
            size = self._measure(whole)
            self._answers[key] = math.inf if size is None else size
            self.compiles += 1
        return self._answers[key]


def key_of(plan: Plan) -> str:
    """The same for equal plans of equal programs."""
    if "key" not in plan.cache:
        plan.cache["key"] = digest([text_of(record(choice_of(plan), plan.joint, {}))])
    return plan.cache["key"]
