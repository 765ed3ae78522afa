"""The compiled size of plans. A process compiles each plan of a program once."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable

from xform.interpret.joint import Schedule
from xform.planner.candidate import Candidate
from xform.planner.plan.decision import decision_of
from xform.planner.plan.record import record
from xform.planner.problem import Problem
from xform.program.fingerprint import fingerprint, text_of
from xform.program.naming import digest
from xform.storage.bounded_cache import BoundedCache
from xform.terminal import progress_line

# Limits on the plans that are compiled for a budget, besides the default: FIRST until one of them
# fits, COMPILES in total. Four of the smallest plans are compiled before a budget is refused.
FIRST, COMPILES = 3, 6
_MOST = 1 + max(COMPILES, FIRST + 4)
# Compiled bytes by program, then by plan.
_remembered: BoundedCache[Hashable, dict[str, float]] = BoundedCache(64)


class Compiler:
    """Compiles plans of one program and returns their peak bytes.

    Args:
      problem: the derivative whose plans are compiled.
      measure: compiles one plan and returns its bytes; None if the compiler refuses the plan
        without a size.
      decides: everything else that the bytes depend on, such as the target and donated arguments.

    Attributes:
      compiles: how many programs this object compiled. Sizes that this process already knew do not
        count.
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
        """Compiled bytes of a plan; infinite if the compiler refuses it without a size."""
        key = schedule_key(candidate.schedule)
        if key not in self._answers:
            progress_line.update(f"{self.compiles} of at most {_MOST} candidates compiled")
            size = self._measure(candidate)
            self._answers[key] = math.inf if size is None else size
            self.compiles += 1
        return self._answers[key]


def schedule_key(schedule: Schedule) -> str:
    """A key of a Schedule. Equal decisions for equal programs have equal keys."""
    if "key" not in schedule.cache:
        schedule.cache["key"] = digest([text_of(record(decision_of(schedule), schedule.joint, {}))])
    return schedule.cache["key"]
