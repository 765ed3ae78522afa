"""The memory of a computation outside of its derivatives, such as an optimizer's state."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from xform.interpret.node import gather
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
    outer = simulate(whole, backend, overwrites_argument=overwrites_argument)
    inner = {k: liveness(plan.schedule, backend) for k, plan in chosen.candidates.items()}
    outside = outer.total_bytes - max((one.total_bytes for one in inner.values()), default=0)
    return {
        k: dataclasses.replace(
            problem,
            outside_bytes=outside,
            outside_argument_bytes=outer.argument_bytes - inner[k].argument_bytes,
            regions=regions,
        )
        for k, problem in chosen.recorded.problems.items()
    }


def overwritten(trace: Any, whole: Program) -> Mask:
    """Return which outputs of a traced function take the memory of a donated argument.

    `trace` is JAX's `Traced` object of the function, and `whole` its program.
    """
    donated = tuple(a.donated for a in jax.tree.leaves(trace.args_info))
    return in_donated(gather(whole.in_avals, donated), whole.out_avals)


def in_donated(donated: Sequence[Any], outputs: Sequence[Any]) -> Mask:
    """Return which outputs take the memory of a donated argument of their shape and dtype."""
    unused = collections.Counter((a.shape, a.dtype) for a in donated)
    found: list[bool] = []
    for a in outputs:
        found.append(unused[a.shape, a.dtype] > 0)
        unused[a.shape, a.dtype] -= found[-1]
    return tuple(found)
