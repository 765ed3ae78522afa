"""What one program takes on one target, each way, and whether its gradients are JAX's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

import xform
from experiments.timing import paired
from experiments.unmodified.ways import BUDGETS, JAX, XFORM, Loss, Way, budget, ours
from xform.errors import BudgetInfeasible, CompilationFailed
from xform.planner.candidate import Candidate
from xform.planner.costs.outcome import kept_bytes
from xform.planner.planned import planned
from xform.planner.planning import planning

Size = dict[str, Any]


def sizes(
    loss: Loss, args: Sequence[Any], target: str, seen: Mapping[str, Size], wanted: Sequence[str]
) -> Iterator[tuple[str, Size]]:
    """Bytes and FLOPs of the `wanted` ways that are not among those `seen`, as they are compiled.

    A budget is of JAX's ways, so these come first.
    """
    found = dict(seen)
    for name in (*JAX, *XFORM, *BUDGETS):
        if name not in wanted or name in found:
            continue
        if name not in BUDGETS:
            found[name] = size((JAX | XFORM)[name], loss, args, target)
        elif "refused" in found["jax.grad"]:
            continue
        else:
            found[name] = within(budget(name, found), loss, args, target)
        yield name, found[name]


def size(way: Way, loss: Loss, args: Sequence[Any], target: str) -> Size:
    """What the target's compiler says of a gradient; of ours, what a plan keeps too.

    `live` are the bytes that wait for the backward pass at the peak, by the compiler.
    """
    step = lambda *args: way(loss)(*args)
    kept: list[int] = []

    def watched(*asked: Any) -> Candidate:
        kept.append(kept_bytes((chosen := planned(*asked)).schedule))
        return chosen

    try:
        with planning(watched):
            report = xform.memory_analysis(step, *args, target=target)
    except CompilationFailed as refused:
        return {"refused": str(refused)}
    live = sum(row.bytes for row in report.peak if row.category == "activation")
    plan = {"kept": kept[-1], "live": live} if kept else {}
    return {"temp": report.temp_bytes, "total": report.total_bytes, "flops": report.flops, **plan}


def within(limit: int, loss: Loss, args: Sequence[Any], target: str) -> Size:
    """The same of a plan that the compiler agrees fits, or the least bytes that there are."""
    policy = xform.policies.budget(limit)
    try:
        plan = xform.plan(loss, *args, policy=policy, target=target)
    except BudgetInfeasible as refused:
        return {"budget": limit, "floor": refused.floor_bytes}
    return {"budget": limit, **size(ours(plan), loss, args, target)}


def agreement(loss: Loss, args: Sequence[Any], pairs: int) -> dict[str, Any]:
    """How far the default's loss and gradients are from JAX's, and the ratio of step times."""
    mine, theirs = (jax.jit(way(loss)).lower(*args).compile()
                    for way in (XFORM["default"], JAX["jax.grad"]))  # fmt: skip
    return differences(mine, theirs, args) | {"time": paired(mine, theirs, args, n=pairs)}


def differences(
    mine: Callable[..., Any], theirs: Callable[..., Any], args: Sequence[Any]
) -> dict[str, float]:
    """How far one loss and its gradients are from another's."""
    (one, grads), (other, expected) = mine(*args), theirs(*args)
    # What is 0 but for rounding, as of biases of keys in attention, is measured by the others.
    least = 1e-6 * max(float(np.max(np.abs(x), initial=0)) for x in jax.tree.leaves(expected))
    far = jax.tree.map(lambda a, b: distance(a, b, least), grads, expected)
    return {
        "loss": float(one),
        "loss difference": distance(one, other),
        "gradient difference": max(jax.tree.leaves(far)),
    }


def distance(one: Any, other: Any, least: float = 1e-30) -> float:
    """The largest difference of two arrays, by the largest number of the second, or `least`."""
    a, b = np.asarray(one, np.float64), np.asarray(other, np.float64)
    return float(np.max(np.abs(a - b), initial=0) / max(np.max(np.abs(b), initial=0), least))
