"""The compiled bytes of plans: each plan of a program is compiled once in a process."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable

from xform import alive
from xform.fingerprint import fingerprint, text_of
from xform.interpret.joint import Schedule
from xform.naming import digest
from xform.planner.candidate import Candidate
from xform.planner.plan.decision import decision_of
from xform.planner.plan.record import record
from xform.planner.problem import Problem
from xform.recent import Recent

# How many plans are compiled, at most, to find one for a budget, besides the default: until one is
# within it, and in all. Before a budget is refused, four of the lowest plans are compiled.
FIRST, COMPILES = 3, 6
_MOST = 1 + max(COMPILES, FIRST + 4)
# Bytes of compiled plans, by program and plan.
_remembered: Recent[Hashable, dict[str, float]] = Recent(64)


class Compiler:
    """The compiler, asked for the bytes of plans of one program.

    Args:
      problem: the derivative whose plans are compiled.
      measure: bytes of a plan by the compiler, which is run for it; None if it does not say them.
      decides: all else that a plan's bytes depend on: the target, what is donated.

    Attributes:
      compiles: how many programs were compiled; others had been, in this process.
    """

    def __init__(
        self, problem: Problem, measure: Callable[[Candidate], int | None], *decides: Hashable
    ) -> None:
        self._measure = measure
        joint = problem.joint()
        key = fingerprint(joint.program), joint.active, joint.seeded, *decides
        _remembered[key] = self._answers = _remembered.get(key, {})
        self.compiles = 0

    def bytes(self, candidate: Candidate) -> float:
        """Bytes of a plan's program, compiled; infinite if the compiler refuses it without them."""
        key = key_of(candidate.schedule)
        if key not in self._answers:
            alive.progress(f"{self.compiles} of at most {_MOST} candidates compiled")
            size = self._measure(candidate)
            self._answers[key] = math.inf if size is None else size
            self.compiles += 1
        return self._answers[key]


def key_of(schedule: Schedule) -> str:
    """The same for equal plans of equal programs."""
    if "key" not in schedule.cache:
        schedule.cache["key"] = digest([text_of(record(decision_of(schedule), schedule.joint, {}))])
    return schedule.cache["key"]
