"""JAX's stock policies and the author's own marks, as candidates for a budget.

A search that compiles enough of its candidates runs no more again than these do at their bytes.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from xform._jax import name_p
from xform.interpret.joint import Joint, Schedule
from xform.planner.candidate import Candidate
from xform.planner.costs.outcome import kept_bytes
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
# At most so many names are tried, from the one that spares the most work for its bytes on.
_NAMES = 16


def stock(problem: Problem) -> list[Candidate]:
    """Candidates that a user could have written.

    They are JAX's stock policies, policies that save the values of some names and, where regions
    are open, the program as its author marked it. Candidates that draw random numbers again are
    left out, unless the author's marks do so. Kept in the program's cache.
    """
    cache = problem.joint().program.cache
    key: Any = "stock", problem.device, problem.marked
    if key not in cache:
        made = *map(problem.candidate, _STOCK), *_named(problem)
        cache[key] = [c for c in made if _repeatable(c.schedule)] + [*_authors(problem)]
    return cache[key]


def reference(problem: Problem) -> Candidate:
    """The one of them that is compiled before a budget is refused.

    The program as its author wrote it, where regions are open; else the one of the fewest bytes.
    """
    if problem.regions == "open":
        return stock(problem)[-1]
    return min(stock(problem), key=lambda candidate: problem.peak(candidate.schedule))


def _authors(problem: Problem) -> Iterator[Candidate]:
    """The marked program, by xform's default and as JAX saves its values."""
    if problem.regions == "open":
        author = dataclasses.replace(problem, regions="marked")
        yield from map(author.candidate, (min_cut, save_everything))


def _named(problem: Problem) -> Iterator[Candidate]:
    """Schedules that save the values that `checkpoint_name` gave some names, in every layer.

    The names that spare the most work for each byte come first: one name is saved, then two, and so
    on. Each is also saved alone.
    """
    names = sorted(_names(problem.joint()))
    if not names:
        return
    nothing = problem.candidate(save_only_these_names())
    alone = {name: problem.candidate(save_only_these_names(name)) for name in names}

    def spared(name: str) -> float:
        work = nothing.work[0] - alone[name].work[0]
        return work / max(kept_bytes(alone[name].schedule) - kept_bytes(nothing.schedule), 1)

    best = sorted(names, key=spared, reverse=True)[:_NAMES]
    for i, name in enumerate(best):
        yield alone[name]
        if i:
            yield problem.candidate(save_only_these_names(*best[: i + 1]))


def _repeatable(schedule: Schedule) -> bool:
    """Whether a Schedule runs only operations again that a budget runs again."""
    again = (eqn for eqn in schedule.order if id(eqn) in schedule.recomputed)
    inner = (schedules for node, schedules in schedule.inner.items() if not node.region)
    return all(map(repeatable, again)) and all(map(_repeatable, itertools.chain(*inner)))


def _names(joint: Joint) -> set[str]:
    """The names of a Joint's forward values, in loops, calls and open regions too."""
    own = {e.params["name"] for e in joint.forward if e.primitive is name_p}
    nodes = (e.params["node"] for e in joint.forks.values())
    inner = (_names(j) for node in nodes if not node.region for j in node.joints)
    return {name for name in own if not name.startswith(TAG)}.union(*inner)
