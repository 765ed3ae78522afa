"""Is the layer that is at fault found, and are models that train left in peace?

python -m experiments.health.run            # all; or parts: "MLP-50" "RNN-200" healthy
python -m experiments.health.run --runs 10  # fewer seeds
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
HEALTHY = "healthy"


def planted(name: str, runs: int) -> dict[str, Any]:
    """For each fault in which runs it was found at its layer and nowhere else."""
    network, results = NETWORKS[name], dict[str, Any]()
    sound = [seed for seed in range(runs) if _fine(name, seed)]
    results["none"] = [seed in sound for seed in range(runs)]
    for fault in network.faults:
        results[fault] = []
        for seed in range(runs):
            judged, at = plant(name, fault, seed)
            results[fault].append(found(name, judged, at))
        print(name, fault, f"{sum(results[fault])} of {runs}", flush=True)
    return results


def _fine(name: str, seed: int) -> bool:
    network = NETWORKS[name]
    keys = jax.random.key(seed), jax.random.key(seed + 1)
    judged = rows(name, network.init(keys[0]), network.batch(keys[1]))
    return all(row.verdict == "fine" for row in judged)


def trained(name: str, seed: int) -> dict[str, Any]:
    """Whether a preset trains, and whether a diagnosis has nothing to say of it."""
    of = healthy.train(name, seed)
    faults = [row.title for row in (*of.before, *of.after) if row.verdict != "fine"]
    print(name, of.first, of.last, faults, flush=True)
    return {"first": of.first, "last": of.last, "trains": of.trains, "rows": len(of.before),
            "faults": faults}  # fmt: skip


def show(results: dict[str, Any]) -> None:
    """Both tables."""
    names = [name for name in NETWORKS if name in results]
    head = ["fault", *names]
    cells = lambda fault, of: f"{sum(of[fault])} / {len(of[fault])}" if fault in of else ""
    table = [[SAID[fault], *(cells(fault, results[name]) for name in names)] for fault in FAULTS]
    table.append(["none: fine everywhere", *(cells("none", results[name]) for name in names)])
    write_table(HERE, head, table, "planted")
    if HEALTHY in results:
        head = ["model", "loss before", "after 150 steps", "rows", "trains", "at fault"]
        table = [
            [name, f"{r['first']:.3g}", f"{r['last']:.3g}", str(r["rows"]),
             "yes" if r["trains"] else "NO", ", ".join(r["faults"][:3]) or "none"]
            for name, r in results[HEALTHY].items()
        ]  # fmt: skip
        write_table(HERE, head, table, HEALTHY)


def main() -> None:
    """Measure the parts that are named, or all; tables show all so far."""
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", default=[*NETWORKS, HEALTHY])
    parser.add_argument("--runs", type=int, default=RUNS)
    given = parser.parse_args()
    for part in given.parts:
        if part != HEALTHY:
            keep(RESULTS, part, planted(part, given.runs))
            continue
        for i, name in enumerate(PRESETS):
            so_far = known(RESULTS).get(HEALTHY, {})
            keep(RESULTS, HEALTHY, so_far | {name: trained(name, i)})
    show(known(RESULTS))


if __name__ == "__main__":
    main()
