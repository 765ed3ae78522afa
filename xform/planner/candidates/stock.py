"""Plans that a user could have written by hand, as candidates for a budget.

They are JAX's stock policies, policies that save named values (`checkpoint_name`), and the program
with the remat regions that its author marked by `jax.checkpoint`. With these candidates, a search
that compiles enough plans never recomputes more than they do within the same bytes.

A *Schedule* is the plan of a program with its loops as written: which values are saved for the
backward pass, and which equations are recomputed.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from xform.interpret.joint import Joint, Schedule
from xform.planner.candidate import Candidate
from xform.planner.costs.outcome import saved_bytes
from xform.planner.costs.recompute import recomputable
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
from xform.registry.table import label

_STOCK = save_everything, save_dots, save_dots_with_no_batch_dims, save_nothing
# The maximum number of names to try. The names that spare the most FLOPs per byte are tried.
_MAX_NAMES = 16


def stock_candidates(problem: Problem) -> list[Candidate]:
    """Return the candidates that a user could have written by hand.

    The program with its author's remat regions is among them, as the last two candidates, only if
    `problem` dissolves the regions. Other candidates are left out if they recompute operations that
    budgets never recompute, such as kernels. The program's cache holds the result.
    """
    cache = problem.joint().program.cache
    key: Any = "stock", problem.device, problem.marked
    if key not in cache:
        candidates = *map(problem.candidate, _STOCK), *_named_candidates(problem)
        allowed = [c for c in candidates if _recomputes_allowed(c.schedule)]
        cache[key] = [*allowed, *_as_marked(problem)]
    return cache[key]


def reference_candidates(problem: Problem) -> list[Candidate]:
    """Return the stock candidates by rising simulated peak, to compile before a budget is refused.

    If `problem` dissolves remat regions, the program with its author's regions comes first.
    """
    candidates = stock_candidates(problem)
    as_marked = candidates[-1:] if problem.regions == "open" else []
    return as_marked + sorted(candidates, key=lambda candidate: problem.peak(candidate.schedule))


def _as_marked(problem: Problem) -> Iterator[Candidate]:
    """Yield the program with its author's regions, under `min_cut` and under `save_everything`.

    Yield nothing if `problem` keeps the regions anyway.
    """
    if problem.regions == "open":
        as_marked = dataclasses.replace(problem, regions="marked", slices=())
        yield from map(as_marked.candidate, (min_cut, save_everything))


def _named_candidates(problem: Problem) -> Iterator[Candidate]:
    """Yield candidates that save the values with some names (`checkpoint_name`) in every layer.

    Names are ranked by the FLOPs per byte that are not recomputed if the values are saved. The
    candidates save each name alone, and the first two names, the first three, and so on.
    """
    names = sorted(_names_in(problem.joint()))
    if not names:
        return
    nothing = problem.candidate(save_only_these_names())
    alone = {name: problem.candidate(save_only_these_names(name)) for name in names}

    def flops_per_byte(name: str) -> float:
        spared = nothing.work[0] - alone[name].work[0]
        return spared / max(saved_bytes(alone[name].schedule) - saved_bytes(nothing.schedule), 1)

    best = sorted(names, key=flops_per_byte, reverse=True)[:_MAX_NAMES]
    for i, name in enumerate(best):
        yield alone[name]
        if i:
            yield problem.candidate(save_only_these_names(*best[: i + 1]))


def _recomputes_allowed(schedule: Schedule) -> bool:
    """Return whether a Schedule recomputes only operations that a budget may recompute."""
    recomputed = (eqn for eqn in schedule.order if id(eqn) in schedule.recomputed)
    inner = (schedules for node, schedules in schedule.inner.items() if not node.region)
    return all(map(recomputable, recomputed)) and all(
        map(_recomputes_allowed, itertools.chain(*inner))
    )


def _names_in(joint: Joint) -> set[str]:
    """Return the names of the forward values of a derivative, also in loops and calls."""
    own_names = {name for e in joint.forward if (name := label(e.primitive, e.params))}
    nodes = (e.params["node"] for e in joint.forks.values())
    inner = (_names_in(j) for node in nodes if not node.region for j in node.joints)
    return {name for name in own_names if not name.startswith(TAG)}.union(*inner)
