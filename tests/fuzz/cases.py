"""Stored small cases of failures: each a program, its inputs, and its levels of transforms."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.fuzz.check import Outcome, check_source
from tests.fuzz.generate import Sample, inputs
from tests.fuzz.modes import Level

FILE = Path(__file__).parent / "cases.json"


@dataclasses.dataclass(frozen=True)
class Case:
    """A failure; `open` says what is wrong as long as it fails."""

    name: str
    seed: int
    source: str
    types: list[tuple[str, tuple[int, ...]]]
    levels: tuple[Level, ...]
    ways: tuple[str, ...]
    open: str = ""

    @property
    def inputs(self) -> list[np.ndarray]:
        """The inputs."""
        return inputs(self.seed, self.types)

    def check(self) -> Outcome:
        """Run it again."""
        return check_source(self.source, self.inputs, self.levels, self.ways)


def case(sample: Sample, outcome: Outcome) -> Case:
    """Return a failing sample in its stored form."""
    first = outcome.text.splitlines()[0] if outcome.text else ""
    text = f"{outcome.verdict}: {first}"[:160]
    ways = ("staged",) if outcome.where == "staged" else ("staged", outcome.where)
    name = f"{outcome.verdict}-{sample.seed}"
    return Case(name, sample.seed, sample.source, sample.types, sample.levels, ways, text)


def load() -> list[Case]:
    """Return all stored cases."""
    return [_read(row) for row in json.loads(FILE.read_text())] if FILE.exists() else []


def _read(row: dict[str, Any]) -> Case:
    types = [(kind, tuple(shape)) for kind, shape in row["types"]]
    levels = tuple(Level(**{**level, "active": tuple(level["active"])}) for level in row["levels"])
    source = "\n".join(row["source"])
    return Case(row["name"], row["seed"], source, types, levels, tuple(row["ways"]), row["open"])


def save(cases: list[Case]) -> None:
    """Write the file, with one line for each line of source."""
    plain = Level("")
    rows = []
    for c in cases:
        row = dataclasses.asdict(c)
        row["source"] = c.source.split("\n")
        row["levels"] = [
            {k: v for k, v in dataclasses.asdict(level).items()
             if k in ("kind", "active") or v != getattr(plain, k)}
            for level in c.levels
        ]  # fmt: skip
        rows.append(row)
    FILE.write_text(json.dumps(rows, indent=1) + "\n")
