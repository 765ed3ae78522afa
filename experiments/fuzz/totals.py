"""Totals of the fuzz since the last change of a rule: a file for each JAX version, and a table."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import jax

from experiments.fuzz.worker import Result
from experiments.report import write_table
from tests.fuzz.cases import Case, load, save
from xform.registry.table import rules_by_name

HERE = Path(__file__).parent
_XFORM = HERE.parent.parent / "xform"
_KEPT = 200


def totals_file(condition: str) -> Path:
    """Return the file with the totals of this JAX version under a condition.

    "" means no condition.
    """
    version = ".".join(jax.__version__.split(".")[:2])
    return HERE / f"totals-{'-'.join(filter(None, (condition, version)))}.json"


def fingerprint() -> str:
    """Return a hash of all files that determine a derivative."""
    folders = "program", "registry", "rules", "interpret", "steering"
    files = [path for folder in folders for path in (_XFORM / folder).glob("*.py")]
    total = hashlib.sha256()
    for path in sorted(files):
        total.update(f"{path.relative_to(_XFORM)}\0".encode() + path.read_bytes())
    return total.hexdigest()[:16]


@dataclasses.dataclass
class Totals:
    """Totals. `programs` counts compared programs; `next` is the first seed that was not tried."""

    rules: str
    condition: str = ""
    jax: str = jax.__version__
    first: int = 0
    next: int = 0
    agrees: int = 0
    ill_conditioned: int = 0
    mismatch: int = 0
    crash: int = 0
    refused: int = 0
    invalid: int = 0
    equations: int = 0
    worst: float = 0.0
    seconds: float = 0.0
    orders: Counter[str] = dataclasses.field(default_factory=Counter)
    depths: Counter[str] = dataclasses.field(default_factory=Counter)
    ways: Counter[str] = dataclasses.field(default_factory=Counter)
    names: Counter[str] = dataclasses.field(default_factory=Counter)
    refusals: Counter[str] = dataclasses.field(default_factory=Counter)
    failures: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    @property
    def programs(self) -> int:
        """The number of compared programs."""
        return self.agrees + self.ill_conditioned + self.mismatch + self.crash

    @classmethod
    def load(cls, rules: str, condition: str = "") -> Totals:
        """Load the totals so far; after a change of a rule, start new ones at the next seed."""
        path = totals_file(condition)
        if not path.exists():
            return cls(rules, condition)
        data = json.loads(path.read_text())
        if data["rules"] != rules:
            return cls(rules, condition, first=data["next"], next=data["next"])
        return cls.read(path)

    @classmethod
    def read(cls, path: Path) -> Totals:
        """Read the totals in a file."""
        data = json.loads(path.read_text())
        for name in ("orders", "depths", "ways", "names", "refusals"):
            data[name] = Counter(data[name])
        return cls(**data)

    def save(self) -> None:
        """Write the file atomically."""
        path = totals_file(self.condition)
        beside = path.with_suffix(".tmp")
        beside.write_text(json.dumps(vars(self), indent=1, sort_keys=True) + "\n")
        os.replace(beside, path)

    def add(self, result: Result) -> None:
        """Count one program."""
        self.next = max(self.next, result.seed + 1)
        outcome = result.outcome
        verdict = outcome.verdict.replace("-", "_")
        setattr(self, verdict, getattr(self, verdict) + 1)
        first = outcome.text.splitlines()[0][:160] if outcome.text else ""
        if verdict == "refused":
            self.refusals[first] += 1
            return
        if result.case is not None:
            keep(result.case)
        if verdict != "agrees" and len(self.failures) < _KEPT:
            self.failures.append({"seed": result.seed, "verdict": outcome.verdict,
                                  "where": outcome.where, "text": first})  # fmt: skip
        if outcome.failed:
            return
        if verdict == "agrees":
            self.worst = max(self.worst, outcome.error)
        self.equations += len(outcome.names)
        self.orders[str(result.order)] += 1
        self.depths[str(result.depth)] += 1
        self.ways.update(result.ways)
        self.names.update(outcome.names)

    def forget(self, seed: int) -> None:
        """Remove a failure, before its program is counted again."""
        (found,) = [f for f in self.failures if f["seed"] == seed]
        self.failures.remove(found)
        verdict = found["verdict"].replace("-", "_")
        setattr(self, verdict, getattr(self, verdict) - 1)

    def rows(self) -> list[tuple[str, str]]:
        """Return the rows of the README's table."""
        ruled = sum(name in rules_by_name() for name in self.names)
        by = lambda counter: ", ".join(f"{k}: {counter[k]:,}" for k in sorted(counter))
        return [
            ("programs compared", f"{self.programs:,}"),
            ("mismatches", f"{self.mismatch:,}"),
            ("crashes", f"{self.crash:,}"),
            ("equations", f"{self.equations:,}"),
            ("compositions by order", by(self.orders)),
            ("programs by depth of nesting", by(self.depths)),
            ("ways of running", by(self.ways)),
            ("primitives with a rule, in programs", f"{ruled} of {len(rules_by_name())}"),
            ("largest error that agrees", f"{self.worst:.1e}"),
            ("ill-conditioned, apart within their own noise", f"{self.ill_conditioned:,}"),
            ("refused by JAX, not compared", f"{self.refused:,}"),
            ("seeds", f"{self.first:,} to {self.next - 1:,}"),
            ("minutes", f"{self.seconds / 60:.0f}"),
            ("hash of the rules", self.rules),
        ]


def report() -> None:
    """Write the totals of each JAX version into the README."""
    counted = [Totals.read(path) for path in sorted(HERE.glob("totals-*.json"))]
    columns = [dict(totals.rows()) for totals in counted]
    rows = [[what, *(column[what] for column in columns)] for what in columns[0]]
    titles = [", ".join(filter(None, (f"JAX {t.jax}", t.condition))) for t in counted]
    write_table(HERE, ["what", *titles], rows)


def keep(case: Case) -> None:
    """Add a failure to the cases that the tests replay, unless a case fails with the same words."""
    known = load()
    if all((c.open, c.ways) != (case.open, case.ways) for c in known):
        save([*known, case])
