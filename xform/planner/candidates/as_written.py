"""Make many Schedules of a program without changing its loops, for a budget of the peak memory.

Other files of this folder split a loop in two, split it into nested loops, or store only some of
its states. Here every loop stays one loop.

A *Schedule* says which values of the forward pass are saved for the backward pass and which
equations are recomputed. Fewer saved bytes do not always mean a lower peak. A recomputed value is
live too, so a plan that saves few bytes may hold many recomputed values at once. Therefore the
planner chooses one of many Schedules for a budget of the peak memory.

Some of these Schedules recompute least for a given number of saved bytes. The others are minimum
cuts, which have two parameters. The *price* of a FLOP is the number of saved bytes that count as
much as one recomputed FLOP: a cut minimizes the saved bytes plus the price of the recomputed FLOPs.
*Bottlenecks* are places of the program where few bytes cross. At some of these places, the values
that cross are free to save, so the cut saves them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from xform.interpret.joint import Schedule
from xform.planner.costs.outcome import recompute_flops, saved_bytes
from xform.planner.cuts.integer_program import IntegerProgram, equation_count
from xform.planner.loops import is_region_without_policy
from xform.planner.plan.decision import Decision
from xform.planner.problem import Problem
from xform.policies import MinCut, min_cut

# Integer programs find the least recomputation at these fractions of the range of saved bytes.
# SMALL: programs of up to _MAX_SMALL equations. LOOPED: small programs with a loop; they need fewer
# fractions, because `split.py` makes plans between two of these plans. MEDIUM: programs of up to
# _MAX_MEDIUM equations. Larger programs get no integer programs, and only the first
# _N_OPTIONS_LARGE of the _CUT_OPTIONS.
_FRACTIONS_SMALL, _MAX_SMALL = tuple(i / 32 for i in range(1, 32)), 400
_FRACTIONS_LOOPED = tuple(i / 8 for i in range(1, 8))
_FRACTIONS_MEDIUM, _MAX_MEDIUM = (1 / 4, 1 / 2), 1_500
_N_OPTIONS_LARGE = 3
# The most branch-and-bound nodes of each integer program. With twenty times as many, none of the
# eight models of `experiments/planner/zoo.py` gets another plan, but the integer program of a model
# with many equal layers takes seconds.
_NODE_LIMIT = 100
# How many of the _CUT_OPTIONS, from the first one, are used a second time: for cuts that also save
# values inside remat regions (the parts that `jax.checkpoint` marks) without a policy.
_N_OPTIONS_REGIONS = 2
# `_evenly_spaced` chooses plans that divide the range of saved bytes into this many intervals.
_N_INTERVALS = 4
# After these fractions of the equations that XLA does not fuse a cut switches from one price to
# another.
_SWITCH_POINTS = (1 / 4, 1 / 2, 3 / 4)
# Cuts that save bottlenecks also switch from the lowest price to the highest one at these places
# near the end. The end of a model, such as the product with a large vocabulary, is often unlike its
# layers: saving it may take less memory than recomputing it.
_LATE_SWITCH_POINTS = tuple(1 - 2.0**-k for k in range(3, 8))
# Prices of a FLOP, in bytes.
_PRICES = (math.inf, *(10.0**-k for k in np.arange(0.0, 7.0, 0.5)), 0.0)
# Pairs (MinCut.fused_save_price, MinCut.bottleneck_stride). The first is an extra price of saving a
# value that XLA would fuse, for each byte. It makes a cut save the product that the value is
# computed from, which is in memory in any case. The second selects the bottlenecks whose values are
# saved: 0 for none, n for every n-th.
_CUT_OPTIONS = ((0.0, 0), (1 / 128, 2), (0.0, 2), (1 / 128, 0), (0.0, 1), (1 / 128, 1),
                (0.0, 4), (1 / 128, 4))  # fmt: skip


def cut_schedules(problem: Problem) -> list[Schedule]:
    """Return many Schedules, sorted by recomputed FLOPs, then by saved bytes.

    They are of three kinds:

    - minimum cuts at several prices of a FLOP;
    - cuts with two of these prices, the higher one in the last part of the program. Values that
      are computed late are read early and then freed, so more of them are saved;
    - solutions of integer programs for evenly spaced numbers of saved bytes, which may also offload
      values if there is a link to the host.

    Large programs get fewer Schedules. Remat regions without a policy save nothing in some
    Schedules; in others the cut decides inside these regions.
    """
    plan = problem.schedule
    schedules: list[Schedule] = [plan(min_cut)]
    n_equations = equation_count(schedules[0])
    large = n_equations > _MAX_MEDIUM
    for fused_price, stride in _CUT_OPTIONS[: _N_OPTIONS_LARGE if large else None]:
        schedules += _cuts_at_prices(plan, fused_price, stride)
    sizes = list(map(saved_bytes, schedules))
    low, high = min(sizes), max(sizes)
    looped = any(node.loop for node in schedules[0].inner)
    fractions = _FRACTIONS_LOOPED if looped else _FRACTIONS_SMALL
    if n_equations > _MAX_SMALL:
        fractions = () if large else _FRACTIONS_MEDIUM
    if len(fractions):
        program = IntegerProgram(plan(MinCut()), problem.link)
        targets = [low + int(fraction * (high - low)) for fraction in fractions]
        schedules += map(plan, _by_integer_programs(program, targets))
    for fused_price, stride in (
        _CUT_OPTIONS[:_N_OPTIONS_REGIONS] if has_region_without_policy(schedules[0]) else ()
    ):
        schedules += _cuts_at_prices(plan, fused_price, stride, in_regions=True)
    key = lambda p: (frozenset(p.saved), saved_bytes(p), recompute_flops(p))
    distinct = {key(p): p for p in schedules}
    return sorted(distinct.values(), key=lambda p: (recompute_flops(p), saved_bytes(p)))


def has_region_without_policy(schedule: Schedule) -> bool:
    """Return whether the program has a remat region without a policy, also inside loops or calls.

    A budget may decide what is saved in such a region.
    """
    pairs = schedule.inner.items()
    return any(
        is_region_without_policy(n.eqn) or any(map(has_region_without_policy, schedules))
        for n, schedules in pairs
    )


def _cuts_at_prices(plan: Callable[[MinCut], Schedule], fused_price: float, stride: int,
                    in_regions: bool = False) -> Iterator[Schedule]:  # fmt: skip
    """Yield minimum cuts at a few prices of a FLOP, then cuts that switch between two of them.

    `plan` returns the Schedule of a cut. `fused_price` and `stride` are one of the _CUT_OPTIONS.
    `in_regions`: the cuts decide inside remat regions without a policy too.
    """
    cut_at = lambda early, late, switch_at: plan(
        MinCut(early, late, switch_at, fused_price, stride, in_regions)
    )
    schedules = _at_prices(lambda price: cut_at(price, price, 1.0), _PRICES)
    by_bytes = {saved_bytes(p): (price, p) for price, p in zip(_PRICES, schedules, strict=True)}
    chosen = _evenly_spaced(sorted(by_bytes))
    yield from (by_bytes[n][1] for n in chosen)
    prices = [by_bytes[n][0] for n in chosen]
    for low, high in itertools.pairwise(prices):
        yield from (cut_at(low, high, switch_at) for switch_at in _SWITCH_POINTS)
    if stride and not fused_price:
        yield from (cut_at(prices[0], prices[-1], switch_at) for switch_at in _LATE_SWITCH_POINTS)


def _at_prices(cut_at: Callable[[float], Schedule], prices: Sequence[float]) -> list[Schedule]:
    """Return the cut at each of some falling prices.

    If the cuts at the first and the last price are equal, so are all cuts between them, which are
    then not computed.
    The saved set of a minimum cut only shrinks as the price falls: Gallo, Grigoriadis and Tarjan,
    "A fast parametric maximum flow algorithm and applications", 1989, section 2.
    """
    first, last = cut_at(prices[0]), cut_at(prices[-1])
    if first is last or len(prices) < 3:
        return [first] * (len(prices) - 1) + [last]
    middle = len(prices) // 2
    return _at_prices(cut_at, prices[: middle + 1])[:-1] + _at_prices(cut_at, prices[middle:])


def _by_integer_programs(program: IntegerProgram, sizes: Sequence[int]) -> Iterator[Decision]:
    """Yield the decisions that recompute least within each number of saved bytes."""
    last_bytes = math.inf
    for limit in sorted(sizes, reverse=True):
        if last_bytes <= limit:  # the last solution is within this limit too
            continue
        if (solution := program.solve(limit, node_limit=_NODE_LIMIT)) is not None:
            last_bytes = solution.bytes
            yield solution.decision


def _evenly_spaced(sizes: list[int]) -> list[int]:
    """Choose a few of the sizes, spaced as evenly as possible, including both ends."""
    goals = (sizes[0] + (sizes[-1] - sizes[0]) * k / _N_INTERVALS for k in range(_N_INTERVALS + 1))
    return sorted({min(sizes, key=lambda n: abs(n - goal)) for goal in goals})
