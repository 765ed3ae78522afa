"""What the parts of the simulation that imitate XLA:CPU bring to plans for a budget.

python -m experiments.planner.generic
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np

import xform
from experiments.planner.inside import PROGRAMS, total
from experiments.report import write_table
from xform.errors import BudgetInfeasible
from xform.planner import measure
from xform.planner.simulate import profiles, timeline

HERE = Path(__file__).parent
HEAD = ["program", "simulation", "budgets", "refused", "compiled", "FLOPs again / forward",
        "kept by simulation alone", "error of stock plans, median", "worst"]  # fmt: skip
NAMES = ("message passing", "lattice", "graph attention", "diffusion")
STOCK = ("min_cut", "save_everything", "save_dots", "save_nothing")
POINTS = 4
# The fields of the profile without each part.
WITHOUT: dict[str, dict[str, Any]] = {
    "complete": {},
    "without library calls": {"library_elements": 0},
    "without its order": {"breadth_first": False},
    "without its fusion and order": {"kernel_bytes": 1, "breadth_first": False},
    "without gaps in the heap": {},
    "generic": {"library_elements": 0, "breadth_first": False, "kernel_bytes": 1,
                "selects_barriers": False, "widens_products": False, "margin": 0.05,
                "doubt": 0.05},
}  # fmt: skip
NO_GAPS = ("without gaps in the heap", "generic")


@contextlib.contextmanager
def simulated(name: str) -> Iterator[None]:
    """Return a context in which XLA:CPU is simulated without a part of the simulation."""
    timeline._ITERATION_PEAKS.clear()
    with contextlib.ExitStack() as stack:
        profile = dataclasses.replace(profiles.CPU, **WITHOUT[name])
        stack.enter_context(mock.patch.object(profiles, "CPU", profile))
        if name in NO_GAPS:
            no_gaps = lambda sizes, values, peak: peak
            stack.enter_context(mock.patch.object(timeline, "heap_bytes", no_gaps))
        yield
    timeline._ITERATION_PEAKS.clear()


def plan(name: str, policy: Any, verify: bool = True) -> xform.Plan:
    """Return the plan of a program, which is traced again."""
    f, args = PROGRAMS[name]
    return xform.plan(lambda *args: f(*args), *args, policy=policy, verify=verify)


def budgets(name: str) -> list[int]:
    """Return budgets from the default's bytes to the lowest that the complete simulation finds."""
    default = plan(name, None).compiled_bytes or 0
    try:
        plan(name, xform.policies.budget(0))
        raise AssertionError("a budget of no bytes was kept")
    except BudgetInfeasible as error:
        return [int(n) for n in np.linspace(0.995 * default, error.floor_bytes, POINTS)]


def row(name: str, variant: str, limits: list[int], compiled: dict[str, int]) -> list[str]:
    """Return a line of the table: one program under one simulation."""
    made, kept = list[xform.Plan](), 0
    with simulated(variant):
        for n in limits:
            measure._known.clear()  # each budget is the first
            with contextlib.suppress(BudgetInfeasible):
                made.append(plan(name, xform.policies.budget(n)))
            with contextlib.suppress(BudgetInfeasible):
                alone = plan(name, xform.policies.budget(n), verify=False)
                f, args = PROGRAMS[name]
                kept += total(xform.value_and_grad(f, policy=alone), args) <= n
        stock = {p: plan(name, getattr(xform.policies, p), verify=False) for p in STOCK}
    errors = [abs(p.predicted_bytes / compiled[k] - 1) for k, p in stock.items()]
    flops = stock["min_cut"].forward_flops
    return [name, variant, str(len(limits)), str(len(limits) - len(made)),
            f"{statistics.mean(p.compiles for p in made):.1f}" if made else "",
            ", ".join(f"{p.recompute_flops / flops:.2f}" for p in made), str(kept),
            f"{statistics.median(errors):.1%}", f"{max(errors):.1%}"]  # fmt: skip


def main() -> None:
    """Measure each program under each simulation and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(NAMES))
    rows = list[list[str]]()
    for name in parser.parse_args().names:
        limits = budgets(name)
        compiled = {p: plan(name, getattr(xform.policies, p)).compiled_bytes or 0 for p in STOCK}
        for variant in WITHOUT:
            rows.append(row(name, variant, limits, compiled))
            print(rows[-1], flush=True)
    write_table(HERE, HEAD, rows, "generic")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
