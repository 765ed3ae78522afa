"""Compile the programs of public reports with both gradients, and compare bytes and values.

python -m experiments.unmodified.reports.run                      # all programs, the table
python -m experiments.unmodified.reports.run --write              # the table goes to README.md
python -m experiments.unmodified.reports.run --only "waves"       # one program
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import xform
from experiments.report import keep, known, write_table
from experiments.unmodified.reports import loops, networks
from experiments.unmodified.reports.report import Made, Report

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
REPORTS = loops.REPORTS | networks.REPORTS
HEAD = ["program", "report", "jax.grad, MiB", "bytes", "gradient differs by"]


def measured(made: Made) -> dict[str, Any]:
    """Return the temporary bytes under both gradients, and how much their values differ."""
    loss, args = made
    steps = [jax.jit(g(loss)).lower(*args).compile() for g in (jax.grad, xform.grad)]
    theirs, ours = (step.memory_analysis().temp_size_in_bytes for step in steps)
    pairs = zip(*(jax.tree.leaves(step(*args)) for step in steps), strict=True)
    return {
        "jax.grad": theirs,
        "xform.grad": ours,
        "differs": max(_difference(*pair) for pair in pairs),
    }


def _difference(expected: jax.Array, found: jax.Array) -> float:
    """Return the largest difference of two arrays, relative to the largest number in them."""
    largest = jnp.maximum(jnp.max(jnp.abs(expected)), 1e-30)
    return float(jnp.max(jnp.abs(found - expected)) / largest)


def row(name: str, found: dict[str, Any]) -> Sequence[str]:
    """Return the row of a program."""
    report: Report = REPORTS[name]
    theirs, ours = found["jax.grad"], found["xform.grad"]
    address = f"[{report.address}]({report.url})"
    return [
        name,
        address,
        f"{theirs / 2**20:.2f}",
        f"{ours / theirs:.2f}",
        f"{found['differs']:.0e}",
    ]


def main() -> None:
    """Measure the programs that the command line names, and write the table of all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", action="append", choices=list(REPORTS))
    only = parser.parse_args().only
    for name in only or REPORTS:
        found = measured(REPORTS[name].make())
        print(*row(name, found), sep=" | ", flush=True)
        keep(RESULTS, f"{name}, JAX {jax.__version__}", found)
    results = known(RESULTS)
    rows = {n: results.get(f"{n}, JAX {jax.__version__}") for n in REPORTS}
    ratios = [x["xform.grad"] / x["jax.grad"] for x in rows.values() if x]
    summary = ["median", "", "", f"{statistics.median(ratios):.2f}", ""]
    worst = ["worst", "", "", f"{max(ratios):.2f}", ""]
    write_table(HERE, HEAD, [*(row(n, x) for n, x in rows.items() if x), summary, worst])


if __name__ == "__main__":
    main()
