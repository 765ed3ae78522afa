"""Bytes, compile time and step time of 60 programs that other people wrote, on a CPU."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax

from experiments.report import keep, known
from experiments.unmodified.foreign import picture, tables
from experiments.unmodified.foreign.measure import elsewhere, measured, ratio
from experiments.unmodified.foreign.registry import PROGRAMS

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
LIMIT = 900


def separately(name: str, target: str, sources: Path) -> None:
    """Measure a program in a process of its own, as packages of two may have the same name."""
    command = [sys.executable, "-m", __package__, "--sources", str(sources), "--here", name,
               "--target", target]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired:
        put(name, target, {"failed": f"not done in {LIMIT} seconds"})
        return
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        put(name, target, {"failed": last.replace(str(sources), "FOLDER")[:200]})


def put(name: str, target: str, found: dict[str, Any]) -> None:
    """Keep the results of a program on a target, and its results on other targets."""
    keep(RESULTS, name, known(RESULTS).get(name, {}) | {target: found})


def here(name: str, target: str, sources: Path) -> None:
    """Measure a program in this process."""
    loss, args = PROGRAMS[name].make(sources)
    found = measured(loss, args) if target == "cpu" else elsewhere(loss, args, target)
    put(name, target, found)


def progress(found: tables.Found) -> str:
    """The results of a program, in a line."""
    if "failed" in found:
        return found["failed"]
    line = f"{found['temp']['jax.grad'] / 2**20:.1f} MiB, bytes {tables.share(found):.2f}"
    if "time" in found:
        line += f", compile {ratio(found['compile']):.2f}, step {found['time'][0]:.2f}"
    return line


def main() -> None:
    """Measure what is asked for and not known, then write the tables and the plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sources", type=Path, help="a folder of checkouts, as the README says; "
                        "without it the tables and the plot alone are written")  # fmt: skip
    parser.add_argument("--only", action="append", choices=list(PROGRAMS), metavar="NAME")
    parser.add_argument(
        "--target", default="cpu", help="another target than the CPU gives bytes alone"
    )
    parser.add_argument("--again", action="store_true", help="measure what is known, too")
    parser.add_argument("--here", choices=list(PROGRAMS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        return here(options.here, options.target, options.sources)
    names = options.only or list(PROGRAMS)
    for i, name in enumerate(names, 1):
        new = options.target not in known(RESULTS).get(name, {})
        if options.sources and (options.again or new):
            start = time.perf_counter()
            separately(name, options.target, options.sources)
            took = time.perf_counter() - start
            found = known(RESULTS)[name][options.target]
            print(f"[{i}/{len(names)}] {name}: {progress(found)} ({took:.0f} s)", flush=True)
    tables.write(HERE, known(RESULTS))
    picture.draw(HERE / "ratios.png", known(RESULTS))


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
