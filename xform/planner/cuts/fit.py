"""Plans that fit a number of bytes.

A program of moderate size is decided exactly (`integer_program.py`), with what is sent to the host.
A larger one is decided block by block (`blocks.py`), and by prices: a price of work, in bytes for
each FLOP, gives by minimum cuts the plan that is best at that price, in all nested programs at
once; less price, fewer bytes. The price is found by bisection. Between the two plans that stand on
either side of the budget, each program takes the price of one up to some point and that of the
other from there on, since equal layers all change at the same price. The better of the two ways is
taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from xform.interpret.joint import Joint, Plan
from xform.planner.costs.link import Link
from xform.planner.costs.outcome import kept_bytes, recompute_flops, sent_bytes
from xform.planner.cuts import blocks
from xform.planner.cuts.integer_program import choose
from xform.planner.plan.choice import Choice
from xform.planner.refused import over_budget
from xform.policies import Budget, MinCut

# Prices of a FLOP, in bytes, between which all plans lie: a product of matrices as thin as can be
# makes 2 bytes for each of its FLOPs, one that is a million thick a millionth of that.
_DEAREST, _CHEAPEST = 16.0, 1e-8
_HALVINGS = 24

Make = Callable[[MinCut | Choice], Plan]


def fit(joint: Joint, budget: Budget, make: Make, link: Link | None = None) -> Plan:
    """The Plan of a Joint that keeps at most `budget.bytes`; `make` plans it in some way.

    Of the plans that are tried and fit, it is the one that runs the least work again. With a link,
    values may be sent to the host, in programs that are decided exactly. Raises `BudgetInfeasible`
    if even the plan that keeps least keeps more.
    """
    most = make(MinCut())
    if kept_bytes(most) <= budget.bytes:
        return most
    sure = budget.solver == "exact"
    best = _lowest(most, make, sure, link)
    if kept_bytes(best) > budget.bytes:
        raise over_budget(best, budget, kept_bytes(best))

    chosen = choose(most, budget.bytes, sure, link)
    if chosen is not None and kept_bytes(exact := make(chosen)) <= budget.bytes:
        return min(best, exact, key=_work)
    chosen = blocks.choose(most, budget.bytes)
    if chosen is not None and kept_bytes(found := make(chosen)) <= budget.bytes:
        best = min(best, found, key=_work)
    return by_prices(best, budget.bytes, make)


def _lowest(most: Plan, make: Make, sure: bool, link: Link | None) -> Plan:
    """The plan that keeps the fewest bytes."""
    found = make(MinCut(0.0, 0.0))
    chosen = choose(most, None, sure, link) if link else None
    return min(found, make(chosen), key=kept_bytes) if chosen else found


def by_prices(best: Plan, most: int, make: Make) -> Plan:
    """The least work within so many bytes, of the plans at all prices, and of `best`."""

    def fits(how: MinCut) -> bool:
        nonlocal best
        found = make(how)
        if kept_bytes(found) > most:
            return False
        best = min(best, found, key=_work)
        return True

    below, above = _CHEAPEST, _DEAREST
    for _ in range(_HALVINGS):
        middle = math.sqrt(below * above)
        below, above = (middle, above) if fits(MinCut(middle, middle)) else (below, middle)
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS // 2):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(MinCut(below, above, middle)) else (middle, high)
    return best


def _work(how: Plan) -> tuple[int, int, int]:
    return recompute_flops(how), sent_bytes(how), kept_bytes(how)
