"""Store measurements beside an experiment, and print them as the table of its README.

With `--write` on the command line of an experiment, its README gets the table. If the README has a
second pair of marks, `<!-- table newest -->`, a newer JAX than the oldest that xform supports
writes its table there: `make table OF=experiment.module NEWEST=1`.
"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from xform.storage.files import atomic_write

# Taken from the command line here, so that no experiment has to know this option.
_WRITES = "--write" in sys.argv
sys.argv[:] = [word for word in sys.argv if word != "--write"]


def known(path: Path) -> dict[str, Any]:
    """Return the stored measurements by name; empty without a file."""
    return json.loads(path.read_text()) if path.exists() else {}


def keep(path: Path, name: str, value: Any) -> dict[str, Any]:
    """Add a measurement to a file, and return all of them."""
    results = known(path) | {name: value}
    with atomic_write(path) as partial:
        partial.write_text(json.dumps(results, indent=1) + "\n")
    return results


def write_table(
    folder: Path,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    name: str = "table",
    target: str | None = None,
) -> None:
    """Print a table, with date, JAX version and backend; see `replace`."""
    day = datetime.date.today().isoformat()
    stamp = f"Measured {day}, JAX {jax.__version__}, {target or jax.default_backend()}."
    replace(folder, name, [*table(head, rows), "", stamp])


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table."""
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]


def replace(folder: Path, name: str, lines: Sequence[str]) -> None:
    """Print lines. With `--write`, they replace those between two marks of `folder/README.md`."""
    print("\n".join(lines))
    if not _WRITES:
        return
    readme = folder / "README.md"
    text = readme.read_text()
    if jax.__version__ != _oldest_jax() and f"<!-- {name} newest -->" in text:
        name = f"{name} newest"
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    readme.write_text("\n".join([before + begin, *lines, end + after]))


def _oldest_jax() -> str:
    """Return the oldest version of JAX that xform supports."""
    pins = Path(__file__).parent.with_name("constraints.txt").read_text().splitlines()
    (version,) = (pin.removeprefix("jax==") for pin in pins if pin.startswith("jax=="))
    return version
