"""The file of all results; runs add the missing ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.report import keep, known

# By program, by target, by way.
Results = dict[str, dict[str, Any]]
# The part of a program that is not a target: values, gradients and time on a CPU.
AGREEMENT = "agreement"


def add(path: Path, name: str, part: str, found: Mapping[str, Any]) -> None:
    """Add the results of a part of a program to the file."""
    print(name, part, dict(found), flush=True)
    parts = known(path).get(name, {})
    keep(path, name, parts | {part: parts.get(part, {}) | dict(found)})
