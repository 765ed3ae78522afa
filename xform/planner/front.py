"""The plans of a program that are worth choosing from: a staircase of bytes and work.

Each runs more again than the one before and takes fewer bytes. It is one staircase for all budgets,
which is why fewer bytes never mean less work. It is made as far as somebody asks: by rising work,
first with the loops as they are, then also with those that are taken apart or store some states.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from xform import alive
from xform._jax import scan_counts
from xform.cost import equation_flops
from xform.interpret.joint import Plan, analyze
from xform.interpret.node import bound
from xform.ir import Mask, Program
from xform.passes.dce import live
from xform.planner.backend import backend
from xform.planner.candidates.as_written import cuts
from xform.planner.candidates.nested import nested
from xform.planner.candidates.snapshots import stored
from xform.planner.candidates.split import split
from xform.planner.candidates.whole import Whole
from xform.planner.candidates.worth import PlannedLoop, inner_loops, large_loops
from xform.planner.costs.link import link_of
from xform.planner.costs.recompute import fusible
from xform.planner.loops import loops
from xform.planner.simulate.liveness import liveness

# How many plans are the lowest: the last steps of a staircase, and one that is as low.
LOWEST = 4

Ends = tuple[Program, Mask, Mask]
Fits = Callable[[Whole], bool]


class Listed(Iterable[Whole]):
    """The plans that an iterator makes, each made when it is first asked for.

    One that was interrupted is made again, and goes on where it was; threads wait for each other.
    """

    def __init__(self, make: Callable[[], Iterator[Whole]]):
        self._make, self._made = make, list[Whole]()
        self._rest: Iterator[Whole] | None = None
        self._lock = threading.RLock()

    def __iter__(self) -> Iterator[Whole]:
        for i in itertools.count():
            with self._lock:
                following = self._made[i] if i < len(self._made) else self._following()
            if following is None:
                return
            yield following

    def _following(self) -> Whole | None:
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
      ends: the program, its inputs that are differentiated, its outputs that bring a cotangent.
      flat: makes the plans with the loops as they are.
      peak: the bytes of a plan.
    """

    def __init__(self, ends: Ends, flat: Callable[[], Sequence[Plan]], peak: Callable[[Plan], int]):
        self._ends, self._flat, self.peak = ends, flat, peak
        self._plans = Listed(self._by_work)
        self._finer: dict[int, Listed] = {}

    def first(self, fits: Fits) -> Whole | None:
        """The plan of the least work that fits; None if none does."""
        for i, whole in enumerate(self._plans):
            if fits(whole):
                return next(filter(fits, self._finer_to(i)), whole)
        return None

    def before(self, last: Whole, nearly: Fits) -> Iterator[Whole]:
        """The steps before one, of no more work, that `nearly` fit, from the last to the first.

        One of the same work may be the smaller by the compiler.
        """
        places, lowest, end = list[int](), math.inf, self.peak(last.plan)
        for i, whole in enumerate(self._plans):
            if nearly(whole) and (size := self.peak(whole.plan)) < lowest:
                places.append(i)
                lowest = size
            if lowest <= end:
                break
        for i in reversed(places):
            (whole,) = itertools.islice(self._plans, i, i + 1)
            steps = [*self._finer_to(i), whole]
            earlier = (
                w for w in reversed(steps) if w.work <= last.work and w.plan is not last.plan
            )
            yield from filter(nearly, earlier)

    def lowest(self) -> list[Whole]:
        """The plans of the fewest bytes, by rising bytes: the last few steps.

        And the one of the most work that takes no more than the lowest: by the compiler it may be
        lower.
        """
        foot, *steps = [*self._steps(self._plans)][:-LOWEST:-1]
        least = self.peak(foot.plan)
        alike = [w for w in self._plans if w is not foot and self.peak(w.plan) == least]
        return [foot, *alike[-1:], *steps]

    def _steps(self, plans: Iterable[Whole]) -> Iterator[Whole]:
        """Those of some plans that take fewer bytes than all before."""
        lowest = None
        for whole in plans:
            size = self.peak(whole.plan)
            if lowest is None or size < lowest:
                lowest = size
                yield whole

    def _finer_to(self, i: int) -> Listed:
        """The steps between a plan, if it is a step, and the step before it."""
        plans = [*itertools.islice(self._plans, i + 1)]
        return self._finer.setdefault(i, Listed(functools.partial(self._between, plans)))

    def _between(self, plans: Sequence[Whole]) -> Iterator[Whole]:
        """The steps between the last of some plans and the step before, by loops that are split."""
        steps = [*self._steps(plans)] if loops(self._ends[0]) else []
        if len(steps) < 2 or steps[-1] is not plans[-1]:
            return
        above, below = steps[-2:]
        if above.shapes or below.shapes:
            return
        high, low = self.peak(above.plan), self.peak(below.plan)
        parts = split(*self._ends, above.plan, below.plan)
        yield from self._steps(
            w for w in parts
            if above.work < w.work < below.work and low < self.peak(w.plan) < high
        )  # fmt: skip

    def _by_work(self) -> Iterator[Whole]:
        """All plans by rising work."""
        flat = iter(sorted((Whole(plan, {}) for plan in self._flat()), key=_work))
        if not loops(self._ends[0]):
            yield from flat
            return
        least = self._least_work()
        for whole in flat:
            if whole.work[0] >= least:
                flat = itertools.chain([whole], flat)
                break
            yield whole
        others = sorted(nested(*self._ends), key=_work), *stored(*self._ends)
        yield from heapq.merge(flat, *others, key=_work)

    def _least_work(self) -> float:
        """A bound on the work of each plan that changes a loop.

        At least every other step is run again, to make the state that it hands on.
        """
        large = *large_loops(*self._ends).values(), *inner_loops(*self._ends).values()
        return min(map(_half, large), default=0)


def _work(whole: Whole) -> tuple[int, int]:
    return whole.work


def _half(loop: PlannedLoop) -> float:
    """FLOPs of every other step of a loop: of the work that it needs for its next state."""
    node = loop.node
    (joint,), (_, n_states) = node.joints, scan_counts(node.eqn.params)
    states = joint.outputs[:n_states]
    equations = live(joint.forward, states, effects=False)
    step = sum(equation_flops(bound(e)) for e in equations if not fusible(e))
    return loop.runs * node.trips * step / 2


def front(prog: Program, active: Mask, wanted: Mask, offload: bool = True) -> Front:
    """The candidates for a budget of the peak, on the backend that is planned for.

    Without `offload`, the link to the host is ignored.
    """
    here, link = backend(), link_of() if offload else None
    joint = analyze(prog, active, wanted)
    key: Any = "front", here, link
    if key not in joint.program.cache:
        peak = lambda candidate: liveness(candidate, here).total_bytes
        joint.program.cache[key] = Front((prog, active, wanted), lambda: cuts(joint, link), peak)
    return joint.program.cache[key]
