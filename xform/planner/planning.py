"""What plans the functions that are differentiated: `planned`, or what watches it at work."""

from __future__ import annotations

import contextvars
import dataclasses
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from xform.planner.candidate import Candidate
from xform.planner.compiler import Compiler
from xform.planner.costs.outcome import recompute_flops
from xform.planner.planned import planned
from xform.planner.problem import Problem
from xform.policies import Policy
from xform.text import human_flops, human_seconds

# Plans a problem under a policy; a compiler, if there is one, measures the plans.
Planner = Callable[[Problem, Policy, Compiler | None], Candidate]

_PLANNER: contextvars.ContextVar[Planner] = contextvars.ContextVar("planner", default=planned)


def planner() -> Planner:
    """What plans here: `planned`, unless another has been put in its place."""
    return _PLANNER.get()


@contextmanager
def planning(by: Planner) -> Generator[None]:
    """Within it, reverse mode is planned by another planner."""
    before = _PLANNER.set(by)
    try:
        yield
    finally:
        _PLANNER.reset(before)


@dataclasses.dataclass
class Spent:
    """What was planned: how often, for how long, and the work that the plans run again."""

    plans: int = 0
    seconds: float = 0.0
    flops: int = 0

    def __str__(self) -> str:
        if not self.plans:
            return ""
        return f"{human_flops(self.flops)} run again, planned in {human_seconds(self.seconds)}"


@contextmanager
def timed() -> Generator[Spent]:
    """Within it, what reverse mode plans is added up."""
    spent, plan = Spent(), planner()

    def by(problem: Problem, policy: Policy, compiler: Compiler | None) -> Candidate:
        begun = time.perf_counter()
        chosen = plan(problem, policy, compiler)
        spent.seconds += time.perf_counter() - begun
        spent.plans += 1
        spent.flops += recompute_flops(chosen.schedule)
        return chosen

    with planning(by):
        yield spent
