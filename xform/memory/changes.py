"""Changes that reduce the memory of a function, and how many bytes each saves.

This module has only changes with a reliable number: a test makes each change on several programs
and compares with the compiler's bytes. Advice without such a number is a fact (`facts`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from xform.memory.attribute import Row
from xform.memory.independent import Batch
from xform.terminal.text import human_bytes, several

ARGUMENTS = ("argument", "parameter", "optimizer state")
MADE = ("activation", "recompute", "temporary")


class Change(NamedTuple):
    """A possible change, and the bytes that it saves on each device."""

    bytes: int
    text: str


def changes(report: Any) -> Iterator[Change]:
    """The changes that are possible for the function of a `MemoryReport`."""
    yield from _replicated(report)
    yield from _batch(report)


def spared(report: Any, left: Callable[[Row], float]) -> int:
    """By how many bytes the peak falls if each buffer shrinks to the fraction `left(row)`.

    The live bytes of every step are added up again, because the peak may move to another step.
    """
    fewer = [0.0] * (len(report.live) + 1)
    for row in report.buffers:
        if row.counted and (gone := row.bytes * (1 - left(row))):
            fewer[row.born] += gone
            fewer[row.dies + 1] -= gone
    sizes = zip(report.live, itertools.accumulate(fewer), strict=False)
    most = max((size - gone for size, gone in sizes), default=0.0)
    return round(max(report.live, default=0) - most)


def _replicated(report: Any) -> Iterator[Change]:
    """Shard the arguments that every device holds in full."""
    n = report.compilation.devices
    rows = [r for r in report.peak if (r.dtype, r.shape) in report.shapes
            and r.category in ARGUMENTS]  # fmt: skip
    if n > 1 and rows:
        size = sum(r.bytes for r in rows)
        less = size - size // n
        yield Change(
            less,
            f"every device holds a full copy of {several([r.name for r in rows])}: sharded over "
            f"{n} devices they take {human_bytes(less)} less on each",
        )


def _batch(report: Any) -> Iterator[Change]:
    """Halve the first axis that is proven to be a batch.

    A smaller temporary may also fit into the memory of an output and so save more bytes. There is
    no such change on several devices, since the program does not show how a buffer is split.
    """
    batch = next(iter(report.shown.batches), None)
    if batch is None or batch.size % 2 or report.compilation.devices > 1:
        return
    batched = _with_batch(report, batch)
    less = spared(report, lambda row: 0.5 if id(row) in batched else 1)
    yield Change(
        less,
        f"half the batch, {batch.size // 2} instead of {batch.size}, takes at least "
        f"{human_bytes(less)} less; the gradients are sums over the batch, so they can also be "
        "computed for one part of the batch at a time and added up",
    )


def _with_batch(report: Any, batch: Batch) -> set[int]:
    """The `id` of each row whose buffer has the batch in its shape.

    An argument keeps the shape that it has in the traced program. For other values, the compiler
    may merge or reorder axes, but it keeps their number of elements.
    """
    counts = {math.prod(shape) for shape in batch.has}

    def has_batch(row: Row) -> bool:
        if row.category in MADE:
            return math.prod(row.shape) in counts or not batch.sizes.isdisjoint(row.shape)
        return row.shape in batch.has and row.shape not in batch.lacks

    return {id(row) for row in report.buffers if has_batch(row)}
