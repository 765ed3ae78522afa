"""Kill training runs, resume them, and compare their logs with undisturbed runs."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.report import keep, known, write_table
from experiments.resume.killed import (
    Life,
    arrays,
    begun,
    finished,
    killed,
    killed_after,
    logged,
    losses,
    records,
    saved,
)
from experiments.resume.picture import draw

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
SIZES = ["--width", "32", "--depth", "2", "--heads", "4", "--context", "32", "--batch", "8"]
TEXT = ["--data", str(Path(asyncio.__file__).parent)]
OFTEN = ["--save-every", "5", "--validate-every", "25", "--validation-examples", "16"]
# Steps of a killed run on one device, and of runs on meshes.
STEPS, FEW = 800, 30
# Devices, in the order in which a run has them.
MOVES = [(8, "fsdp=8"), (4, "fsdp=4"), (1, "")]


def flags(folder: Path, steps: int, mesh: str = "") -> list[str]:
    """Return the flags of a run. All runs share their compiled programs."""
    cache = ["--compilation-cache", str(folder / "cache")]
    return [*SIZES, *TEXT, *OFTEN, *cache, "--steps", str(steps), "--mesh", mesh]


def kills(folder: Path, count: int) -> dict[str, Any]:
    """Compare an undisturbed run with the same run killed `count` times."""
    given, (alone, often, timed) = flags(folder, STEPS), (folder / x for x in "abc")
    finished(alone, given)
    for _ in range(2):  # the first run compiles
        usual = finished(timed, [*given, "--max-seconds", "0"])
    lives = killed(often, given, count, usual)
    finished(often, given)
    return compared(alone, often, lives)


def compared(alone: Path, often: Path, lives: Sequence[Life]) -> dict[str, Any]:
    """Return how two runs differ in their logs and in their last checkpoints."""
    expected, found = records(alone), records(often)
    sums, others = arrays(alone), arrays(often)
    return {
        "lives": [dataclasses.asdict(life) for life in lives],
        "steps": STEPS,
        "records": len(expected),
        "differing": abs(len(expected) - len(found))
        + sum(a != b for a, b in zip(expected, found, strict=False)),
        "arrays": len(sums),
        "differing_arrays": sum(sums[name] != others[name] for name in sums),
    }


def meshes(folder: Path) -> dict[str, Any]:
    """Kill a run on 8 devices, continue it on 4, and then on one, to its end."""
    one, eight, moved = folder / "one", folder / "eight", folder / "moved"
    alone = [begun(one, flags(folder, FEW)), begun(eight, flags(folder, FEW, MOVES[0][1]), 8)]
    first = []
    for i, (devices, mesh) in enumerate(MOVES):
        first.append(saved(moved))
        given = flags(folder, FEW, mesh)
        if i + 1 < len(MOVES):
            killed_after(moved, given, (i + 1) * FEW // len(MOVES), devices)
            print(devices, "devices: killed at step", logged(moved), flush=True)
        else:
            finished(moved, given, devices)
    if any([process.wait() for process in alone]):
        raise RuntimeError("a run that was left alone failed")
    return {"one": losses(one), "eight": losses(eight), "moved": losses(moved),
            "from": first, "devices": [devices for devices, _ in MOVES]}  # fmt: skip


def table_of_kills(found: dict[str, Any]) -> None:
    """Write when a run was killed, and what differs."""
    lives = found["lives"]
    count = lambda moment: str(sum(life["moment"] == moment for life in lives))
    ends = [*[life["resumed"] for life in lives[1:]], lives[-1]["reached"]]
    again = sum(max(0, life["reached"] - end) for life, end in zip(lives, ends, strict=True))
    head = ["steps", "kills", "before the first step", "between checkpoints",
            "while a checkpoint was written", "steps run again", "records that differ",
            "arrays of the last checkpoint that differ"]  # fmt: skip
    row = [str(found["steps"]), str(len(lives)), count("starting"), count("training"),
           count("saving"), str(again), f"{found['differing']} of {found['records']}",
           f"{found['differing_arrays']} of {found['arrays']}"]  # fmt: skip
    write_table(HERE, head, [row], "kills", "one CPU device, float32")


def table_of_meshes(moved: dict[str, Any]) -> None:
    """Write how far losses on other devices are from the losses of undisturbed runs."""
    head = ["steps", "devices", "losses equal to those of 8 left alone, bit for bit",
            "furthest from one device left alone"]  # fmt: skip
    stops = [*moved["from"][1:], len(moved["moved"])]
    rows = []
    for start, stop, devices in zip(moved["from"], stops, moved["devices"], strict=True):
        some, eight, one = (moved[name][start:stop] for name in ("moved", "eight", "one"))
        equal = sum(a == b for a, b in zip(some, eight, strict=True))
        apart = np.abs(np.subtract(some, one)).max()
        rows.append([f"{start + 1} to {stop}", str(devices), f"{equal} of {len(some)}",
                     f"{apart:.1e}"])  # fmt: skip
    write_table(HERE, head, rows, "meshes", "8 devices of one CPU, float32")


def main() -> None:
    """Measure, and write results, tables and plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=["kills", "meshes"])
    parser.add_argument("--kills", type=int, default=50)
    given = parser.parse_args()
    for part in given.parts:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            found = kills(folder, given.kills) if part == "kills" else meshes(folder)
        keep(RESULTS, part, found)
    show(known(RESULTS))


def show(results: dict[str, Any]) -> None:
    """Write the tables and the plot of all measurements so far."""
    if "kills" in results:
        table_of_kills(results["kills"])
    if "meshes" in results:
        table_of_meshes(results["meshes"])
    if {"kills", "meshes"} <= results.keys():
        draw(results, HERE / "plot.png")


if __name__ == "__main__":
    main()
