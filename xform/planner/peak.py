"""Plans of which the whole program's peak fits a number of bytes, by simulation.

What is saved is not what is live: a value that is made again lives too, and with few saved bytes a
wave of recomputes may stand higher than what it spared. So plans of falling saved bytes, each of
which runs the least again for its bytes, are simulated, and the one with the least work is taken of
those whose simulated peak fits. They are the same plans for all budgets: with fewer bytes there are
fewer that fit, so that work never falls.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from xform.cost import aval_bytes
from xform.errors import BudgetInfeasible
from xform.interpret.joint import Plan
from xform.planner.budget import Make, again_flops, floor_rows, kept_bytes
from xform.planner.exact import MOST, Problem, size
from xform.planner.link import Link
from xform.policies import Budget, MinCut, min_cut
from xform.text import human_bytes

# Parts of what can be saved that are tried, in a program of more than so many equations and in a
# smaller one; and how many distances between prices.
_FEW, _MANY, _SMALL = (1 / 16, 3 / 16, *np.arange(1, 8) / 8), np.arange(1, 32) / 32, 400
_CORNERS = 4
# Prices of a FLOP, in bytes.
_PRICES = (math.inf, *(10.0**-k for k in np.arange(0.0, 7.0, 0.5)), 0.0)
# The price of saving what is made from a product, rather than the product: a compiler that fuses
# the one keeps the other live beside it. And at which narrow places all is saved that crosses.
_WAYS = ((0.0, 0), (1 / 128, 2), (0.0, 2), (1 / 128, 0), (0.0, 1), (1 / 128, 1), (0.0, 4),
         (1 / 128, 4))  # fmt: skip


def front(make: Make, link: Link | None = None) -> list[Plan]:
    """Plans from the most to the least saved bytes, by rising work.

    At prices of work, those that keep something else; between each two, the dearer one in the last
    part of the program, since what is made late is read early and leaves room; and the least work
    for evenly spaced numbers of saved bytes, with a link by what is sent to the host. Of a large
    program there are fewer.
    """
    tried: list[Plan] = [make(min_cut)]
    many = size(tried[0])
    large = many > MOST
    for written, apart in _WAYS[: 2 if large else None]:
        corners = {kept_bytes(p): (price, p) for price in _PRICES
                   if (p := make(MinCut(price, price, 1.0, written, apart)))}  # fmt: skip
        chosen = _spaced(sorted(corners))
        tried += [corners[n][1] for n in chosen]
        for low, high in itertools.pairwise(corners[n][0] for n in chosen):
            tried.append(make(MinCut(low, high, 0.5, written, apart)))
    sizes = list(map(kept_bytes, tried))
    low, high = min(sizes), max(sizes)
    parts = () if large else _FEW if many > _SMALL else _MANY
    tried += _exact(make, [low + int(part * (high - low)) for part in parts], link)
    found = {(frozenset(p.kept), kept_bytes(p), again_flops(p)): p for p in tried}
    return sorted(found.values(), key=lambda p: (again_flops(p), kept_bytes(p)))


def _exact(make: Make, sizes: Sequence[int], link: Link | None) -> Iterator[Plan]:
    """The least work for some numbers of saved bytes."""
    problem = Problem(make(MinCut()), link)
    saved = math.inf
    for most in sorted(sizes, reverse=True):
        if saved <= most:  # what solved the last, solves this
            continue
        if (found := problem.at(most)) is not None:
            saved = found.bytes
            yield make(found.choice)


def first_within(plans: Sequence[Plan], peak: Callable[[Plan], float], most: int) -> list[Plan]:
    """The plans up to the first whose peak is within so many bytes; all, if there is none."""
    tried: list[Plan] = []
    for p in plans:
        if kept_bytes(p) <= most:  # what is kept alone is live at once
            tried.append(p)
            if peak(p) <= most:
                return tried
    return list(plans)


def _spaced(sizes: list[int]) -> list[int]:
    """A few of some sizes, as evenly spaced as they are; the ends among them."""
    goals = (sizes[0] + (sizes[-1] - sizes[0]) * k / _CORNERS for k in range(_CORNERS + 1))
    return sorted({min(sizes, key=lambda n: abs(n - goal)) for goal in goals})


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
