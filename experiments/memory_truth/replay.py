"""The replayed peak against the compiler's own bytes, and how much of it has a line.

A target is a callable from a function and its arguments to a dump and the compiler's statistics;
`cpu` compiles here. Others are added to `TARGETS` in the same form.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

import xform
from experiments.planner.zoo import ZOO
from experiments.report import write_table
from xform.memory.attribute import rows
from xform.memory.buffers import read

HERE = Path(__file__).parent
MIB = 2**20
POLICIES = ("min_cut", "save_everything", "save_dots", "save_nothing")
HEAD = ["model", "policy", "target", "compiler's temp MiB", "replayed / temp", "with a line",
        "activations", "recompute", "gradients", "temporary"]  # fmt: skip

Dump = tuple[bytes, Any]


def cpu(f: Callable[..., Any], args: tuple[Any, ...]) -> Dump:
    """The dump of a compilation on this machine, and what the compiler says of its memory."""
    lowered = jax.jit(f).lower(*args)
    with tempfile.TemporaryDirectory() as folder:
        flags = {"xla_dump_to": folder, "xla_dump_hlo_as_proto": True}
        stats = lowered.compile(compiler_options=flags).memory_analysis()
        (path,) = Path(folder).glob("*after_optimizations.hlo.pb")
        return path.read_bytes(), stats


TARGETS: dict[str, Callable[[Callable[..., Any], tuple[Any, ...]], Dump]] = {"cpu": cpu}


def measure(dump: bytes, stats: Any) -> tuple[float, float, list[str]]:
    """The error of the replayed peak, the part of it that has a line, and cells of the table."""
    assignment = read(dump)
    assert assignment.argument_bytes == stats.argument_size_in_bytes
    assert assignment.output_bytes == stats.output_size_in_bytes
    temp = int(stats.temp_size_in_bytes)
    fixed = assignment.total_bytes - assignment.temp_bytes
    replayed = max(assignment.live) - fixed
    peak = [row for row in rows(assignment) if row.at_peak]
    total = sum(row.bytes for row in peak)
    assert total == assignment.total_bytes
    lined = sum(row.bytes for row in peak if row.where) / total
    parts = [sum(row.bytes for row in peak if row.category == c) / MIB
             for c in ("activation", "recompute", "gradient", "temporary")]  # fmt: skip
    ratio = replayed / max(temp, 1)
    cells = [f"{temp / MIB:.1f}", f"{ratio:.4f}", f"{lined:.1%}", *(f"{p:.1f}" for p in parts)]
    return abs(ratio - 1), lined, cells


def main() -> None:
    """Compile every model under every policy for the targets (named ones), and write the table."""
    table: list[list[str]] = []
    errors: list[float] = []
    lines: list[float] = []
    for target in sys.argv[1:] or TARGETS:
        for name, make in ZOO.items():
            loss, args = make()
            for policy in POLICIES:
                f = xform.value_and_grad(loss, policy=getattr(xform.policies, policy))
                error, lined, cells = measure(*TARGETS[target](f, args))
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
