"""Measure the bytes of one program on one target in each way, and compare gradients with JAX's."""

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
from xform.planner.costs.outcome import saved_bytes
from xform.planner.plan_program import plan_program
from xform.planner.planning import use_planner

Size = dict[str, Any]


def sizes(
    loss: Loss, args: Sequence[Any], target: str, seen: Mapping[str, Size], wanted: Sequence[str]
) -> Iterator[tuple[str, Size]]:
    """Return bytes and FLOPs of the `wanted` ways that are not among those `seen`.

    A budget depends on JAX's ways, so these come first.
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
    """Return the compiler's numbers for a gradient; for xform, also the bytes that a plan saves.

    `live` are the residual bytes that are live at the peak, according to the compiler.
    """
    step = lambda *args: way(loss)(*args)
    kept: list[int] = []

    def watched(*asked: Any) -> Candidate:
        kept.append(saved_bytes((chosen := plan_program(*asked)).schedule))
        return chosen

    try:
        with use_planner(watched):
            report = xform.memory_analysis(step, *args, target=target)
    except CompilationFailed as refused:
        return {"refused": str(refused)}
    live = sum(row.bytes for row in report.peak if row.category == "activation")
    plan = {"kept": kept[-1], "live": live} if kept else {}
    return {"temp": report.temp_bytes, "total": report.total_bytes, "flops": report.flops, **plan}


def within(limit: int, loss: Loss, args: Sequence[Any], target: str) -> Size:
    """Return the same for a plan that fits according to the compiler, or the fewest bytes found."""
    policy = xform.policies.budget(limit)
    try:
        plan = xform.plan(loss, *args, policy=policy, target=target)
    except BudgetInfeasible as refused:
        return {"budget": limit, "floor": refused.floor_bytes}
    return {"budget": limit, **size(ours(plan), loss, args, target)}


def agreement(loss: Loss, args: Sequence[Any], pairs: int) -> dict[str, Any]:
    """Return the default's difference from JAX in loss and gradients, and the time ratio."""
    mine, theirs = (jax.jit(way(loss)).lower(*args).compile()
                    for way in (XFORM["default"], JAX["jax.grad"]))  # fmt: skip
    return differences(mine, theirs, args) | {"time": paired(mine, theirs, args, n=pairs)}


def differences(
    mine: Callable[..., Any], theirs: Callable[..., Any], args: Sequence[Any]
) -> dict[str, float]:
    """Return how far one loss and its gradients are from another's."""
    (one, grads), (other, expected) = mine(*args), theirs(*args)
    # Gradients that are 0 except for rounding, such as attention's key biases, are measured
    # relative to the others.
    least = 1e-6 * max(float(np.max(np.abs(x), initial=0)) for x in jax.tree.leaves(expected))
    far = jax.tree.map(lambda a, b: distance(a, b, least), grads, expected)
    return {
        "loss": float(one),
        "loss difference": distance(one, other),
        "gradient difference": max(jax.tree.leaves(far)),
    }


def distance(one: Any, other: Any, least: float = 1e-30) -> float:
    """Return the largest difference, relative to the second array's largest number or `least`."""
    a, b = np.asarray(one, np.float64), np.asarray(other, np.float64)
    return float(np.max(np.abs(a - b), initial=0) / max(np.max(np.abs(b), initial=0), least))
