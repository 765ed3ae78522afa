"""Measure all claims and write one table: each claim holds, holds under a condition, or is wrong.

python -m experiments.claims.run [--quick] [--only NAME,NAME]
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import time
from pathlib import Path

import matplotlib.pyplot as plt

from experiments.claims.claim import Claim, Finding
from experiments.report import keep, known, write_table

HERE = Path(__file__).parent
RESULTS, PLOTS = HERE / "results.json", HERE / "plots"
# In the order of the table.
MODULES = (
    "gradient_cost", "one_pass", "jacobian_cost", "column_by_column", "forward_pays", "chains",
    "stability", "backward_errors", "hessian_products", "hessian_uses", "worked_graphs",
    "inner_values", "kinks", "hand_written", "hand_written_networks", "training_memory",
    "activations", "activation_factor", "scaling", "resnet", "relu", "saved_traffic", "every_k",
    "placement", "batch_and_time", "offload", "offload_time", "back_in_time", "ode_adjoints",
    "adjoint_cost", "depth", "residual_paths", "gradient_correlation", "dead_units", "remedies",
    "define_by_run", "compositions",
)  # fmt: skip


def measured(name: str, quick: bool) -> Finding:
    """Return the results of one module."""
    module = importlib.import_module(f"experiments.claims.{name}")
    return module.measure(quick)


def plot(name: str, finding: Finding) -> None:
    """Draw the results, readable at a width of 800 pixels."""
    figure = plt.figure(figsize=(8, 4), layout="constrained")
    finding.draw(figure)
    PLOTS.mkdir(exist_ok=True)
    figure.savefig(PLOTS / f"{name}.png", dpi=100)
    plt.close(figure)


def table() -> None:
    """Write the table of all measurements so far."""
    results = known(RESULTS)
    rows = [
        [c.claim, c.source, c.predicted, c.measured, f"**{c.verdict}**",
         f"[plot](plots/{name}.png), `--only {name}`"]
        for name in MODULES
        if name in results
        for c in (Claim(**one) for one in results[name]["claims"])
    ]  # fmt: skip
    head = ["claim", "source", "what theory predicts", "what is measured", "verdict", "by"]
    write_table(HERE, head, [[cell.replace("|", "\\|") for cell in row] for row in rows])


def main() -> None:
    """Measure the selected claims, one module after another."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="use smaller sizes, and store nothing")
    parser.add_argument("--only", default="", help=", ".join(MODULES))
    given = parser.parse_args()
    start = time.perf_counter()
    for name in [n for n in given.only.split(",") if n] or MODULES:
        before = time.perf_counter()
        finding = measured(name, given.quick)
        for claim in finding.claims:
            print(f"{claim.claim}: {claim.measured}: {claim.verdict}", flush=True)
        print(f"  {name}: {time.perf_counter() - before:.0f} s", flush=True)
        if not given.quick:
            plot(name, finding)
            claims = [dataclasses.asdict(claim) for claim in finding.claims]
            keep(RESULTS, name, {"claims": claims, "seconds": time.perf_counter() - before})
    if not given.quick:
        table()
    print(f"{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
