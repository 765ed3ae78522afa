"""The plans of a program that are worth choosing from: a staircase of bytes and work.

Each runs more again than the one before and takes fewer bytes. It is one staircase for all budgets,
which is why fewer bytes never mean less work. It is made as far as somebody asks: by rising work,
first with the loops as they are, then also with those that are taken apart or store some states.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from xform import alive
from xform._jax import scan_counts
from xform.cost import equation_flops
from xform.interpret.joint import Schedule
from xform.interpret.node import bound
from xform.passes.dce import live
from xform.planner.candidate import Candidate
from xform.planner.candidates.as_written import cuts
from xform.planner.candidates.nested import nested
from xform.planner.candidates.snapshots import stored
from xform.planner.candidates.split import split
from xform.planner.candidates.stock import stock
from xform.planner.candidates.worth import PlannedLoop, inner_loops, large_loops
from xform.planner.costs.recompute import fusible
from xform.planner.loops import loops
from xform.planner.problem import Problem

Fits = Callable[[Candidate], bool]


class Listed(Iterable[Candidate]):
    """The plans that an iterator makes, each made when it is first asked for.

    One that was interrupted is made again, and goes on where it was; threads wait for each other.
    """

    def __init__(self, make: Callable[[], Iterator[Candidate]]):
        self._make, self._made = make, list[Candidate]()
        self._rest: Iterator[Candidate] | None = None
        self._lock = threading.RLock()

    def __iter__(self) -> Iterator[Candidate]:
        for i in itertools.count():
            with self._lock:
                following = self._made[i] if i < len(self._made) else self._following()
            if following is None:
                return
            yield following

    def _following(self) -> Candidate | None:
        rest = self._rest or itertools.islice(self._make(), len(self._made), None)
        self._rest = None  # should it be interrupted
        with alive.working(f"making candidate {len(self._made) + 1}"):
            following = next(rest, None)
        if following is not None:
            self._made.append(following)
        self._rest = rest
        return following


class Front:
    """The staircase of a program.

    Args:
      problem: the derivative.
      flat: makes the plans with the loops as they are.
      peak: the bytes of a plan.
    """

    def __init__(
        self,
        problem: Problem,
        flat: Callable[[], Sequence[Schedule]],
        peak: Callable[[Schedule], int],
    ):
        self._problem, self._flat, self.peak = problem, flat, peak
        self._plans = Listed(self._by_work)
        self._finer: dict[int, Listed] = {}

    def first(self, fits: Fits) -> Candidate | None:
        """The plan of the least work that fits; None if none does."""
        for i, candidate in enumerate(self._plans):
            if fits(candidate):
                return next(filter(fits, self._finer_to(i)), candidate)
        return None

    def before(self, last: Candidate, nearly: Fits) -> Iterator[Candidate]:
        """The plans of less work than one that `nearly` fit, the steps between them included."""
        for i, candidate in enumerate(self._plans):
            if nearly(candidate):
                steps = (*self._finer_to(i), candidate)
                yield from (w for w in steps if w.work < last.work and nearly(w))
            if candidate.work > last.work:
                return

    def lowest(self) -> list[Candidate]:
        """The plans of the fewest bytes, by rising bytes: the last two steps.

        And the one of the most work that takes no more than the lowest: by the compiler it may be
        lower.
        """
        foot, *steps = [*self._steps(self._plans)][:-3:-1]
        least = self.peak(foot.schedule)
        alike = [w for w in self._plans if w is not foot and self.peak(w.schedule) == least]
        return [foot, *alike[-1:], *steps]

    def _steps(self, schedules: Iterable[Candidate]) -> Iterator[Candidate]:
        """Those of some plans that take fewer bytes than all before."""
        lowest = None
        for candidate in schedules:
            size = self.peak(candidate.schedule)
            if lowest is None or size < lowest:
                lowest = size
                yield candidate

    def _finer_to(self, i: int) -> Listed:
        """The steps between a plan, if it is a step, and the step before it."""
        schedules = [*itertools.islice(self._plans, i + 1)]
        return self._finer.setdefault(i, Listed(functools.partial(self._between, schedules)))

    def _between(self, schedules: Sequence[Candidate]) -> Iterator[Candidate]:
        """The steps between the last of some plans and the step before, by loops that are split."""
        steps = [*self._steps(schedules)] if loops(self._problem.program) else []
        if len(steps) < 2 or steps[-1] is not schedules[-1]:
            return
        above, below = steps[-2:]
        regions = self._problem.regions
        if any(c.shapes or c.regions != regions for c in (above, below)):
            return
        high, low = self.peak(above.schedule), self.peak(below.schedule)
        parts = split(self._problem, above.schedule, below.schedule)
        yield from self._steps(
            w for w in parts
            if above.work < w.work < below.work and low < self.peak(w.schedule) < high
        )  # fmt: skip

    def _by_work(self) -> Iterator[Candidate]:
        """All plans by rising work."""
        regions = self._problem.regions
        as_written = [Candidate(schedule, {}, regions) for schedule in self._flat()]
        flat = iter(sorted((*as_written, *stock(self._problem)), key=_work))
        if not loops(self._problem.program):
            yield from flat
            return
        least = self._least_work()
        for candidate in flat:
            if candidate.work[0] >= least:
                flat = itertools.chain([candidate], flat)
                break
            yield candidate
        others = sorted(nested(self._problem), key=_work), *stored(self._problem)
        yield from heapq.merge(flat, *others, key=_work)

    def _least_work(self) -> float:
        """A bound on the work of each plan that changes a loop.

        At least every other step is run again, to make the state that it hands on.
        """
        large = *large_loops(self._problem).values(), *inner_loops(self._problem).values()
        return min(map(_half, large), default=0)


def _work(candidate: Candidate) -> tuple[int, int]:
    return candidate.work


def _half(loop: PlannedLoop) -> float:
    """FLOPs of every other step of a loop: of the work that it needs for its next state."""
    node = loop.node
    (joint,), (_, n_states) = node.joints, scan_counts(node.eqn.params)
    states = joint.outputs[:n_states]
    equations = live(joint.forward, states, effects=False)
    step = sum(equation_flops(bound(e)) for e in equations if not fusible(e))
    return loop.runs * node.trips * step / 2


def front(problem: Problem) -> Front:
    """The candidates for a budget of the peak; kept in the program's cache."""
    cache = problem.joint().program.cache
    key: Any = "front", problem.device, problem.link
    if key not in cache:
        cache[key] = Front(problem, lambda: cuts(problem), problem.peak)
    return cache[key]
