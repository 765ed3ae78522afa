"""Warn of remat regions that change nothing: without them, the same values are saved."""

from __future__ import annotations

import collections
import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

from xform.interpret.joint import Schedule
from xform.interpret.node import Node
from xform.passes.inline import inline_bodies
from xform.passes.open_regions import OpenRegions
from xform.passes.structured import called_body, is_remat_region
from xform.planner.costs.saved_values import saved_values
from xform.planner.decide import schedule
from xform.planner.plan.plan import Plan
from xform.planner.plan_program import plan_program
from xform.planner.problem import Problem
from xform.policies import save_nothing
from xform.policies.budgets import Budget, Fit
from xform.policies.regions import regions_of
from xform.program.ir import Program
from xform.program.source import frame, user_stacklevel
from xform.terminal.text import shorten_place

# Regions of so many lines are compared with the program without them; each takes one more plan.
_MOST_LINES = 4


def warn_of_idle_regions(policy: Any, problem: Problem, name: str) -> None:
    """Warn if a remat region of a derivative changes nothing.

    A region is compared only if the policy, applied to the region alone, saves what the region
    saves. The warning is given if the plan of the whole derivative, without the regions of that
    line, saves the same values. Budgets and plans are not compared, because they search; nor is
    `save_nothing`, under which no region changes anything.

    Args:
      policy: the policy of the derivative.
      problem: the derivative.
      name: its name, for the warning.
    """
    searches = isinstance(policy, Budget | Fit | Plan)
    if searches or policy == save_nothing or regions_of(policy) == "open":
        return
    planned = plan_program(problem, policy).schedule
    lines: dict[str, bool] = {}
    for node, inner in _regions(planned):
        where = frame(node.eqn)
        alike = _signature(inner) == _signature(schedule(inner.joint, policy))
        lines[where] = lines.get(where, True) and alike
    expected = _signature(planned)
    for where in [line for line, alike in lines.items() if alike][:_MOST_LINES]:
        opened = dataclasses.replace(problem, marked=_OpenLine(where).program(problem.marked))
        if _signature(plan_program(opened, policy).schedule) == expected:
            warnings.warn(
                f"the remat region at {shorten_place(where)} changes nothing: without it, the "
                f"backward pass of {name} saves the same values. Drop it, or mark a region whose "
                "values are saved: xform.residuals lists them",
                stacklevel=user_stacklevel(),
            )


@dataclasses.dataclass(frozen=True)
class _OpenLine(OpenRegions):
    """Inline the remat regions of one line."""

    line: str

    def rewrite(self, prog: Program) -> Program:
        chosen = lambda eqn: is_remat_region(eqn) and frame(eqn) == self.line
        return inline_bodies(prog, lambda eqn: called_body(eqn) if chosen(eqn) else None)


def _regions(planned: Schedule) -> Iterator[tuple[Node, Schedule]]:
    """Yield each remat region, with the Schedule of its body."""
    for node, inners in planned.inner.items():
        for inner in inners:
            if getattr(node, "region", False):
                yield node, inner
            yield from _regions(inner)


def _signature(planned: Schedule) -> collections.Counter[Any]:
    """Return the types, lines and loops of all saved values."""
    return collections.Counter(
        (v.kind, str(v.aval), v.loops, v.memory, v.origin and _origin(v.origin[0]))
        for v in saved_values(planned)
    )


def _origin(eqn: Any) -> tuple[str, str]:
    """Return the operation that makes a value, and its line."""
    return eqn.primitive.name, frame(eqn)
