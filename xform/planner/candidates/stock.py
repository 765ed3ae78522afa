"""JAX's stock policies and the program as its author marked it, as candidates for a budget.

So a search that compiles enough candidates recomputes at most as much as these plans do within the
same bytes.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from xform._jax import name_p
from xform.interpret.joint import Joint, Schedule
from xform.planner.candidate import Candidate
from xform.planner.costs.outcome import saved_bytes
from xform.planner.costs.recompute import repeatable
from xform.planner.problem import Problem
from xform.policies import (
    TAG,
    min_cut,
    save_dots,
    save_dots_with_no_batch_dims,
    save_everything,
    save_nothing,
    save_only_these_names,
)

_STOCK = save_everything, save_dots, save_dots_with_no_batch_dims, save_nothing
# The maximum number of names to try. Names that spare the most FLOPs per byte come first.
_NAMES = 16


def stock_candidates(problem: Problem) -> list[Candidate]:
    """Candidates that a user could have written by hand.

    They are JAX's stock policies, policies that save the values of some names and, if regions are
    open, the program as its author marked it. Candidates that recompute operations which budgets
    never recompute, such as random numbers, are left out, except the author's own program. The
    program's cache holds the result.
    """
    cache = problem.joint().program.cache
    key: Any = "stock", problem.device, problem.marked
    if key not in cache:
        candidates = *map(problem.candidate, _STOCK), *_named_candidates(problem)
        allowed = [c for c in candidates if _only_repeatable(c.schedule)]
        cache[key] = [*allowed, *_as_marked(problem)]
    return cache[key]


def reference_candidate(problem: Problem) -> Candidate:
    """The stock candidate that is compiled before a budget is refused.

    If regions are open, it is the program as its author marked it, else the candidate with the
    lowest simulated peak.
    """
    if problem.regions == "open":
        return stock_candidates(problem)[-1]
    return min(stock_candidates(problem), key=lambda candidate: problem.peak(candidate.schedule))


def _as_marked(problem: Problem) -> Iterator[Candidate]:
    """If regions are open, yield the marked program under `min_cut` and `save_everything`."""
    if problem.regions == "open":
        author = dataclasses.replace(problem, regions="marked")
        yield from map(author.candidate, (min_cut, save_everything))


def _named_candidates(problem: Problem) -> Iterator[Candidate]:
    """Yield candidates that save the values with some names (`checkpoint_name`) in every layer.

    Names are ranked by the recomputed FLOPs that each of their bytes spares. The candidates save
    each name alone, and the first two names, the first three, and so on.
    """
    names = sorted(_names_in(problem.joint()))
    if not names:
        return
    nothing = problem.candidate(save_only_these_names())
    alone = {name: problem.candidate(save_only_these_names(name)) for name in names}

    def flops_per_byte(name: str) -> float:
        spared = nothing.work[0] - alone[name].work[0]
        return spared / max(saved_bytes(alone[name].schedule) - saved_bytes(nothing.schedule), 1)

    best = sorted(names, key=flops_per_byte, reverse=True)[:_NAMES]
    for i, name in enumerate(best):
        yield alone[name]
        if i:
            yield problem.candidate(save_only_these_names(*best[: i + 1]))


def _only_repeatable(schedule: Schedule) -> bool:
    """Whether a Schedule recomputes only operations that a budget may recompute."""
    recomputed = (eqn for eqn in schedule.order if id(eqn) in schedule.recomputed)
    inner = (schedules for node, schedules in schedule.inner.items() if not node.region)
    return all(map(repeatable, recomputed)) and all(map(_only_repeatable, itertools.chain(*inner)))


def _names_in(joint: Joint) -> set[str]:
    """The names of a Joint's forward values, including values in loops and calls."""
    own_names = {e.params["name"] for e in joint.forward if e.primitive is name_p}
    nodes = (e.params["node"] for e in joint.forks.values())
    inner = (_names_in(j) for node in nodes if not node.region for j in node.joints)
    return {name for name in own_names if not name.startswith(TAG)}.union(*inner)
