"""Compare the replayed peak with the compiler's bytes, and count the bytes with a line."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import xform
from experiments.planner.zoo import ZOO
from experiments.report import write_table
from xform.memory.report import MemoryReport

HERE = Path(__file__).parent
MIB = 2**20
POLICIES = ("min_cut", "save_everything", "save_dots", "save_nothing")
CATEGORIES = ("activation", "recompute", "gradient", "temporary")
HEAD = ["model", "policy", "target", "compiler's temp MiB", "replayed / temp", "with a line",
        "activations", "recompute", "gradients", "temporary"]  # fmt: skip


def measure(report: MemoryReport) -> tuple[float, float, list[str]]:
    """Return the error of the replayed peak, its share with a line, and cells of the table."""
    made, said = report.assignment, report.bytes
    assert made is not None
    assert (made.argument_bytes, made.output_bytes) == (said["argument"], said["output"])
    total = sum(row.bytes for row in report)
    assert total == made.total_bytes
    ratio = (made.temp_bytes - made.fragmentation_bytes) / max(said["temp"], 1)
    lined = sum(row.bytes for row in report if row.where) / total
    parts = {g.name: g.bytes / MIB for g in report.group_by("category")}
    cells = [f"{said['temp'] / MIB:.1f}", f"{ratio:.4f}", f"{lined:.1%}",
             *(f"{parts.get(c, 0):.1f}" for c in CATEGORIES)]  # fmt: skip
    return abs(ratio - 1), lined, cells


def main() -> None:
    """Compile every model under every policy for the targets (default: cpu); write the table."""
    table: list[list[str]] = []
    errors: list[float] = []
    lines: list[float] = []
    for target in sys.argv[1:] or ["cpu"]:
        for name, make in ZOO.items():
            loss, args = make()
            for policy in POLICIES:
                f = xform.value_and_grad(loss, policy=getattr(xform.policies, policy))
                error, lined, cells = measure(xform.memory_analysis(f, *args, target=target))
                errors.append(error)
                lines.append(lined)
                table.append([name, policy, target, *cells])
                print(table[-1], flush=True)
    table.append(
        [f"median error {statistics.median(errors):.2%}, worst {max(errors):.2%}; "
         f"at least {min(lines):.1%} with a line", *[""] * (len(HEAD) - 1)]
    )  # fmt: skip
    write_table(HERE, HEAD, table, "replay")


if __name__ == "__main__":
    main()
