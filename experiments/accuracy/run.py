"""Measure how accurate derivatives are, and write the table of worst errors."""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp

from experiments.accuracy.functions import FUNCTIONS
from experiments.accuracy.measure import Row, rows
from experiments.accuracy.reasons import reason
from experiments.report import keep, known, write_table

HERE = Path(__file__).parent
# Each version of JAX has a file.
RESULTS = HERE / f"results-{'.'.join(jax.__version__.split('.')[:2])}.json"
DTYPES = ("float64", "float32", "bfloat16", "float16")
FULL, QUICK = 10_000, 1_000
FEW = ("zeta", "igamma", "igammac", "igamma_grad_a")  # mpmath takes up to 0.1 s for each value


def number(error: float, dtype: str) -> str:
    """Return an error as text; "all" if no digit is right."""
    if error >= 2.0 ** jnp.finfo(dtype).nmant:
        return "all"
    return f"{error:.1f}" if error < 100 else f"{error:.0e}".replace("e+0", "e")


def errors(ways: Sequence[float], dtype: str) -> str:
    """Return the errors outside and under `jit` as text; once if they are equal."""
    return ", ".join(dict.fromkeys(number(e, dtype) for e in ways))


def cell(row: Row | None) -> str:
    if row is None:
        return ""
    text = " / ".join(errors(ways, row.dtype) for ways in (row.xform, row.jax, row.own))
    return f"**{text}**" if row.missed else text


def read(results: dict[str, list[dict[str, object]]]) -> list[Row]:
    """Return the rows of a file of results."""
    fields = ("order", "own", "jax", "xform", "at")
    held = [row for name in sorted(results) for row in results[name]]
    made = [Row(**{k: tuple(v) if k in fields else v for k, v in row.items()}) for row in held]  # type: ignore[arg-type]
    place = {name: i for i, name in enumerate(FUNCTIONS)}
    return sorted(made, key=lambda r: (place.get(r.function, 0), r.order))


def tables(found: Sequence[Row]) -> None:
    """Write three tables: the totals, the rows that miss the bar, and all rows."""
    totals: list[list[str]] = []
    for dtype in (*DTYPES, "all"):
        some = [r for r in found if dtype in (r.dtype, "all")]
        misses = sum(r.missed for r in some)
        share = f"{misses} ({misses / max(len(some), 1):.0%})"
        better = sum(max(r.xform) < max(r.jax) - 1 for r in some)
        totals.append([dtype, str(len(some)), share, str(sum(r.worse for r in some)), str(better)])
    head = ["type", "rows", "miss the bar", "less accurate than JAX", "more accurate than JAX"]
    write_table(HERE, head, totals, "totals")
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in found:
        if row.missed:
            groups.setdefault((row.name, reason(row)), []).append(row)
    missed = [
        [name, ", ".join(r.dtype for r in group), "; ".join(cell(r).strip("*") for r in group), why]
        for (name, why), group in groups.items()
    ]
    write_table(HERE, ["derivative", "types", "xform / JAX / function", "why"], missed, "misses")
    by_name: dict[str, dict[str, Row]] = {}
    for row in found:
        by_name.setdefault(row.name, {})[row.dtype] = row
    every = [[name, *(cell(held.get(d)) for d in DTYPES)] for name, held in by_name.items()]
    write_table(HERE, ["derivative", *DTYPES], every, "errors")


def measured(name: str, count: int, references: Path) -> list[Row]:
    """Measure the rows of one function."""
    found = [row for dtype in DTYPES for row in rows(FUNCTIONS[name], dtype, count, references)]
    jax.clear_caches()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="functions to measure (default: all)")
    parser.add_argument("--quick", action="store_true", help="use 1,000 points, and store nothing")
    parser.add_argument("--references", type=Path, default=Path.home() / ".cache/xform/accuracy",
                        help="folder that caches true values")  # fmt: skip
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    options.references.mkdir(parents=True, exist_ok=True)
    names, count = options.names or [*FUNCTIONS], QUICK if options.quick else FULL
    every: list[Row] = []
    with ProcessPoolExecutor(options.processes, multiprocessing.get_context("spawn")) as pool:
        counts = {name: min(count, QUICK) if name in FEW else count for name in names}
        work = {n: pool.submit(measured, n, counts[n], options.references) for n in names}
        for i, (name, job) in enumerate(work.items()):
            found = job.result()
            every += found
            print(f"{i + 1} of {len(names)}: {name}", *(
                f"  {r.name} {r.dtype}: {errors(r.xform, r.dtype)} (JAX {errors(r.jax, r.dtype)}, "
                f"function {errors(r.own, r.dtype)}) at {r.at}"
                f"{' MISSED' * r.missed}{' WORSE' * r.worse}" for r in found
            ), sep="\n", flush=True)  # fmt: skip
            if not options.quick:
                keep(RESULTS, name, [dataclasses.asdict(r) for r in found])
    misses, worse = sum(r.missed for r in every), sum(r.worse for r in every)
    print(f"{len(every)} rows: {misses} miss the bar, {worse} are less accurate than JAX.")
    if not options.quick:
        tables(read(known(RESULTS)))


if __name__ == "__main__":
    main()
