"""Does `health` find the layer at fault, without false alarms on models that train?

Each cell of the tables is stored as soon as it is measured, and a stored cell is not measured
again.

python -m experiments.health.run                   # missing cells; or of parts: "RNN-200" healthy
python -m experiments.health.run --again "MLP-50"  # all cells, stored or not
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax

from experiments.health import healthy
from experiments.health.networks import FAULTS, NETWORKS, SAID
from experiments.health.planted import found, plant, rows
from experiments.health.presets import PRESETS
from experiments.report import keep, known, write_table

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
RUNS = 60
HEALTHY, NONE = "healthy", "none"


def cells(part: str) -> list[str]:
    """Return the cells of a network, or of the models without a fault."""
    return list(PRESETS) if part == HEALTHY else [NONE, *NETWORKS[part].faults]


def measured(part: str, cell: str) -> Any:
    """Return how a preset trained; for a fault, the runs in which only that fault was found."""
    if part == HEALTHY:
        return trained(cell, cells(part).index(cell))
    if cell == NONE:
        return [_fine(part, seed) for seed in range(RUNS)]
    return [found(part, *plant(part, cell, seed)) for seed in range(RUNS)]


def _fine(name: str, seed: int) -> bool:
    network = NETWORKS[name]
    keys = jax.random.key(seed), jax.random.key(seed + 1)
    judged = rows(name, network.init(keys[0]), network.batch(keys[1]))
    return all(row.verdict == "fine" for row in judged)


def trained(name: str, seed: int) -> dict[str, Any]:
    """Return whether a preset trains, and whether its diagnosis finds no fault."""
    of = healthy.train(name, seed)
    faults = [row.title for row in (*of.before, *of.after) if row.verdict != "fine"]
    return {"first": of.first, "last": of.last, "trains": of.trains, "rows": len(of.before),
            "faults": faults}  # fmt: skip


def show(results: dict[str, Any]) -> None:
    """Write both tables."""
    names = [name for name in NETWORKS if name in results]
    head = ["fault", *names]
    said = SAID | {NONE: "none: fine everywhere"}
    share = lambda fault, of: f"{sum(of[fault])} / {len(of[fault])}" if fault in of else ""
    table = [
        [said[fault], *(share(fault, results[name]) for name in names)] for fault in (*FAULTS, NONE)
    ]
    write_table(HERE, head, table, "planted")
    if HEALTHY in results:
        head = ["model", "loss before", "after 150 steps", "rows", "trains", "at fault"]
        table = [
            [name, f"{r['first']:.3g}", f"{r['last']:.3g}", str(r["rows"]),
             "yes" if r["trains"] else "NO", ", ".join(r["faults"][:3]) or "none"]
            for name in PRESETS
            if (r := results[HEALTHY].get(name))
        ]  # fmt: skip
        write_table(HERE, head, table, HEALTHY)


def main() -> None:
    """Measure the named parts, or all, cell by cell; the tables show all measurements so far."""
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", default=[*NETWORKS, HEALTHY])
    parser.add_argument("--again", action="store_true", help="also measure stored cells again")
    given = parser.parse_args()
    for part in given.parts:
        for cell in cells(part):
            so_far = known(RESULTS).get(part, {})
            if given.again or cell not in so_far:
                found_ = measured(part, cell)
                keep(RESULTS, part, so_far | {cell: found_})
                print(part, cell, found_, flush=True)
    show(known(RESULTS))


if __name__ == "__main__":
    main()
