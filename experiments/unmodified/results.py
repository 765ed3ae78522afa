"""The file of all numbers, to which runs add what is missing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xform.files import whole

Results = dict[str, dict[str, Any]]
# Of the parts of a program the one that is no target: values, gradients and time on a CPU.
AGREEMENT = "agreement"


def known(path: Path) -> Results:
    """All results that there are: by program, by target, by way."""
    return json.loads(path.read_text()) if path.exists() else {}


def keep(path: Path, name: str, part: str, found: Mapping[str, Any]) -> None:
    """Put results of a part of a program among the others."""
    print(name, part, dict(found), flush=True)
    results = known(path)
    parts = results.setdefault(name, {})
    parts[part] = parts.get(part, {}) | dict(found)
    with whole(path) as partial:
        partial.write_text(json.dumps(results, indent=1) + "\n")
