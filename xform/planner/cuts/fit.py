"""Find a plan whose saved values fit a number of bytes and that recomputes little work.

For a program of moderate size an integer program decides everything, also which values are
offloaded to the host (`integer_program.py`). For a larger program two methods propose plans, and
the plan with less work is taken:

- block by block (`blocks.py`);
- by a price of work, in bytes per FLOP. At each price, minimum cuts give the best plan for all
  nested programs at once. A lower price saves fewer bytes. Bisection finds the price at which the
  plan fits. Equal layers all change their plan at the same price, so a second bisection mixes the
  two plans on either side of the budget: each program uses the lower price up to some point, and
  the higher price after it.

The functions here are generators, because they cannot turn decisions into a plan themselves. They
yield a policy or a Decision, `planner/decide.py` sends back the *Schedule* that follows from it
(which values are saved, and which equations are recomputed), and then they yield the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator

from xform.interpret.joint import Schedule
from xform.planner.costs.link import HostLink
from xform.planner.costs.outcome import offloaded_bytes, recompute_flops, saved_bytes
from xform.planner.cuts.blocks import decide_by_blocks
from xform.planner.cuts.integer_program import decide_by_integer_program
from xform.planner.infeasible import over_budget
from xform.planner.plan.decision import Decision
from xform.policies import Budget, MinCut

# The range of useful prices of a FLOP, in bytes. A matrix product that sums over an axis of length
# one makes 2 bytes of result per FLOP. If it sums over a million elements, it makes a millionth of
# that.
_HIGHEST_PRICE, _LOWEST_PRICE = 16.0, 1e-8
# The steps of the bisection by price. The second bisection takes half as many.
_HALVINGS = 24

# A generator of policies and Decisions. It is sent the Schedule of each, and returns the best one.
Proposals = Generator[MinCut | Decision, Schedule, Schedule]
# Returns the bytes of a Schedule that a budget limits.
Size = Callable[[Schedule], int]


def propose_within(
    budget: Budget, link: HostLink | None = None, size: Size = saved_bytes
) -> Proposals:
    """Propose plans, and return one whose `size` is at most `budget.bytes`.

    The returned Schedule has the least recomputed work of all tried plans that fit.

    Args:
      budget: the number of bytes, and the solver.
      link: the device's link to its host. The integer program may offload values over it. None:
        nothing is offloaded.
      size: returns the bytes of a Schedule that count, by default those of its saved values.

    Raises:
      BudgetInfeasible: the plan with the fewest bytes takes more than the budget.
    """
    most = yield MinCut()
    if size(most) <= budget.bytes:
        return most
    best = yield from propose_smallest(most, budget, link, size)
    if size(best) > budget.bytes:
        raise over_budget(best, budget, size(best))

    exact = budget.solver == "exact"
    if decision := decide_by_integer_program(most, budget.bytes, exact, link):
        solved = yield decision
        if size(solved) <= budget.bytes:
            return min(best, solved, key=_work)
    if decision := decide_by_blocks(most, budget.bytes):
        combined = yield decision
        if size(combined) <= budget.bytes:
            best = min(best, combined, key=_work)
    return (yield from propose_by_prices(best, budget.bytes, size))


def propose_smallest(
    most: Schedule, budget: Budget, link: HostLink | None, size: Size
) -> Proposals:
    """Propose plans, and return the one with the fewest bytes.

    The bytes of the budget do not matter. `most` is the Schedule that saves the most. `link` and
    `size` are as in `propose_within`.
    """
    cut = yield MinCut(0.0, 0.0)
    exact = budget.solver == "exact"
    decision = decide_by_integer_program(most, None, exact, link) if link else None
    if decision is None:
        return cut
    return min(cut, (yield decision), key=size)


def propose_by_prices(best: Schedule, max_bytes: int, size: Size = saved_bytes) -> Proposals:
    """Propose plans at several prices of work, and return the one that recomputes least.

    Only plans of at most `max_bytes` bytes are returned. `best` is a Schedule that fits already.
    """
    fits = lambda schedule: size(schedule) <= max_bytes
    low_price, high_price = _LOWEST_PRICE, _HIGHEST_PRICE
    for _ in range(_HALVINGS):
        price = math.sqrt(low_price * high_price)
        schedule = yield MinCut(price, price)
        best = min(best, schedule, key=_work) if fits(schedule) else best
        low_price, high_price = (price, high_price) if fits(schedule) else (low_price, price)
    # The first part of each program has the lower price. If that part is larger, the plan saves
    # fewer bytes.
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS // 2):
        switch_at = (low + high) / 2
        schedule = yield MinCut(low_price, high_price, switch_at)
        best = min(best, schedule, key=_work) if fits(schedule) else best
        low, high = (low, switch_at) if fits(schedule) else (switch_at, high)
    return best


def _work(schedule: Schedule) -> tuple[int, int, int]:
    """Sort key of a Schedule: recomputed FLOPs, then offloaded bytes, then saved bytes."""
    return recompute_flops(schedule), offloaded_bytes(schedule), saved_bytes(schedule)
