"""The simulated peak against the compiler's bytes: models of many kinds, and policies."""

from __future__ import annotations

import statistics
from pathlib import Path

import matplotlib.pyplot as plt

import xform
from experiments.planner.zoo import ZOO
from experiments.report import write_table

HERE = Path(__file__).parent
MIB = 2**20
POLICIES = ("min_cut", "save_everything", "save_dots", "save_nothing")
HEAD = ["model", *(f"{p}: compiled MiB, error" for p in POLICIES)]


def main() -> None:
    """Compile each, and write the table and the plot."""
    rows: list[list[str]] = []
    pairs: list[tuple[float, float]] = []
    for name, make in ZOO.items():
        loss, args = make()
        cells: list[str] = []
        for policy in POLICIES:
            made = xform.plan(loss, *args, policy=getattr(xform.policies, policy))
            assert made.compiled_bytes is not None
            pairs.append((made.compiled_bytes / MIB, made.predicted_bytes / MIB))
            error = made.predicted_bytes / made.compiled_bytes - 1
            cells.append(f"{made.compiled_bytes / MIB:.1f}, {error:+.1%}")
        rows.append([name, *cells])
        print(rows[-1], flush=True)
    errors = [abs(b / a - 1) for a, b in pairs]
    middle, worst = statistics.median(errors), max(errors)
    rows.append([f"median {middle:.1%}, worst {worst:.1%}", *[""] * len(POLICIES)])
    write_table(HERE, HEAD, rows, "prediction")
    figure, axes = plt.subplots(figsize=(5.4, 5.0), layout="constrained")
    axes.loglog(*zip(*pairs, strict=True), "o", color="#2b6cb0")
    ends = [min(map(min, pairs)), max(map(max, pairs))]
    axes.plot(ends, ends, color="#a0aec0", linewidth=1)
    axes.set_xlabel("compiled, MiB")
    axes.set_ylabel("predicted, MiB")
    axes.set_title(f"peaks: median error {middle:.1%}, worst {worst:.1%}", loc="left")
    figure.savefig(HERE / "prediction.png", dpi=130)


if __name__ == "__main__":
    main()
