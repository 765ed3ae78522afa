"""Changes that reduce the peak memory of a function, and how many bytes each change saves.

The advice of a `MemoryReport` consists of changes and facts. A *change* promises a number of bytes.
This file has only changes whose number is reliable: a test makes each change on several programs
and compares the number with the compiler's bytes. Advice without such a number is a *fact*
(`advice.py`).

A *buffer* is memory that the compiled program uses from one step to another. A *row* is the report
on a buffer, with its category. An axis is a *batch* if the result is a sum or a mean over
independent parts, one for each index of the axis (`batch_axes.py` proves it).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from xform.memory.attribute import BufferRow
from xform.memory.batch_axes import BatchAxis
from xform.terminal.text import first_few, human_bytes

# Categories of rows that are arguments of the compiled function, and of rows that it computes and
# does not return.
ARGUMENTS = ("argument", "parameter", "optimizer state")
COMPUTED = ("activation", "recompute", "temporary")


class Change(NamedTuple):
    """A possible change.

    Attributes:
      bytes: by how many bytes the change reduces the peak on each device.
      text: the change and its bytes, for a user.
    """

    bytes: int
    text: str


def changes(report: Any) -> Iterator[Change]:
    """Yield the changes that reduce the peak memory of the function of a `MemoryReport`."""
    yield from _replicated(report)
    yield from _halved_batch(report)


def peak_reduction(report: Any, fraction_left: Callable[[BufferRow], float]) -> int:
    """Return by how many bytes the peak falls if some buffers shrink.

    The buffer of each row shrinks to the fraction `fraction_left(row)` of its bytes; 1 leaves it
    unchanged. The live bytes are computed again for every step of the program, because the peak may
    move to another step.
    """
    change = [0.0] * (len(report.live) + 1)
    for row in report.buffers:
        if row.counted and (saved := row.bytes * (1 - fraction_left(row))):
            change[row.born] += saved
            change[row.dies + 1] -= saved
    sizes = zip(report.live, itertools.accumulate(change), strict=False)
    new_peak = max((size - saved for size, saved in sizes), default=0.0)
    return round(max(report.live, default=0) - new_peak)


def _replicated(report: Any) -> Iterator[Change]:
    """Yield the change to shard the arguments that every device holds in full, if there are any.

    On `n` devices, each device then holds a fraction `1 / n` of them. An argument is held in full
    if its buffer on one device has the shape of the whole array.
    """
    n = report.devices
    rows = [r for r in report.peak if (r.dtype, r.shape) in report.shapes
            and r.category in ARGUMENTS]  # fmt: skip
    if n > 1 and rows:
        size = sum(r.bytes for r in rows)
        saved = size - size // n
        yield Change(
            saved,
            f"every device holds a full copy of {first_few([r.name for r in rows])}: sharded over "
            f"{n} devices they take {human_bytes(saved)} less on each",
        )


def _halved_batch(report: Any) -> Iterator[Change]:
    """Yield the change to halve the first axis that is proven to be a batch, if its size is even.

    The promised bytes are a lower bound: a smaller temporary may also fit into the memory of an
    output, which saves more. On several devices this change is not proposed, because the traced
    program does not show how the devices split a buffer.
    """
    batch = next(iter(report.batches), None)
    if batch is None or batch.size % 2 or report.devices > 1:
        return
    batched = _with_batch(report, batch)
    saved = peak_reduction(report, lambda row: 0.5 if id(row) in batched else 1)
    yield Change(
        saved,
        f"half the batch, {batch.size // 2} instead of {batch.size}, takes at least "
        f"{human_bytes(saved)} less; the gradients can also be computed for one part of the "
        "batch at a time and averaged (added up, if the loss is a sum)",
    )


def _with_batch(report: Any, batch: BatchAxis) -> set[int]:
    """Return the `id` of each row whose buffer has the batch in its shape.

    Arguments, outputs and gradients keep the shapes of the traced program. Such a row has the batch
    if its shape occurs in the program only with the batch. For rows that are `COMPUTED`, the
    compiler may merge or reorder axes. A computed row has the batch if it has as many elements as a
    traced value with the batch. It also has the batch if one of its axes is as long as a traced
    axis that contains the batch.
    """
    counts = {math.prod(shape) for shape in batch.shapes_with}

    def has_batch(row: BufferRow) -> bool:
        if row.category in COMPUTED:
            return math.prod(row.shape) in counts or not batch.axis_lengths.isdisjoint(row.shape)
        return row.shape in batch.shapes_with and row.shape not in batch.shapes_without

    return {id(row) for row in report.buffers if has_batch(row)}
