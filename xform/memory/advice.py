"""The advice in a memory report: changes that save bytes, the largest buffer, and facts.

A *change* promises how many bytes it saves (`changes.py`). A *fact* states what some bytes hold,
and promises nothing (`facts.py`).
"""

from __future__ import annotations

from typing import Any

from xform.memory.changes import changes
from xform.memory.facts import facts, largest_buffer
from xform.terminal.text import human_bytes

# The advice leaves out anything below this fraction of the total.
_SMALLEST_FRACTION = 0.02


def advice(report: Any) -> list[str]:
    """Return sentences that say how to reduce the memory of the function of a `MemoryReport`.

    The changes come first, because the bytes that they save are known. If the program is too large
    for its device, the changes that may make it fit come before all others. Then come the largest
    buffer and the facts. Changes and facts are sorted by bytes. The list is empty if the compiler
    reported no buffers.
    """
    if not report.peak:
        return []
    least_bytes = max(1, _SMALLEST_FRACTION * report.total_bytes)
    by_size = lambda entries: sorted(
        (x for x in entries if x.bytes >= least_bytes), key=lambda x: -x.bytes
    )
    large_changes, over_bytes = by_size(changes(report)), report.over_bytes or 0
    sufficient = [c for c in large_changes if over_bytes and c.bytes >= over_bytes]
    return [
        *(f"{c.text}. This may be enough: the program is over by {human_bytes(over_bytes)}"
          for c in sufficient),
        *(c.text for c in large_changes if c not in sufficient),
        largest_buffer(report),
        *(f.text for f in by_size(facts(report))),
    ]  # fmt: skip
