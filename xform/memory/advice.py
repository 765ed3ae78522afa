"""The advice of a report: changes that take fewer bytes, the largest buffer, and facts."""

from __future__ import annotations

from typing import Any

from xform.memory.changes import changes
from xform.memory.facts import facts, largest
from xform.text import human_bytes

# A smaller part of the total is not worth a line.
_PART = 0.02


def advice(report: Any) -> list[str]:
    """What to change so that a function takes fewer bytes; `report` is its `MemoryReport`.

    Changes come first, since their bytes are known. If the program is too large for its device, a
    change that makes it fit leads; others are sorted by bytes. Then come the largest buffer and the
    facts, which promise nothing.
    """
    if not report.peak:
        return []
    least = max(1, _PART * report.total_bytes)
    worth = sorted((c for c in changes(report) if c.bytes >= least), key=lambda c: -c.bytes)
    over = report.compilation.over_bytes or 0
    enough = [c for c in worth if over and c.bytes >= over]
    found = sorted((f for f in facts(report) if f.bytes >= least), key=lambda f: -f.bytes)
    return [
        *(f"{c.text}. This may be enough: the program is over by {human_bytes(over)}"
          for c in enough),
        *(c.text for c in worth if c not in enough),
        largest(report),
        *(f.text for f in found),
    ]  # fmt: skip
