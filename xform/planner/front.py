"""Make the candidates of a program by rising recomputed FLOPs, and find its Pareto front.

Each candidate on the front recomputes more than the one before and takes fewer bytes. All budgets
of a program share one front. So on the front a smaller budget never gets a candidate that
recomputes less. Candidates are made on demand: first those that leave the loops as written, then
also those whose loops are split, nested, or store only some of their states.

A `Candidate` has changes to the loops of the program, and a *Schedule* of the changed program,
which says which values are saved and which equations are recomputed.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from xform._jax import scan_counts
from xform.interpret.cost import equation_flops
from xform.interpret.joint import Schedule
from xform.interpret.node import user_equation
from xform.passes.dce import live
from xform.planner.candidate import Candidate
from xform.planner.candidates.as_written import cut_schedules
from xform.planner.candidates.large_loops import PlannedLoop, inner_loops, large_loops
from xform.planner.candidates.nested import nested_candidates
from xform.planner.candidates.snapshots import snapshot_candidates
from xform.planner.candidates.split import split_candidates
from xform.planner.candidates.stock import stock_candidates
from xform.planner.costs.recompute import fusible
from xform.planner.loops import loops
from xform.planner.problem import Problem
from xform.terminal import progress_line

# Returns whether a candidate fits a budget.
Fits = Callable[[Candidate], bool]


class LazyCandidates(Iterable[Candidate]):
    """A lazy list of candidates: each is made at its first use and then stored.

    `make` returns an iterator over the candidates. If an exception interrupts it, such as Ctrl-C,
    the next use calls `make` again and continues after the stored ones. One thread makes candidates
    at a time; the others wait.
    """

    def __init__(self, make: Callable[[], Iterator[Candidate]]):
        self._make, self._produced = make, list[Candidate]()
        self._rest: Iterator[Candidate] | None = None
        self._lock = threading.RLock()

    def __iter__(self) -> Iterator[Candidate]:
        for i in itertools.count():
            with self._lock:
                item = self._produced[i] if i < len(self._produced) else self._produce_next()
            if item is None:
                return
            yield item

    def _produce_next(self) -> Candidate | None:
        """Make the next candidate and store it; None: there are no more."""
        rest = self._rest or itertools.islice(self._make(), len(self._produced), None)
        self._rest = None  # stays None if the next line is interrupted
        with progress_line.show(f"making candidate {len(self._produced) + 1}"):
            item = next(rest, None)
        if item is not None:
            self._produced.append(item)
        self._rest = rest
        return item


class Front:
    """The candidates of one program, in the order of their recomputed FLOPs.

    Args:
      problem: the derivative, and the device.
      as_written: returns Schedules of the program with its loops as written.
      bytes_of: returns the bytes of a Schedule that a budget bounds: its simulated peak, or its
        saved bytes.
    """

    def __init__(
        self,
        problem: Problem,
        as_written: Callable[[], Sequence[Schedule]],
        bytes_of: Callable[[Schedule], int],
    ):
        self._problem, self._as_written, self.bytes_of = problem, as_written, bytes_of
        self._plans = LazyCandidates(self._by_work)
        self._split_plans_cache: dict[int, LazyCandidates] = {}

    def least_recompute(self, fits: Fits) -> Candidate | None:
        """Return the candidate that fits and recomputes least; None if no candidate fits."""
        for i, candidate in enumerate(self._plans):
            if fits(candidate):
                return next(filter(fits, self._split_plans_before(i)), candidate)
        return None

    def cheaper(self, last: Candidate, fits: Fits) -> Iterator[Candidate]:
        """Yield the candidates that fit and recompute less than `last`.

        Candidates with split loops between two candidates of the front are included.
        """
        for i, candidate in enumerate(self._plans):
            if fits(candidate):
                plans = (*self._split_plans_before(i), candidate)
                yield from (c for c in plans if c.work < last.work and fits(c))
            if candidate.work > last.work:
                return

    def smallest(self) -> list[Candidate]:
        """Return the two smallest candidates of the front (or its only one), the smallest first.

        Other candidates may have exactly the simulated bytes of the smallest. The one of these that
        recomputes most is added in second place, because it may be smaller when it is compiled.
        """
        smallest, *second = [*self._pareto(self._plans)][:-3:-1]
        least_bytes = self.bytes_of(smallest.schedule)
        others = (c for c in self._plans if c is not smallest)
        equal_bytes = [c for c in others if self.bytes_of(c.schedule) == least_bytes]
        return [smallest, *equal_bytes[-1:], *second]

    def _pareto(self, candidates: Iterable[Candidate]) -> Iterator[Candidate]:
        """Keep the candidates that take fewer bytes than every candidate before them."""
        lowest = None
        for candidate in candidates:
            size = self.bytes_of(candidate.schedule)
            if lowest is None or size < lowest:
                lowest = size
                yield candidate

    def _split_plans_before(self, i: int) -> LazyCandidates:
        """Return the candidates with split loops between `i` and the one before it on the front.

        The list is empty if candidate `i` is not on the front.
        """
        candidates = [*itertools.islice(self._plans, i + 1)]
        between = LazyCandidates(functools.partial(self._split_plans, candidates))
        return self._split_plans_cache.setdefault(i, between)

    def _split_plans(self, candidates: Sequence[Candidate]) -> Iterator[Candidate]:
        """Yield candidates with split loops between the last two of `candidates` on the front."""
        on_front = [*self._pareto(candidates)] if loops(self._problem.program) else []
        if len(on_front) < 2 or on_front[-1] is not candidates[-1]:
            return
        above, below = on_front[-2:]  # the one with more bytes, and the one with fewer
        regions = self._problem.regions
        if any(c.shapes or c.regions != regions for c in (above, below)):
            return
        high, low = self.bytes_of(above.schedule), self.bytes_of(below.schedule)
        split = split_candidates(self._problem, above.schedule, below.schedule)
        yield from self._pareto(
            c for c in split
            if above.work < c.work < below.work and low < self.bytes_of(c.schedule) < high
        )  # fmt: skip

    def _by_work(self) -> Iterator[Candidate]:
        """Yield all candidates in the order of their recomputed FLOPs."""
        problem = self._problem
        changes: Any = problem.regions, problem.slices, problem.flops_in_slices
        as_written = [Candidate(schedule, {}, *changes) for schedule in self._as_written()]
        unchanged = iter(sorted((*as_written, *stock_candidates(self._problem)), key=_work))
        if not loops(self._problem.program):
            yield from unchanged
            return
        # Candidates with changed loops take long to make. So first yield those that recompute less
        # than any candidate with a changed loop.
        least_flops = self._least_loop_flops()
        for candidate in unchanged:
            if candidate.work[0] >= least_flops:
                unchanged = itertools.chain([candidate], unchanged)
                break
            yield candidate
        changed = (
            sorted(nested_candidates(self._problem), key=_work),
            *snapshot_candidates(self._problem),
        )
        yield from heapq.merge(unchanged, *changed, key=_work)

    def _least_loop_flops(self) -> float:
        """Return a lower bound on the FLOPs that any candidate with a changed loop recomputes."""
        large = *large_loops(self._problem).values(), *inner_loops(self._problem).values()
        return min(map(_recompute_lower_bound, large), default=0)


def _work(candidate: Candidate) -> tuple[int, int]:
    """Return the sort key of a candidate: recomputed FLOPs, then bytes sent to the host."""
    return candidate.work


def _recompute_lower_bound(loop: PlannedLoop) -> float:
    """Return a lower bound on the recomputed FLOPs of a changed loop: half of its state updates.

    A state update is the part of the loop's body that computes the next carry.
    """
    node = loop.node
    (joint,), (_, n_states) = node.joints, scan_counts(node.eqn.params)
    states = joint.outputs[:n_states]
    equations = live(joint.forward, states, effects=False)
    step_flops = sum(equation_flops(user_equation(e)) for e in equations if not fusible(e))
    return loop.runs * node.iterations * step_flops / 2


def front(problem: Problem) -> Front:
    """Return the Front for budgets of the peak. The program's cache holds it."""
    cache = problem.joint().program.cache
    key: Any = "front", problem.device, problem.link
    if key not in cache:
        cache[key] = Front(problem, lambda: cut_schedules(problem), problem.peak)
    return cache[key]
