"""Put a measured table into an experiment's README, between its two markers."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

import jax


def write_table(
    folder: Path,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    name: str = "table",
    target: str | None = None,
) -> None:
    """Replace a table in `folder/README.md`; date, JAX's version and backend stand below it."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]
    day = datetime.date.today().isoformat()
    stamp = f"Measured {day}, JAX {jax.__version__}, {target or jax.default_backend()}."
    readme = folder / "README.md"
    before, _, rest = readme.read_text().partition(begin)
    _, _, after = rest.partition(end)
    readme.write_text("\n".join([before + begin, *lines, "", stamp, end + after]))
    print("\n".join([*lines, "", stamp]))
