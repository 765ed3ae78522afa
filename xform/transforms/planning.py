"""From a traced function and a policy to a plan, which who runs a program may watch."""

from __future__ import annotations

import contextvars
import dataclasses
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from xform.interpret.joint import Plan
from xform.planner.costs.outcome import recompute_flops
from xform.planner.planned import planned
from xform.text import human_flops, human_seconds
from xform.transforms.function import Function

Planner = Callable[[Function, Any], Plan]


def plainly(fun: Function, policy: Any) -> Plan:
    """The plan of a function under a policy."""
    return planned(fun.program, fun.active(), fun.differentiable(), policy).how


_PLANNER: contextvars.ContextVar[Planner] = contextvars.ContextVar("planner", default=plainly)


def planner() -> Planner:
    """What plans here: `plainly`, unless another has been put in its place."""
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

    def by(fun: Function, policy: Any) -> Plan:
        begun = time.perf_counter()
        how = plan(fun, policy)
        spent.seconds += time.perf_counter() - begun
        spent.plans += 1
        spent.flops += recompute_flops(how)
        return how

    with planning(by):
        yield spent
