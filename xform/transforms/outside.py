"""The memory of a computation outside of its derivatives, such as an optimizer's state."""

from __future__ import annotations

import dataclasses

from xform.planner.problem import Problem
from xform.planner.simulate.liveness import liveness, simulate
from xform.policies.budgets import Regions
from xform.program.ir import Mask, Program
from xform.transforms.recorded import Chosen


def with_outside_bytes(
    chosen: Chosen, whole: Program, backend: str, regions: Regions, overwrites_argument: Mask = ()
) -> dict[str, Problem]:
    """Return the derivatives of a computation, each with the simulated bytes outside of it.

    Args:
      chosen: the recorded computation, with plans of its derivatives.
      whole: the program of the computation under these plans.
      backend: the backend that it is for.
      regions: whether new plans keep the remat regions, or dissolve them.
      overwrites_argument: for each output, whether it overwrites a donated argument.
    """
    outer = simulate(whole, backend, overwrites_argument=overwrites_argument).total_bytes
    inner = [liveness(plan.schedule, backend).total_bytes for plan in chosen.candidates.values()]
    outside = outer - max(inner, default=0)
    return {
        k: dataclasses.replace(problem, outside_bytes=outside, regions=regions)
        for k, problem in chosen.recorded.problems.items()
    }
