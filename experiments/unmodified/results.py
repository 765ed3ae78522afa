"""The file of all numbers, to which runs add what is missing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.report import keep, known

# By program, by target, by way.
Results = dict[str, dict[str, Any]]
# Of the parts of a program the one that is no target: values, gradients and time on a CPU.
AGREEMENT = "agreement"


def add(path: Path, name: str, part: str, found: Mapping[str, Any]) -> None:
    """Put results of a part of a program among the others."""
    print(name, part, dict(found), flush=True)
    parts = known(path).get(name, {})
    keep(path, name, parts | {part: parts.get(part, {}) | dict(found)})
