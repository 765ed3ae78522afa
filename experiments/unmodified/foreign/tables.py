"""The README's tables: the list of programs, what was measured of each, and the bars."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.report import replace, table, write_table
from experiments.unmodified.foreign.measure import ratio, whole
from experiments.unmodified.foreign.registry import COMMITS, PROGRAMS

MIB = 2**20
# A program counts from this many temporary bytes on.
LEAST = 2**18
HEAD = ["program", "jax.grad, MiB", "bytes", "compile", "with tracing", "step", "quartiles",
        "loss differs by", "gradient differs by"]  # fmt: skip
Found = Mapping[str, Any]


def share(found: Found) -> float:
    """The default's temporary bytes, as a part of jax.grad's."""
    return found["temp"]["default"] / found["temp"]["jax.grad"]


@dataclass(frozen=True)
class Bar:
    """What is asked of a ratio: that enough programs, or the median one, are within it."""

    what: str
    of: Callable[[Found], float]
    most: float
    programs: int | None = None

    def row(self, found: list[Found]) -> list[str]:
        values = [self.of(one) for one in found]
        middle = statistics.median(values)
        within = sum(value <= self.most for value in values)
        if self.programs is None:
            asked, got, met = "the median", f"{middle:.2f}", middle <= self.most
        else:
            asked, got, met = f"{self.programs} of 60", f"{within} of {len(values)}", (
                within >= self.programs)  # fmt: skip
        return [self.what, f"{self.most:.2f}", asked, got, "yes" if met else "no"]


compiling: Callable[[Found], float] = lambda found: ratio(found["compile"])
stepping: Callable[[Found], float] = lambda found: found["time"][0]
BARS = [
    Bar("temporary bytes", share, 1.02, 56),
    Bar("temporary bytes", share, 1.10, 60),
    Bar("temporary bytes", share, 0.72),
    Bar("compile time", compiling, 1.5, 56),
    Bar("compile time", compiling, 1.3),
    Bar("compile time with tracing", whole, 1.3),
    Bar("step time", stepping, 1.0),
]


def counted(results: Mapping[str, Found]) -> dict[str, Found]:
    """The programs that were measured and are large enough, in the order of the registry."""
    known = {name: results[name] for name in PROGRAMS if name in results}
    return {name: found for name, found in known.items()
            if "temp" in found and found["temp"]["jax.grad"] >= LEAST}  # fmt: skip


def write(folder: Path, results: Mapping[str, Found]) -> None:
    """Put all tables into the README."""
    repositories = [[name, commit, str(sum(p.repository == name for p in PROGRAMS.values()))]
                    for name, commit in COMMITS.items()]  # fmt: skip
    replace(folder, "repositories", table(["repository", "commit", "programs"], repositories))
    listed = [[name, p.repository, p.files] for name, p in PROGRAMS.items()]
    replace(folder, "programs", table(["program", "repository", "files"], listed))
    found = counted(results)
    if found:
        bars = [bar.row(list(found.values())) for bar in BARS]
        write_table(folder, ["of jax.grad's", "at most", "in", "measured", "met"], bars, "bars",
                    "cpu")  # fmt: skip
    rows = [row(name, results[name]) for name in PROGRAMS if name in results]
    write_table(folder, HEAD, rows, "measured", "cpu")


def row(name: str, found: Found) -> list[str]:
    """What was measured of one program."""
    if "failed" in found:
        return [name, found["failed"], *[""] * (len(HEAD) - 2)]
    middle, low, high = found["time"]
    size = found["temp"]["jax.grad"] / MIB
    return [name, f"{size:.1f}" if size >= 1 else f"{size:.2f}", f"{share(found):.2f}",
            f"{compiling(found):.2f}", f"{whole(found):.2f}", f"{middle:.2f}",
            f"{low:.2f} to {high:.2f}", f"{found['loss difference']:.0e}",
            f"{found['gradient difference']:.0e}"]  # fmt: skip
