"""Find a plan whose saved values fit a number of bytes.

For a program of moderate size an integer program decides everything, with the values to offload
(`integer_program.py`). For a larger program two methods propose plans, and the better plan wins:

- block by block (`blocks.py`);
- by a price of work, in bytes per FLOP. At each price, minimum cuts give the best plan for all
  nested programs at once. A lower price saves fewer bytes. Bisection finds the price at which the
  plan fits. Equal layers all change their plan at the same price, so a second bisection mixes the
  two plans on either side of the budget: each program uses the first price up to some point, and
  the second price after it.

The functions here are generators. They yield a proposal, `planner/decide.py` makes its Schedule
and sends it back, and then they yield the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator

from xform.interpret.joint import Schedule
from xform.planner.costs.link import HostLink
from xform.planner.costs.outcome import offloaded_bytes, recompute_flops, saved_bytes
from xform.planner.cuts import blocks
from xform.planner.cuts.integer_program import choose
from xform.planner.infeasible import over_budget
from xform.planner.plan.decision import Decision
from xform.policies import Budget, MinCut

# The range of useful prices of a FLOP, in bytes. A matrix product that sums over an axis of length
# one makes 2 bytes of result per FLOP. One that sums over a million elements makes a millionth.
_HIGHEST_PRICE, _LOWEST_PRICE = 16.0, 1e-8
_HALVINGS = 24

# A generator of decisions for a Joint. It is sent the Schedule of each, and returns the best one.
Proposals = Generator[MinCut | Decision, Schedule, Schedule]
Size = Callable[[Schedule], int]


def propose_within(
    budget: Budget, link: HostLink | None = None, size: Size = saved_bytes
) -> Proposals:
    """Propose plans, and return one whose `size` is at most `budget.bytes`.

    The returned Schedule has the least recomputed work of all tried plans that fit. With a link,
    values may be offloaded to the host, in programs that the integer program decides.

    Args:
      budget: the number of bytes, and the solver.
      link: the device's link to its host; None: nothing is offloaded.
      size: the bytes of a Schedule that count, by default its saved values.

    Raises:
      BudgetInfeasible: the plan with the fewest bytes takes more than the budget.
    """
    most = yield MinCut()
    if size(most) <= budget.bytes:
        return most
    best = yield from propose_smallest(most, budget, link, size)
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
    return (yield from propose_by_prices(best, budget.bytes, size))


def propose_smallest(
    most: Schedule, budget: Budget, link: HostLink | None, size: Size
) -> Proposals:
    """Propose plans, and return the one with the fewest bytes, the same for all budgets.

    `most` is the Schedule that saves the most.
    """
    cut = yield MinCut(0.0, 0.0)
    decision = choose(most, None, budget.solver == "exact", link) if link else None
    if decision is None:
        return cut
    return min(cut, (yield decision), key=size)


def propose_by_prices(best: Schedule, most: int, size: Size = saved_bytes) -> Proposals:
    """Propose plans at several prices of work, and return the one that recomputes least.

    Only plans of at most `most` bytes count. `best` is a Schedule that fits already.
    """
    fits = lambda schedule: size(schedule) <= most
    below, above = _LOWEST_PRICE, _HIGHEST_PRICE
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
    """Sort key of a Schedule: recomputed FLOPs, then offloaded bytes, then saved bytes."""
    return recompute_flops(schedule), offloaded_bytes(schedule), saved_bytes(schedule)
