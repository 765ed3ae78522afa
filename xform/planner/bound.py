"""A lower bound on the FLOPs that any plan within a budget recomputes.

It shows how far a plan is from the best one: `Plan.least_flops` reports it.
"""

from __future__ import annotations

import math

from xform.interpret.cost import aval_bytes
from xform.planner.costs.outcome import saved_bytes
from xform.planner.cuts.integer_program import MAX_EQUATIONS, IntegerProgram, equation_count
from xform.planner.problem import Problem
from xform.policies import Budget, MinCut


def least_flops(problem: Problem, budget: Budget) -> int:
    """Return a lower bound on the FLOPs that a plan within `budget` recomputes.

    The bound holds for plans that recompute each step of a loop at most once. A peak contains the
    arguments and the saved values, so the saved values have at most the budget minus the arguments.
    An integer program finds the least FLOPs for that number of saved bytes. The bound is the
    optimum of its relaxation, in which values may be saved in part.

    The bound is 0 if nothing better is known: if the program is too large to solve, if it has
    branches (their values share memory), or if only plans that rerun loops from a few stored states
    fit the budget.

    Args:
      problem: the derivative, and the device.
      budget: a budget of the peak or of the saved bytes.
    """
    save_most = problem.schedule(MinCut())
    arguments = sum(aval_bytes(v.aval) for v in save_most.joint.inputs)
    arguments += problem.outside_argument_bytes
    remaining = budget.bytes - (arguments if budget.of == "peak" else 0)
    if saved_bytes(save_most) <= remaining or equation_count(save_most) > MAX_EQUATIONS:
        return 0
    program = IntegerProgram(save_most, problem.link)
    flops = None if program.has_branches else program.bound(remaining)
    return 0 if flops is None else math.floor(flops)
