"""The advice of a report: changes that take fewer bytes, the largest buffer, and facts."""

from __future__ import annotations

from typing import Any

from xform.memory.changes import changes
from xform.memory.facts import facts, largest_buffer
from xform.terminal.text import human_bytes

# The advice leaves out anything below this fraction of the total.
_SMALLEST_FRACTION = 0.02


def advice(report: Any) -> list[str]:
    """Advice on how to reduce the memory of the function of a `MemoryReport`, as sentences.

    The changes come first, because the bytes that they save are known. If the program is too large
    for its device, the changes that make it fit come before the others; all are sorted by bytes.
    The largest buffer and the facts follow. They promise no savings.
    """
    if not report.peak:
        return []
    least = max(1, _SMALLEST_FRACTION * report.total_bytes)
    worth = sorted((c for c in changes(report) if c.bytes >= least), key=lambda c: -c.bytes)
    over = report.compilation.over_bytes or 0
    enough = [c for c in worth if over and c.bytes >= over]
    found = sorted((f for f in facts(report) if f.bytes >= least), key=lambda f: -f.bytes)
    return [
        *(f"{c.text}. This may be enough: the program is over by {human_bytes(over)}"
          for c in enough),
        *(c.text for c in worth if c not in enough),
        largest_buffer(report),
        *(f.text for f in found),
    ]  # fmt: skip
