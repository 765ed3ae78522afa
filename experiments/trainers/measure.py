"""Measure one cell of `run.py` in this process, and print its figures as JSON.

The figures that are known already are read from the standard input.
"""

from __future__ import annotations

import json
import site
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

import xform
from experiments.trainers import keras_step, maxtext_step, tunix_step
from experiments.trainers.cells import CELLS, MORE, SHARE, Cell
from xform.errors import BudgetInfeasible
from xform.interpret.cost import flops
from xform.program.ir import program

LISTED = 3
Figures = dict[str, Any]


def step_of(cell: Cell, remat: str) -> Any:
    """Return the trainer's step under one of its own policies."""
    if cell.trainer != "MaxText":
        return {"Tunix": tunix_step, "Keras": keras_step}[cell.trainer].Step(remat_policy=remat)
    dtype = "float32" if cell.target.startswith("cpu") else "bfloat16"
    return maxtext_step.Step(**cell.settings, dtype=dtype, remat_policy=remat)


def theirs(cell: Cell, remat: str) -> Figures:
    """Compile the trainer's step under plain JAX."""
    step = step_of(cell, remat)
    with step.on_mesh():
        jitted = jax.jit(step.run, **step.options)
        report = xform.memory_analysis(jitted, *step.args, target=target_of(cell))
        work = flops(program(jitted.trace(*step.args).jaxpr))
    return {"total": report.total_bytes, "temp": report.temp_bytes, "flops": work}


def everything_saved(cell: Cell) -> int:
    """Return the FLOPs of the step under plain JAX if nothing is recomputed."""
    step = step_of(cell, "minimal")
    run = step.run
    if cell.trainer == "MaxText":  # its policies all recompute something
        run = lambda *args: step.under(*args, policy=jax.checkpoint_policies.everything_saveable)
    with step.on_mesh():
        return flops(program(jax.jit(run, **step.options).trace(*step.args).jaxpr))


def ours(cell: Cell, budget: int) -> Figures:
    """Compile the trainer's step within a budget of xform, with slices and with regions opened."""
    step, start = step_of(cell, "full"), time.perf_counter()
    policy = xform.policies.open_regions(xform.policies.budget(budget, slices=True))
    xform.install()
    try:
        with step.on_mesh():
            jitted = xform.jit(step.run, policy, target=target_of(cell), **step.options)
            try:
                lowered = jitted.lower(*step.args)
            except BudgetInfeasible as error:
                return {"floor": error.floor_bytes, "problem": error.problem}
            work = flops(program(jitted.trace(*step.args).jaxpr))
    finally:
        xform.uninstall()
    plan, report = lowered.plan, lowered.memory_analysis()
    rows = sorted(report.peak, key=lambda row: -row.bytes)[:LISTED]
    return {
        "total": report.total_bytes, "temp": report.temp_bytes, "flops": work,
        "recomputed": sum(p.recompute_flops for p in plan.plans.values()),
        "compiles": plan.compiles, "seconds": time.perf_counter() - start,
        "slices": [text for p in plan.plans.values() for text in p.sliced_regions],
        "largest": [(row.bytes, row.name, row.where) for row in rows],
    }  # fmt: skip


def target_of(cell: Cell) -> str | None:
    """Return the name of an absent target; None for the CPU of this process."""
    return None if cell.target == "cpu" else cell.target


def measure(cell: Cell, found: Figures) -> None:
    """Add all figures of a cell that are missing, and print the figures after each.

    The budget of `minimal`, and the one without their policies, are searched only if no plan that
    was found before keeps their bars.
    """

    def add(name: str, figure: Callable[[], Any]) -> None:
        if name not in found:
            found[name] = figure()
            print(relative(json.dumps(found)), flush=True)

    add("jax", lambda: jax.__version__)
    add("everything", lambda: everything_saved(cell))
    add("full", lambda: theirs(cell, "full"))
    add("minimal", lambda: theirs(cell, "minimal"))
    full, minimal = found["full"], found["minimal"]
    outside = full["total"] - full["temp"]
    if minimal["temp"] is None:  # refused by the compiler, which says how many bytes it needs
        minimal["temp"] = minimal["total"] - outside
    add("at full", lambda: ours(cell, outside + int(cell.share_of_full * full["temp"])))
    keeps_bar = {
        "at minimal": lambda plan: plan["recomputed"] == 0,
        "alone": lambda plan: plan["flops"] <= (1 + MORE) * found["everything"],
    }
    for (name, keeps), share in zip(keeps_bar.items(), (1.0, SHARE), strict=True):
        budget = outside + int(share * minimal["temp"])
        plans = (found[name] for name in ("at full", "at minimal") if name in found)
        known = [p for p in plans if p.get("total", budget + 1) <= budget and keeps(p)]
        add(name, lambda known=known, budget=budget: known[0] if known else ours(cell, budget))


def relative(figures: str) -> str:
    """Return the text with paths relative to the installed packages, or to this folder."""
    for folder in (*site.getsitepackages(), Path.cwd()):
        figures = figures.replace(f"{folder}/", "")
    return figures


def main() -> None:
    measure(CELLS[sys.argv[1]], json.load(sys.stdin))


if __name__ == "__main__":
    main()
