"""How little any plan within a budget could run again: what a plan is to be compared with."""

from __future__ import annotations

import math

from xform.cost import aval_bytes
from xform.planner.costs.outcome import kept_bytes
from xform.planner.cuts.integer_program import MOST, IntegerProgram, size
from xform.planner.problem import Problem
from xform.policies import Budget, MinCut


def least_flops(problem: Problem, budget: Budget, held: int = 0) -> int:
    """FLOPs that each plan within a budget runs again, if it runs no step of a loop twice again.

    A peak holds the arguments, the bytes `held` beside them (less than 0: arguments that are
    donated), and what is kept. So no plan within it runs less again than the least, in part even,
    for so many bytes kept. 0
    where no more is known: of a program that is too large to solve, of one with branches, whose
    values share memory, or of a budget that is only met by loops that are run again from few of
    their states.
    """
    most = problem.schedule(MinCut())
    arguments = sum(aval_bytes(v.aval) for v in most.joint.inputs) + held
    left = budget.bytes - (arguments if budget.of == "peak" else 0)
    if kept_bytes(most) <= left or size(most) > MOST:
        return 0
    program = IntegerProgram(most, problem.link)
    flops = None if program.branched else program.bound(left)
    return 0 if flops is None else math.floor(flops)
