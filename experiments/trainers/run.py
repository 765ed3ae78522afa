"""Compare xform's plans with the remat policies of other people's trainers, at the same bytes.

Each cell is measured in a process of its own, and each figure is kept. A second call measures the
missing ones.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from experiments.report import keep, known, replace, table
from experiments.trainers.cells import CELLS, HALF, MORE, Cell

HERE = Path(__file__).parent
RESULTS = HERE / "remat.json"
MIB, GFLOP = 2**20, 10**9
HEAD = [
    "step", "target", "full: temporary MiB, GFLOP recomputed", "minimal", "xform at full's bytes",
    "of full's work", "xform at minimal's bytes", "xform alone: of minimal's temporary bytes",
    "more FLOPs than with everything saved", "slices", "bars", "in the way",
]  # fmt: skip
# The environment of a process: no device is looked for, and several devices are only compiled for.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}  # fmt: skip


def measure(cell: Cell, minutes: float) -> None:
    """Measure a cell in a process, and keep each figure as soon as it is known."""
    flags = f"--xla_force_host_platform_device_count={cell.devices}"
    environment = {**os.environ, **ENVIRONMENT, "XLA_FLAGS": flags}
    command = [sys.executable, "-W", "ignore", "-m", "experiments.trainers.measure", cell.name]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        clock = threading.Timer(60 * minutes, process.kill)
        clock.start()
        json.dump(known(RESULTS).get(cell.name, {}), process.stdin)
        process.stdin.close()
        for line in process.stdout:
            if line.startswith("{"):  # a trainer may print other lines
                keep(RESULTS, cell.name, found := json.loads(line))
                print(f"{cell.name}: {[*found][-1]}: {[*found.values()][-1]}", flush=True)
        clock.cancel()
    if process.returncode:
        print(f"{cell.name}: failed, see above, or not measured in {minutes:g} minutes", flush=True)


def measured() -> dict[str, dict[str, Any]]:
    """Return the cells that have all their figures."""
    return {name: found for name, found in known(RESULTS).items() if "alone" in found}


def cells(cell: Cell, found: dict[str, Any]) -> list[str]:
    """Return the row of a cell."""
    base, full, minimal = found["everything"], found["full"], found["minimal"]
    work = lambda figures: (figures["flops"] - base) / GFLOP
    figures = lambda f: f"{f['temp'] / MIB:.1f}, {work(f):.1f}"
    at_full, at_minimal, alone = (found[k] for k in ("at full", "at minimal", "alone"))
    outside = full["total"] - full["temp"]
    refused = lambda f: f"refused, floor {(f['floor'] - outside) / MIB:.1f}"
    mine = lambda f: refused(f) if "floor" in f else (
        f"{f['temp'] / MIB:.1f}, {f['recomputed'] / GFLOP:.1f}")  # fmt: skip
    met = [
        "floor" not in at_full and at_full["recomputed"] <= HALF * work(full) * GFLOP,
        "floor" not in at_minimal and at_minimal["recomputed"] == 0,
        "floor" not in alone and alone["flops"] <= (1 + MORE) * base,
    ]
    misses = [f for f, kept in zip((at_full, at_minimal, alone), met, strict=True) if not kept]
    largest = misses[0].get("largest", ()) if misses else ()
    buffers = "; ".join(f"{size / MIB:.1f} MiB {name} at {where}" for size, name, where in largest)
    blame = misses[0].get("problem", buffers) if misses else ""
    sliced = {text.partition(" (")[0] for text in at_full.get("slices", ())}
    return [
        f"{cell.trainer}, {cell.model}, {cell.size}", cell.target, figures(full), figures(minimal),
        mine(at_full),
        "" if "floor" in at_full else f"{at_full['recomputed'] / GFLOP / work(full):.2f}",
        mine(at_minimal),
        refused(alone) if "floor" in alone else f"{alone['temp'] / minimal['temp']:.2f}",
        "" if "floor" in alone else f"{alone['flops'] / base - 1:.1%}",
        "; ".join(sorted(sliced)) or "none",
        f"{sum(met)} of 3", blame,
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", help="measure cells whose name has this text")
    parser.add_argument("--target", action="append", help="measure cells on this target")
    parser.add_argument("--minutes", type=float, default=30, help="the most for one cell")
    parser.add_argument("--no-measure", action="store_true", help="only print what is known")
    args = parser.parse_args()
    if not args.no_measure and importlib.util.find_spec("maxtext") is None:
        sys.exit(f"this Python has no maxtext: make the environment that {HERE}/README.md lists "
                 "under maxtext, and run the command with its Python")  # fmt: skip
    for name, cell in CELLS.items():
        asked = all(any(text in name for text in texts) for texts in (args.only, args.target)
                    if texts)  # fmt: skip
        if args.no_measure or not asked or name in measured():
            continue
        print(f"{name} ...", flush=True)
        measure(cell, args.minutes)
        if name in measured():
            print(" | ".join(cells(cell, measured()[name])), flush=True)
    results = measured()
    rows = [cells(cell, results[name]) for name, cell in CELLS.items() if name in results]
    versions = sorted({found["jax"] for found in results.values()})
    missing = [name for name in CELLS if name not in results]
    replace(HERE, "remat", [
        *table(HEAD, rows), "", f"Measured with JAX {', '.join(versions)}.",
        *(["", f"Not measured: {'; '.join(missing)}."] if missing else []),
    ])  # fmt: skip


if __name__ == "__main__":
    main()
