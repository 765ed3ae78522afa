"""Compile plans to learn their peak bytes. A process compiles each plan of a program once."""

from __future__ import annotations

import math
import time
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

# Limits on the plans that are compiled for a budget, besides the default: MAX_FIRST_COMPILES until
# one of them fits, and MAX_COMPILES in total. Before a budget is refused, MAX_BEFORE_REFUSAL plans
# are compiled at most, the default among them.
MAX_FIRST_COMPILES, MAX_COMPILES, MAX_BEFORE_REFUSAL = 3, 6, 8
# Compiled bytes by program, then by plan.
_compiled_bytes: BoundedCache[Hashable, dict[str, float]] = BoundedCache(64)


class Compiler:
    """Compiles plans of one program and returns their peak bytes.

    Args:
      problem: the derivative whose plans are compiled.
      measure: compiles one plan and returns its bytes; None if the compiler refuses the plan
        without telling a size.
      dependencies: everything else that the bytes depend on, such as the target and donated
        arguments.

    Attributes:
      compiles: how many programs this object compiled. Plans whose bytes this process already knew
        do not count.
      seconds: the time that these compilations took.
    """

    def __init__(
        self, problem: Problem, measure: Callable[[Candidate], int | None], *dependencies: Hashable
    ) -> None:
        self._measure = measure
        joint = problem.joint()
        key = fingerprint(joint.program), joint.active, joint.seeded, *dependencies
        _compiled_bytes[key] = self._bytes_of_plan = _compiled_bytes.get(key, {})
        self.compiles, self.seconds = 0, 0.0

    def bytes(self, candidate: Candidate) -> float:
        """Return the compiled bytes of a plan; infinite if it is refused without a size."""
        key = schedule_key(candidate.schedule)
        if key not in self._bytes_of_plan:
            done = f"{self.compiles} of at most {MAX_BEFORE_REFUSAL}"
            progress_line.update(f"{done} candidates compiled")
            start = time.perf_counter()
            size = self._measure(candidate)
            self.seconds += time.perf_counter() - start
            self._bytes_of_plan[key] = math.inf if size is None else size
            self.compiles += 1
        return self._bytes_of_plan[key]


def schedule_key(schedule: Schedule) -> str:
    """Return a text that identifies a plan: equal decisions for equal programs have equal keys.

    A Schedule says which values of a program are saved and which equations are recomputed.
    """
    if "key" not in schedule.cache:
        decisions = record(decision_of(schedule), schedule.joint, {})
        schedule.cache["key"] = digest([text_of((decisions, schedule.sample))])
    return schedule.cache["key"]
