"""Changes that make a function take fewer bytes, and how many fewer.

A change is here only if its number can be relied on: a test makes each one on several programs and
asks the compiler. What has no such number is a fact (`facts`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from xform.memory.attribute import Row
from xform.memory.independent import Batch
from xform.text import human_bytes, several

ARGUMENTS = ("argument", "parameter", "optimizer state")
MADE = ("activation", "recompute", "temporary")


class Change(NamedTuple):
    """Something that can be changed, and the bytes that a device then takes less."""

    bytes: int
    text: str


def changes(report: Any) -> Iterator[Change]:
    """The changes that a `MemoryReport` shows."""
    yield from _whole(report)
    yield from _batch(report)


def spared(report: Any, left: Callable[[Row], float]) -> int:
    """The bytes that a peak is lower where of each buffer only a part is `left`.

    The live bytes of each step are added up again: the peak may be at another step then.
    """
    fewer = [0.0] * (len(report.live) + 1)
    for row in report.buffers:
        if row.counted and (gone := row.bytes * (1 - left(row))):
            fewer[row.born] += gone
            fewer[row.dies + 1] -= gone
    sizes = zip(report.live, itertools.accumulate(fewer), strict=False)
    most = max((size - gone for size, gone in sizes), default=0.0)
    return round(max(report.live, default=0) - most)


def _whole(report: Any) -> Iterator[Change]:
    """Arguments that every device has all of."""
    n = report.compilation.devices
    rows = [r for r in report.peak if (r.dtype, r.shape) in report.shapes
            and r.category in ARGUMENTS]  # fmt: skip
    if n > 1 and rows:
        size = sum(r.bytes for r in rows)
        less = size - size // n
        yield Change(
            less,
            f"{several([r.name for r in rows])} are whole on every device: sharded over {n} they "
            f"take {human_bytes(less)} less",
        )


def _batch(report: Any) -> Iterator[Change]:
    """Half of the first batch that the program proves to be one.

    A smaller temporary may also fit into the memory of an output and so save more bytes.
    With several devices the report promises nothing: the program does not show how a buffer is
    split.
    """
    batch = next(iter(report.shown.batches), None)
    if batch is None or batch.size % 2 or report.compilation.devices > 1:
        return
    has = _having(report, batch)
    less = spared(report, lambda row: 0.5 if id(row) in has else 1)
    yield Change(
        less,
        f"half the batch, {batch.size // 2} for {batch.size}, takes at least {human_bytes(less)} "
        "less; the gradients are sums over the batch, so those of its parts can also be computed "
        "one after the other, and added up",
    )


def _having(report: Any, batch: Batch) -> set[int]:
    """Which buffers have the batch in their shape, by `id`.

    An argument keeps the shape that the program gives it. The compiler merges or reorders axes of
    other values, but keeps their number of elements.
    """
    counts = {math.prod(shape) for shape in batch.has}

    def there(row: Row) -> bool:
        if row.category in MADE:
            return math.prod(row.shape) in counts or not batch.sizes.isdisjoint(row.shape)
        return row.shape in batch.has and row.shape not in batch.lacks

    return {id(row) for row in report.buffers if there(row)}
