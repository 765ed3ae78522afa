"""Decisions that fit a number of bytes, proposed one after another.

A program of moderate size is decided exactly (`integer_program.py`), with what is sent to the host.
A larger one is decided block by block (`blocks.py`), and by prices: a price of work, in bytes for
each FLOP, gives by minimum cuts the plan that is best at that price, in all nested programs at
once; less price, fewer bytes. The price is found by bisection. Between the two plans that stand on
either side of the budget, each program takes the price of one up to some point and that of the
other from there on, since equal layers all change at the same price. The better of the two ways is
taken.

A proposal is data: what makes Schedules of proposals (`planner/decide.py`) takes one, sends back
its Schedule, and takes the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator

from xform.interpret.joint import Schedule
from xform.planner.costs.link import Link
from xform.planner.costs.outcome import kept_bytes, recompute_flops, sent_bytes
from xform.planner.cuts import blocks
from xform.planner.cuts.integer_program import choose
from xform.planner.plan.decision import Decision
from xform.planner.refused import over_budget
from xform.policies import Budget, MinCut

# Prices of a FLOP, in bytes, between which all plans lie: a product of matrices as thin as can be
# makes 2 bytes for each of its FLOPs, one that is a million thick a millionth of that.
_DEAREST, _CHEAPEST = 16.0, 1e-8
_HALVINGS = 24

# What proposes decisions for a Joint, is sent the Schedule of each, and returns the best of them.
Proposals = Generator[MinCut | Decision, Schedule, Schedule]
Size = Callable[[Schedule], int]


def fit(budget: Budget, link: Link | None = None, size: Size = kept_bytes) -> Proposals:
    """The Schedule of a Joint of which the `size` is at most `budget.bytes`.

    Of the plans that are tried and fit, it is the one that runs the least work again. With a link,
    values may be sent to the host, in programs that are decided exactly. Raises `BudgetInfeasible`
    if even the `least` takes more.
    """
    most = yield MinCut()
    if size(most) <= budget.bytes:
        return most
    best = yield from least(most, budget, link, size)
    if size(best) > budget.bytes:
        raise over_budget(best, budget, size(best))

    if decision := choose(most, budget.bytes, budget.solver == "exact", link):
        exact = yield decision
        if size(exact) <= budget.bytes:
            return min(best, exact, key=_work)
    if decision := blocks.choose(most, budget.bytes):
        of_blocks = yield decision
        if size(of_blocks) <= budget.bytes:
            best = min(best, of_blocks, key=_work)
    return (yield from by_prices(best, budget.bytes, size))


def least(most: Schedule, budget: Budget, link: Link | None, size: Size) -> Proposals:
    """The plan of the fewest bytes, which is the same for all budgets; `most` keeps the most."""
    cut = yield MinCut(0.0, 0.0)
    decision = choose(most, None, budget.solver == "exact", link) if link else None
    if decision is None:
        return cut
    return min(cut, (yield decision), key=size)


def by_prices(best: Schedule, most: int, size: Size = kept_bytes) -> Proposals:
    """The least work within so many bytes, of the plans at all prices, and of `best`."""
    fits = lambda schedule: size(schedule) <= most
    below, above = _CHEAPEST, _DEAREST
    for _ in range(_HALVINGS):
        middle = math.sqrt(below * above)
        schedule = yield MinCut(middle, middle)
        best = min(best, schedule, key=_work) if fits(schedule) else best
        below, above = (middle, above) if fits(schedule) else (below, middle)
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS // 2):
        middle = (low + high) / 2
        schedule = yield MinCut(below, above, middle)
        best = min(best, schedule, key=_work) if fits(schedule) else best
        low, high = (low, middle) if fits(schedule) else (middle, high)
    return best


def _work(schedule: Schedule) -> tuple[int, int, int]:
    return recompute_flops(schedule), sent_bytes(schedule), kept_bytes(schedule)
