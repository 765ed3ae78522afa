"""How little any plan within a budget could run again: what a plan is to be compared with."""

from __future__ import annotations

import math

from xform.cost import aval_bytes
from xform.interpret.joint import analyze
from xform.ir import Mask, Program
from xform.planner.costs.link import link_of
from xform.planner.costs.outcome import kept_bytes
from xform.planner.cuts.integer_program import MOST, Problem, size
from xform.planner.decide import plan
from xform.policies import Budget, MinCut


def least_flops(prog: Program, active: Mask, wanted: Mask, budget: Budget, held: int = 0
                ) -> int:  # fmt: skip
    """FLOPs that each plan within a budget runs again, if it runs no step of a loop twice again.

    A peak holds the arguments, the bytes `held` beside them (less than 0: arguments that are
    donated), and what is kept. So no plan within it runs less again than the least, in part even,
    for so many bytes kept. 0
    where no more is known: of a program that is too large to solve, of one with branches, whose
    values share memory, or of a budget that is only met by loops that are run again from few of
    their states.
    """
    joint = analyze(prog, active, wanted)
    most = plan(joint, MinCut(), top=True)
    arguments = sum(aval_bytes(v.aval) for v in joint.inputs) + held
    left = budget.bytes - (arguments if budget.of == "peak" else 0)
    if kept_bytes(most) <= left or size(most) > MOST:
        return 0
    problem = Problem(most, link_of())
    flops = None if problem.branched else problem.bound(left)
    return 0 if flops is None else math.floor(flops)
