"""The planner that reverse mode calls: `plan_program`, or a replacement that observes it."""

from __future__ import annotations

import contextvars
import dataclasses
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from xform.planner.candidate import Candidate
from xform.planner.compiler import Compiler
from xform.planner.costs.outcome import recompute_flops
from xform.planner.plan_program import plan_program
from xform.planner.problem import Problem
from xform.policies import Policy
from xform.terminal.text import human_flops, human_seconds

# Plans a problem under a policy. The compiler, if it is not None, measures the plans.
Planner = Callable[[Problem, Policy, Compiler | None], Candidate]

_PLANNER: contextvars.ContextVar[Planner] = contextvars.ContextVar("planner", default=plan_program)


def current_planner() -> Planner:
    """The planner in use: `plan_program`, unless `use_planner` has replaced it."""
    return _PLANNER.get()


@contextmanager
def use_planner(planner: Planner) -> Generator[None]:
    """A context manager: reverse mode inside it uses this planner."""
    before = _PLANNER.set(planner)
    try:
        yield
    finally:
        _PLANNER.reset(before)


@dataclasses.dataclass
class PlanningCost:
    """How many plans were made, how long that took, and the FLOPs that the plans recompute."""

    plans: int = 0
    seconds: float = 0.0
    flops: int = 0

    def __str__(self) -> str:
        if not self.plans:
            return ""
        return f"{human_flops(self.flops)} recomputed, planned in {human_seconds(self.seconds)}"


@contextmanager
def measure_planning() -> Generator[PlanningCost]:
    """A context manager that counts the plans of reverse mode in a PlanningCost."""
    cost, plan_with = PlanningCost(), current_planner()

    def by(problem: Problem, policy: Policy, compiler: Compiler | None) -> Candidate:
        start = time.perf_counter()
        chosen = plan_with(problem, policy, compiler)
        cost.seconds += time.perf_counter() - start
        cost.plans += 1
        cost.flops += recompute_flops(chosen.schedule)
        return chosen

    with use_planner(by):
        yield cost
