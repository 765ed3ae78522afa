"""Two memory reports side by side: the bytes of each, and where they differ."""

from __future__ import annotations

import dataclasses
from typing import Any

from xform.terminal.notebook import Result
from xform.terminal.text import columns, human_bytes

# The kinds of bytes in a report, in printing order.
KINDS = ("argument", "output", "temp", "alias", "total", "constant", "host", "vmem", "code")
# The most lines in a printed table.
LINES = 12


@dataclasses.dataclass(frozen=True, repr=False)
class Difference(Result):
    """Two `MemoryReport`s, `one` and `other`, side by side. Prints as tables."""

    one: Any
    other: Any

    def rows(self, key: str = "where") -> list[tuple[str, int, int]]:
        """Return the bytes at the peak of both reports, in groups.

        `key` is "where" (source line), "category", "scope" or "operation".

        Returns:
          `(name, bytes in one, bytes in the other)` for each group, largest change first.
        """
        left, right = ({g.name: g.bytes for g in r.group_by(key)} for r in (self.one, self.other))
        changes = [(k, left.get(k, 0), right.get(k, 0)) for k in {*left, *right}]
        return sorted(changes, key=lambda r: (-abs(r[1] - r[2]), r[0]))

    def heading(self) -> str:
        """Return which reports are compared, and the change of the total."""
        one, other = self.one.total_bytes, self.other.total_bytes
        return f"{self.one.heading()}, and {self.other.heading()}" + (
            "" if one is None or other is None else f": {table_row('', one, other)[-1]}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return both reports as plain data."""
        return {"one": self.one.to_dict(), "other": self.other.to_dict()}

    def __str__(self) -> str:
        policy = lambda r: f", {r.description.policy}" if r.description.policy else ""
        names = [f"{r.function} on {r.target}{policy(r)}" for r in (self.one, self.other)]
        sizes = lambda kind: tuple(getattr(r, f"{kind}_bytes") for r in (self.one, self.other))
        lines = [["", *names, "change"], *(table_row(kind, *sizes(kind)) for kind in KINDS)]
        parts = [columns(lines, right=(1, 2, 3))]
        for key in ("category", "where"):
            if rows := [r for r in self.rows(key) if r[1] != r[2]][:LINES]:
                lines = [[key, *names, "change"], *(table_row(*r) for r in rows)]
                parts.append(columns(lines, right=(1, 2, 3)))
        return "\n\n".join(parts)


def table_row(name: str, a: int | None, b: int | None) -> list[str]:
    """Return a printed row: a name, bytes before and after, and the change from `a` to `b`."""
    change = human_bytes(None)
    if a is not None and b is not None:
        change = f"{'-' if b < a else '+'}{human_bytes(abs(b - a))}"
    return [name or "(no line)", human_bytes(a), human_bytes(b), change]
