"""Plans of which the whole program's peak fits a number of bytes, by simulation.

What is saved is not what is live: a value that is made again lives too, and with few saved bytes a
wave of recomputes may stand higher than what it spared. So plans of falling saved bytes, each of
which runs the least again for its bytes, are simulated, and the one with the least work is taken of
those whose simulated peak fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from xform.errors import BudgetInfeasible
from xform.interpret import emit
from xform.interpret.joint import Plan
from xform.interpret.node import gather, spread
from xform.ir import Program, trace
from xform.planner.budget import again_flops, fit, floor_rows, kept_bytes
from xform.planner.choice import Choice
from xform.planner.cost import aval_bytes
from xform.planner.liveness import Liveness, simulate
from xform.policies import Budget, MinCut
from xform.text import human_bytes

# How many numbers of saved bytes are tried.
_HALVINGS, _LOWER = 7, (0.5, 0.25, 0.1)
# Prices of a FLOP, in bytes, at which plans are tried that save products rather than what is made
# from them: a compiler that fuses the one keeps the other live beside it.
_PRICES, _WRITTEN = (math.inf, 0.1, 0.01, 0.001, 0.0), 1 / 128

Make = Callable[[MinCut | Choice], Plan]


def emitted(how: Plan) -> Program:
    """Both parts of a Plan as one program: inputs then cotangents to outputs then results."""
    joint = how.joint

    def run(*args: object) -> list[object]:
        xs, seconds = args[: len(joint.inputs)], args[len(joint.inputs) :]
        outs, kept = emit.forward(how, xs)
        read = spread(gather(xs, how.reads), how.reads)
        return [*outs, *emit.second(how, kept, read, seconds, True, whole=True)]

    return trace(run, *(v.aval for v in (*joint.inputs, *joint.second_inputs)))


def liveness(how: Plan, backend: str) -> Liveness:
    """The Liveness of a Plan's program; simulated once."""
    key = "liveness", backend
    if key not in how.cache:
        how.cache[key] = simulate(emitted(how), backend, len(how.joint.second_inputs))
    return how.cache[key]


def fit_peak(budget: Budget, make: Make, peak: Callable[[Plan], float]) -> Plan:
    """The Plan that runs the least work again of those tried whose `peak` is within the budget.

    Raises `BudgetInfeasible` with the lowest peak that was found. Cost: about ten solutions for a
    number of saved bytes, each traced and simulated.
    """
    plans = around(budget.bytes, make, peak)
    within = [p for p in plans if peak(p) <= budget.bytes]
    if within:
        return min(within, key=lambda p: (again_flops(p), peak(p)))
    floor = min(plans, key=peak)
    raise infeasible(budget, floor, int(peak(floor)), "simulated")


def around(most_bytes: int, make: Make, peak: Callable[[Plan], float]) -> list[Plan]:
    """Plans whose peaks close in on a number of bytes, from both sides where there are two."""
    most = make(MinCut())
    if peak(most) <= most_bytes:
        return [most]
    least = make(MinCut(0.0, 0.0))
    tried = [most, least, *(make(MinCut(p, p, written=_WRITTEN)) for p in _PRICES)]

    def fits(saved: float) -> bool:
        tried.append(fit(most.joint, Budget(int(saved)), make))
        return peak(tried[-1]) <= most_bytes

    low, high = float(kept_bytes(least)), float(kept_bytes(most))
    if peak(least) > most_bytes:
        # A wave may stand above: with more saved it may fit.
        tries = (low + part * (high - low) for part in _LOWER)
        low = next((saved for saved in tries if fits(saved)), low)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return tried


def infeasible(budget: Budget, floor: Plan, least: int, how: str) -> BudgetInfeasible:
    """The error for a budget below the lowest peak."""
    joint, rows = floor.joint, floor_rows(floor)
    size = lambda atoms: human_bytes(sum(aval_bytes(v.aval) for v in atoms))
    saved = human_bytes(kept_bytes(floor)) + (f" ({'; '.join(rows)})" if rows else "")
    return BudgetInfeasible(
        f"policy={budget!r}",
        f"the lowest peak found takes {human_bytes(least)} ({how}): arguments "
        f"{size((*joint.inputs, *joint.second_inputs))}, outputs "
        f"{size((*joint.outputs, *joint.second_outputs))}, saved {saved}, the rest in work",
        rows[0].rpartition(" at ")[2] if rows else "",
        "raise the budget, donate arguments that are not read later, make the batch or the "
        "sequence smaller, shard the largest arguments, or offload what is saved",
        least,
    )
