"""What would take fewer bytes, with numbers that hold; and what takes the most."""

from __future__ import annotations

from typing import Any

from xform.memory.changes import changes
from xform.memory.facts import facts, largest
from xform.text import human_bytes

# What is a smaller part of the whole is not worth a line.
_PART = 0.02


def advice(report: Any) -> list[str]:
    """What to change so that a function takes fewer bytes; `report` is its `MemoryReport`.

    First the changes whose bytes are known: where the program is over its device, those that spare
    that much alone, then those that spare most. Then the largest buffer, and what else takes bytes,
    without a promise.
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
