"""From a traced function and a policy to a plan, which who runs a program may watch."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from xform.interpret.joint import Plan
from xform.planner.planned import planned
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
