"""The memory of a step outside of its derivatives: arguments, the optimizer's state, the update."""

from __future__ import annotations

import dataclasses
from typing import Any

from xform.memory.targets import Target
from xform.planner.problem import Problem
from xform.planner.simulate.liveness import liveness, simulate
from xform.policies.budgets import Regions
from xform.program.ir import program
from xform.transforms.decisions import Seen
from xform.transforms.planning_task import overwritten


def with_outside_bytes(
    seen: Seen, traced: Any, target: Target, regions: Regions
) -> dict[str, Problem]:
    """The derivatives of a step, each with the simulated bytes that the step holds outside of it.

    Args:
      seen: the derivatives that the trace of the step met, with the plans that they followed.
      traced: JAX's `Traced` object of the step.
      target: the devices that the step is for.
      regions: whether new plans keep the remat regions of the step, or dissolve them.
    """
    whole, backend = program(traced.jaxpr), target.backend
    outer = simulate(whole, backend, overwrites_argument=overwritten(traced, whole)).total_bytes
    inner = [liveness(plan.schedule, backend).total_bytes for _, plan in seen.values()]
    outside = outer - max(inner, default=0)
    return {
        k: dataclasses.replace(problem, outside_bytes=outside, regions=regions)
        for k, (problem, _) in seen.items()
    }
