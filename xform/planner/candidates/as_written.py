"""Schedules of a program with its loops as they are, from the most to the least saved bytes.

What is saved is not what is live: a value that is made again lives too, and with few saved bytes a
wave of recomputes may stand higher than what it spared. So a budget of the peak is chosen from many
plans, each of which runs the least again for something: for its saved bytes, at its price of work,
where all is saved that crosses certain narrow places.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from xform.interpret.joint import Schedule
from xform.planner.costs.outcome import kept_bytes, recompute_flops
from xform.planner.cuts.integer_program import IntegerProgram, size
from xform.planner.loops import free_region
from xform.planner.plan.decision import Decision
from xform.planner.problem import Problem
from xform.policies import MinCut, min_cut

# Parts of what can be saved for which the least work is found: of a program of up to so many
# equations; of one with a loop, which can also be split between two plans; and of one of up to so
# many. A larger one has none, and fewer ways.
_MANY, _SMALL = tuple(i / 32 for i in range(1, 32)), 400
_LOOPED = tuple(i / 8 for i in range(1, 8))
_FEW, _LARGE = (1 / 4, 1 / 2), 1_500
_WAYS_OF_LARGE = 3
# In how many branches each is looked for: of the eight models of `experiments/planner/zoo.py` none
# gets another plan in twenty times as many, in which equal layers take seconds.
_BRANCHES = 100
# Of a program with remat regions that save nothing else: the ways in which those are decided too.
_WAYS_OF_REGIONS = 2
# How many distances between prices.
_CORNERS = 4
# Where a program changes from one price to another.
_CHANGES = (1 / 4, 1 / 2, 3 / 4)
# Prices of a FLOP, in bytes.
_PRICES = (math.inf, *(10.0**-k for k in np.arange(0.0, 7.0, 0.5)), 0.0)
# The price of saving what is made from a product, rather than the product: a compiler that fuses
# the one keeps the other live beside it. And at which narrow places all is saved that crosses.
_WAYS = ((0.0, 0), (1 / 128, 2), (0.0, 2), (1 / 128, 0), (0.0, 1), (1 / 128, 1), (0.0, 4),
         (1 / 128, 4))  # fmt: skip


def cuts(problem: Problem) -> list[Schedule]:
    """Schedules from the most to the least saved bytes, by rising work.

    At prices of work, those that keep something else; between each two, the dearer one in the last
    part of the program, since what is made late is read early and leaves room; and the least work
    for evenly spaced numbers of saved bytes, with a link by what is sent to the host. Of a large
    program there are fewer. Remat regions without a policy save nothing in some of them, and in
    others what the cut says.
    """
    make = problem.schedule
    tried: list[Schedule] = [make(min_cut)]
    many = size(tried[0])
    large = many > _LARGE
    for written, apart in _WAYS[: _WAYS_OF_LARGE if large else None]:
        tried += _priced(make, written, apart)
    sizes = list(map(kept_bytes, tried))
    low, high = min(sizes), max(sizes)
    looped = any(node.loop for node in tried[0].inner)
    parts = () if large else _FEW if many > _SMALL else _LOOPED if looped else _MANY
    if len(parts):
        program = IntegerProgram(make(MinCut()), problem.link)
        tried += map(make, _exact(program, [low + int(part * (high - low)) for part in parts]))
    for written, apart in _WAYS[:_WAYS_OF_REGIONS] if free_regions(tried[0]) else ():
        tried += _priced(make, written, apart, free=True)
    key = lambda p: (frozenset(p.kept), kept_bytes(p), recompute_flops(p))
    distinct = {key(p): p for p in tried}
    return sorted(distinct.values(), key=lambda p: (recompute_flops(p), kept_bytes(p)))


def free_regions(current: Schedule) -> bool:
    """Whether there is a remat region in which a budget may decide."""
    pairs = current.inner.items()
    return any(free_region(n.eqn) or any(map(free_regions, schedules)) for n, schedules in pairs)


def _priced(make: Callable[[MinCut], Schedule], written: float, apart: int, free: bool = False
            ) -> Iterator[Schedule]:  # fmt: skip
    """Minimum cuts at prices of work, and between each two."""
    of = lambda price, then, at: make(MinCut(price, then, at, written, apart, free))
    schedules = _at_prices(lambda price: of(price, price, 1.0), _PRICES)
    corners = {kept_bytes(p): (price, p) for price, p in zip(_PRICES, schedules, strict=True)}
    chosen = _spaced(sorted(corners))
    yield from (corners[n][1] for n in chosen)
    for low, high in itertools.pairwise(corners[n][0] for n in chosen):
        yield from (of(low, high, at) for at in _CHANGES)


def _at_prices(of: Callable[[float], Schedule], prices: Sequence[float]) -> list[Schedule]:
    """The plan at each of some falling prices. If those at both ends are one, so are all between.

    What a cheapest cut saves shrinks as the price falls: Gallo, Grigoriadis and Tarjan, "A fast
    parametric maximum flow algorithm and applications", 1989, section 2.
    """
    first, last = of(prices[0]), of(prices[-1])
    if first is last or len(prices) < 3:
        return [first] * (len(prices) - 1) + [last]
    middle = len(prices) // 2
    return _at_prices(of, prices[: middle + 1])[:-1] + _at_prices(of, prices[middle:])


def _exact(program: IntegerProgram, sizes: Sequence[int]) -> Iterator[Decision]:
    """The least work for some numbers of saved bytes."""
    saved = math.inf
    for most in sorted(sizes, reverse=True):
        if saved <= most:  # what solved the last, solves this
            continue
        if (point := program.at(most, branches=_BRANCHES)) is not None:
            saved = point.bytes
            yield point.decision


def _spaced(sizes: list[int]) -> list[int]:
    """A few of some sizes, as evenly spaced as they are; the ends among them."""
    goals = (sizes[0] + (sizes[-1] - sizes[0]) * k / _CORNERS for k in range(_CORNERS + 1))
    return sorted({min(sizes, key=lambda n: abs(n - goal)) for goal in goals})
