"""The README's tables: the list of programs, what was measured of each, and the bars."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
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
# By program, by target.
Results = Mapping[str, Mapping[str, Found]]


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


# Most of these programs compute in the fast memory on a TPU's chip, which is not counted.
TPU_BARS = [Bar("temporary bytes", share, 1.02, 50)]


def bars_of(target: str) -> list[Bar]:
    """Return the bars for a target. Times are measured on the CPU alone."""
    if target.startswith("tpu"):
        return TPU_BARS
    return BARS if target == "cpu" else [bar for bar in BARS if bar.of is share]


def counted(results: Results, target: str = "cpu") -> dict[str, Found]:
    """The programs that are large enough on a target, in the order of the registry."""
    known = {name: results[name][target] for name in PROGRAMS if target in results.get(name, {})}
    return {name: found for name, found in known.items()
            if "temp" in found and found["temp"]["jax.grad"] >= LEAST}  # fmt: skip


def write(folder: Path, results: Results) -> None:
    """Put all tables into the README."""
    repositories = [[name, commit, str(sum(p.repository == name for p in PROGRAMS.values()))]
                    for name, commit in COMMITS.items()]  # fmt: skip
    replace(folder, "repositories", table(["repository", "commit", "programs"], repositories))
    listed = [[name, p.repository, p.files] for name, p in PROGRAMS.items()]
    replace(folder, "programs", table(["program", "repository", "files"], listed))
    targets = list(dict.fromkeys(target for parts in results.values() for target in parts))
    bars = [[target, *bar.row(list(found.values()))] for target in targets
            if (found := counted(results, target)) for bar in bars_of(target)]  # fmt: skip
    head = ["target", "of jax.grad's", "at most", "in", "measured", "met"]
    write_table(folder, head, bars, "bars", ", ".join(targets))
    others = [target for target in targets if target != "cpu"]
    head = [*HEAD, *(f"bytes, {target}" for target in others)]
    rows = [row(name, results[name], others) for name in PROGRAMS if name in results]
    write_table(folder, head, rows, "measured", ", ".join(targets))


def row(name: str, parts: Mapping[str, Found], others: Sequence[str]) -> list[str]:
    """The row of one program: its results on the CPU, and its bytes on other targets."""
    elsewhere = [f"{share(parts[target]):.2f}" if "temp" in parts.get(target, {}) else ""
                 for target in others]  # fmt: skip
    found = parts.get("cpu", {"failed": ""})
    if "failed" in found:
        return [name, found["failed"], *[""] * (len(HEAD) - 2), *elsewhere]
    middle, low, high = found["time"]
    size = found["temp"]["jax.grad"] / MIB
    return [name, f"{size:.1f}" if size >= 1 else f"{size:.2f}", f"{share(found):.2f}",
            f"{compiling(found):.2f}", f"{whole(found):.2f}", f"{middle:.2f}",
            f"{low:.2f} to {high:.2f}", f"{found['loss difference']:.0e}",
            f"{found['gradient difference']:.0e}", *elsewhere]  # fmt: skip
