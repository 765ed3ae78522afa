"""Measure the bytes of budgets with slices on a device that is absent, by its compiler."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import jax

import xform
from experiments.report import keep, known, write_table
from experiments.slices.programs import MIB, PROGRAMS, Program
from xform.errors import BudgetInfeasible

HERE = Path(__file__).parent
HEAD = ["program", "jax.grad, temporary MiB", "bar",
        "with slices, temporary MiB", "of jax.grad's", "recomputed, of the forward pass",
        "compilations", "seconds of the search", "slices"]  # fmt: skip
# The programs that are measured on each target.
ON_TARGETS = {
    "gpu:h100": ("Flax lm1b", "Flax gemma", "Flax vae"),
    "tpu:v5e:1x1": ("Haiku transformer", "Equinox BERT", "Flax gemma", "Flax lm1b"),
}


def cells(program: Program, folder: Path, target: str) -> list[str]:
    """Return the cells of a row, after the name. The budget is the program's bar."""
    loss, args = program.make(folder)
    of_jax = xform.memory_analysis(jax.grad(loss), *args, target=target)
    outside = of_jax.total_bytes - of_jax.temp_bytes
    budget = outside + int(float(program.bar) * of_jax.temp_bytes)
    row = [f"{of_jax.temp_bytes / MIB:.1f}", program.bar]
    start = time.perf_counter()
    try:
        policy = xform.policies.budget(budget, slices=True)
        plan = xform.plan(loss, *args, policy=policy, target=target)
    except BudgetInfeasible as error:
        floor = error.floor_bytes - outside
        return [*row, f"refused, floor {floor / MIB:.1f}", f"{floor / of_jax.temp_bytes:.2f}", "",
                "", f"{time.perf_counter() - start:.0f}", error.problem]  # fmt: skip
    seconds = time.perf_counter() - start
    temporary = (plan.compiled_bytes or 0) - outside
    slices = "; ".join(text.partition(" (")[0] for text in plan.sliced_regions)
    return [
        *row,
        f"{temporary / MIB:.1f}",
        f"{temporary / of_jax.temp_bytes:.2f}",
        f"{plan.recompute_flops / plan.forward_flops:.1%}",
        f"{plan.compiles}",
        f"{seconds:.0f}",
        slices or "none needed",
    ]


def measure(target: str, folder: Path | None, only: Sequence[str] | None) -> None:
    """Measure the programs of a target that are not stored yet, and write the target's table."""
    results = HERE / f"results-{target.replace(':', '-')}.json"
    for name in ON_TARGETS[target] if folder else ():
        if name in only if only else name not in known(results):
            row = cells(PROGRAMS[name], folder or HERE, target)
            keep(results, name, row)
            print(name, *row, sep=" | ", flush=True)
    found = known(results)
    rows = [[name, *found[name]] for name in ON_TARGETS[target] if name in found]
    write_table(HERE, HEAD, rows, f"table-{target.partition(':')[0]}", target)
