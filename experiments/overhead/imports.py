"""Measure what `import xform` adds to `import jax`, in a separate process."""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from experiments.report import write_table

HEAD = ["import", "CPU seconds (median)", "quartiles"]
JAX, BOTH = "import jax", "import jax, xform"


def seconds(code: str, cache: str) -> float:
    """Return the CPU seconds of a process that runs `code`, with compiled modules in `cache`."""
    env = {**os.environ, "PYTHONPYCACHEPREFIX": cache}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True, env=env)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def cells(times: list[float]) -> list[str]:
    """Return the median and the quartiles as cells."""
    low, middle, high = statistics.quantiles(times, n=4)
    return [f"{middle:.2f}", f"{low:.2f} to {high:.2f}"]


def main() -> None:
    """Time both imports in turns, and write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=21)
    pairs = parser.parse_args().pairs
    with tempfile.TemporaryDirectory(prefix="xform-") as cache:
        seconds(BOTH, cache)  # compiles them, as pip does
        times: dict[str, list[float]] = {JAX: [], BOTH: []}
        for i in range(pairs):
            for code in (JAX, BOTH)[:: -1 if i % 2 else 1]:
                times[code].append(seconds(code, cache))
    more = [both - alone for alone, both in zip(times[JAX], times[BOTH], strict=True)]
    rows = [["`jax`", *cells(times[JAX])], ["`xform`, over that", *cells(more)]]
    write_table(Path(__file__).parent, HEAD, rows, "imports")


if __name__ == "__main__":
    main()
