"""Measure the extremes of healthy models and of planted faults, from which thresholds are read.

The seeds differ from the seeds that `run` uses.

    python -m experiments.health.calibrate
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from experiments.health import healthy
from experiments.health.networks import NETWORKS
from experiments.health.planted import plant
from experiments.health.presets import PRESETS
from experiments.report import keep, known, write_table
from xform.diagnosis import thresholds as at
from xform.diagnosis.row import LayerHealth

HERE = Path(__file__).parent
RESULTS = HERE / "calibration.json"
SEEDS = 5
FIRST = 1000

Rows = list[LayerHealth]


def dead(rows: Rows) -> Iterator[float]:
    """Return the shares of dead units."""
    return (r.dead for r in rows if r.dead is not None and r.input != 0)


def flat(rows: Rows) -> Iterator[float]:
    """Return the shares of flat elements."""
    return (r.saturated for r in rows if r.saturated is not None and r.input != 0)


def scale(rows: Rows, name: str = "kin", cousins: bool = False) -> Iterator[float]:
    """Return the factors between gains and the median of their siblings, all at least 1."""
    groups: dict[str, list[float]] = {}
    kin: dict[str, int] = {}
    for r in rows:
        if r.gain:
            groups.setdefault(getattr(r, name), []).append(r.gain)
            kin[r.kin] = kin.get(r.kin, 0) + 1
    for r in rows:
        if r.gain and len(group := groups[getattr(r, name)]) >= at.MIN_SIBLINGS:
            if cousins and kin[r.kin] >= at.MIN_SIBLINGS:
                continue
            off = r.gain / statistics.median(group)
            yield max(off, 1 / off)


def cousins(rows: Rows) -> Iterator[float]:
    """Return the same factors relative to layers of one operation, for rows with few siblings."""
    return scale(rows, "operation", True)


def drift(rows: Rows) -> Iterator[float]:
    """Return the factors between gradient norms and the last layer's norm, all at least 1."""
    norms = [r.gradient * math.sqrt(r.size) for r in rows if r.kind == "layer" and r.gradient > 0]
    return (max(n / norms[-1], norms[-1] / n) for n in norms)


def cosine(rows: Rows) -> Iterator[float]:
    """Return noise cosine over neighbour cosine, if the last layer's gradients are correlated."""
    layers = [r for r in rows if r.kind == "layer"]
    known = [r for r in layers if r.correlation is not None and r.gradient]
    if known and (known[-1].correlation or 0) >= at.MIN_LAST_COSINE:
        yield from (
            r.noise / max(r.correlation, 1e-9)
            for r in known
            if r.correlation and r.noise and r.noise <= at.MAX_RANDOM_COSINE
        )


MEASURES: dict[str, tuple[Callable[[Rows], Iterator[float]], str, str, float]] = {
    "DEAD_SHARE": (dead, "share of units dead", "dead", at.DEAD_SHARE),
    "SATURATED_SHARE": (flat, "share of elements flat", "flat", at.SATURATED_SHARE),
    "GAIN_FACTOR": (scale, "gain from the siblings' median, times", "up", at.GAIN_FACTOR),
    "GAIN_FACTOR_BY_OPERATION": (
        cousins,
        "gain from the operation's median, times",
        "",
        at.GAIN_FACTOR_BY_OPERATION,
    ),
    "VANISHED_RATIO, EXPLODED_RATIO": (
        drift,
        "gradient from the last layer's, times",
        "",
        at.EXPLODED_RATIO,
    ),
    "SHATTERED_FACTOR": (
        cosine,
        "cosine of noise to that of neighbours",
        "",
        1 / at.SHATTERED_FACTOR,
    ),
}


def most(rows: Rows) -> dict[str, float]:
    """Return the most extreme value of any row, for each measure."""
    return {name: max(of(rows), default=math.nan) for name, (of, *_) in MEASURES.items()}


def planted(name: str) -> dict[str, float]:
    """Return, for each measure, the least value that the layer with its fault reaches."""
    found: dict[str, list[float]] = {}
    for measure, (of, _, fault, _) in MEASURES.items():
        if fault not in NETWORKS[name].faults:
            continue
        for seed in range(FIRST, FIRST + SEEDS):
            rows, _ = plant(name, fault, seed)
            found.setdefault(measure, []).append(max(of(rows), default=math.nan))
    return {measure: min(values) for measure, values in found.items()}


def show(results: dict[str, Any]) -> None:
    """Write the table."""
    table: list[list[str]] = []
    for name, (_, what, fault, value) in MEASURES.items():
        reached = [
            r[name] for key in PRESETS if (r := results.get(key)) and not math.isnan(r[name])
        ]
        faults = [
            r[name] for key in NETWORKS if (r := results.get(f"faults of {key}")) and name in r
        ]
        faults = [x for x in faults if not math.isnan(x)]
        cell = lambda values, of: f"{of(values):.3g}" if values else ""
        table.append(
            [name, what, f"{value:g}", cell(reached, max), cell(faults, min) if fault else ""]
        )
    head = ["threshold", "measure", "value", "most in healthy models", "least at a fault"]
    write_table(HERE, head, table, "thresholds")


def main() -> None:
    """Measure the named parts, or all, and write the table of all measurements so far."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=[*PRESETS, *NETWORKS])
    for name in parser.parse_args().names:
        if name in PRESETS:
            of = healthy.train(name, FIRST)
            both = [most(of.before), most(of.after)]
            keep(RESULTS, name, {k: max(b[k] for b in both) for k in MEASURES})
        if name in NETWORKS:
            keep(RESULTS, f"faults of {name}", planted(name))
        print(name, known(RESULTS), flush=True)
    show(known(RESULTS))


if __name__ == "__main__":
    main()
