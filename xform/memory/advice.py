"""The advice in a memory report: changes that save bytes, the largest buffer, and facts.

A *change* promises how many bytes it saves (`changes.py`). A *fact* states what some bytes hold,
and promises nothing: only the compiler knows how many bytes a change would save. A *row* is the
report on one buffer (`BufferRow`).
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from xform.memory.attribute import BufferRow
from xform.memory.changes import ARGUMENTS, changes
from xform.memory.recomputed import summary
from xform.memory.sliceable import largest_sliceable
from xform.memory.updates import waiting_gradients
from xform.terminal.text import first_few, human_bytes

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
        *_recomputed(report),
        largest_buffer(report),
        *(f.text for f in by_size(facts(report))),
    ]  # fmt: skip


# The most source lines that a fact lists.
_MOST = 3
_STATE = ("parameter", "optimizer state", "gradient")


class Fact(NamedTuple):
    """A number of bytes, and a sentence about what they hold."""

    bytes: int
    text: str


def largest_buffer(report: Any) -> str:
    """Return a sentence about the largest buffer at the peak: its size, type and source line."""
    row = max(report.peak, key=lambda row: (bool(row.type), row.bytes))
    maker = row.maker if row.operation == "parameter" else f"made by {row.maker}"
    line = f" at {row.where}" if row.where else ""
    size, total = human_bytes(row.bytes), human_bytes(report.total_bytes)
    return (
        f"the largest buffer takes {size} of the {total}: {row.type}, {row.category}, {maker}{line}"
    )


def _recomputed(report: Any) -> Iterator[str]:
    """Yield a sentence about the operations that the compiler recomputes by itself, if any."""
    if report.recomputed:
        lines = dict.fromkeys(row.where or row.operation for row in report.recomputed)
        yield (
            f"the compiler recomputes {summary(report.recomputed)}, most at "
            f"{', '.join(list(lines)[:_MOST])}, because the program exceeds "
            f'{human_bytes(report.limit_bytes)}: policy="auto" or a smaller budget chooses what is '
            "recomputed by its cost"
        )


def facts(report: Any) -> Iterator[Fact]:
    """Yield the facts that apply to a `MemoryReport`. Some may be about 0 bytes."""
    kinds = (_donations, _training_state, _gradients, _copies, _slices, _activations, _float32,
             _constants)  # fmt: skip
    for kind in kinds:
        yield from kind(report)


def _donations(report: Any) -> Iterator[Fact]:
    """Arguments that could be donated: they have the same types as outputs."""
    outputs = collections.Counter(
        (r.dtype, r.shape) for r in report.peak if r.category in ("output", "gradient") and r.output
    )
    rows = list[BufferRow]()
    for row in report.peak:
        if row.category in ARGUMENTS and not row.output and outputs[row.dtype, row.shape]:
            outputs[row.dtype, row.shape] -= 1
            rows.append(row)
    if rows:
        size = sum(r.bytes for r in rows)
        yield Fact(
            size,
            f"{first_few([r.name for r in rows])} ({human_bytes(size)}) have the same types as "
            "outputs: if nothing reads them after the call, donate them (donate_argnums), and the "
            "compiler may write the outputs into their memory",
        )


def _training_state(report: Any) -> Iterator[Fact]:
    """Parameters, gradients and optimizer state, if the program is too large for one device."""
    if report.devices == 1 and report.over_bytes:
        size = sum(r.bytes for r in report.peak if r.category in _STATE)
        yield Fact(
            size,
            f"parameters, their gradients and the optimizer's state take {human_bytes(size)}: "
            "several devices can share them",
        )


def _gradients(report: Any) -> Iterator[Fact]:
    """Gradients that are all live at once because a number is computed from all of them."""
    if found := waiting_gradients(report):
        size = sum(r.bytes for r in found.rows)
        line = f", at {found.where}" if found.where else ""
        yield Fact(
            found.peak_reduction,
            f"{human_bytes(size)} of gradients wait for a number that is computed from all of them "
            f"(a norm, or whether they are finite){line}: with one number for each gradient, as in "
            "optax.clip_by_block_rms, each gradient can be applied as soon as it is computed",
        )


def _copies(report: Any) -> Iterator[Fact]:
    """Copies of values in another dtype."""
    rows = [r for r in report.peak if r.operation == "convert_element_type"]
    size = sum(r.bytes for r in rows)
    yield Fact(size, f"{human_bytes(size)} are copies in another dtype, at {_lines(rows)}")


def _slices(report: Any) -> Iterator[Fact]:
    """Values that exist only within a part of the program that can run in slices."""
    found = largest_sliceable(report)
    if found is not None:
        region = found.region
        aval: Any = region.start.aval
        yield Fact(
            found.bytes,
            f"{human_bytes(found.bytes)} are in a part of {len(region.members)} operations that "
            f"can run in slices of axis {region.axis} of {aval.str_short(short_dtypes=True)} "
            f"({region.source.primitive.name} at {region.where}): xform.sliced(f, ...) runs a "
            "function in slices, and xform.policies.budget(..., slices=True) a derivative",
        )


def _activations(report: Any) -> Iterator[Fact]:
    """Values that are saved for the backward pass."""
    rows = [r for r in report.peak if r.category == "activation"]
    size = sum(r.bytes for r in rows)
    # Which peaks are possible, and at what recomputed work, is known only after planning the loss.
    fit = "" if report.fits else 'policy="auto" to fit the device, or '
    yield Fact(
        size,
        f"{human_bytes(size)} are saved for the backward pass, most at {_lines(rows)}: "
        f"use {fit}xform.policies.budget(...) with a peak that xform.pareto lists for the loss",
    )


def _float32(report: Any) -> Iterator[Fact]:
    """Activations in float32."""
    rows = [r for r in report.peak if r.category == "activation" and r.dtype == "f32"]
    size = sum(r.bytes for r in rows)
    yield Fact(size, f"activations of {human_bytes(size)} are float32, most at {_lines(rows)}")


def _constants(report: Any) -> Iterator[Fact]:
    """Arrays that the function closes over; the compiler's own constants do not count."""
    size = min(report.constant_bytes or 0, report.closed_bytes)
    yield Fact(
        size,
        f"{human_bytes(size)} are constants of the program, arrays that the function closes over: "
        "pass them as arguments, which can be sharded, donated and shared with other programs",
    )


def _lines(rows: Sequence[BufferRow]) -> str:
    """Return the source lines with the most bytes in these rows, as text."""
    sizes = collections.Counter[str]()
    for row in rows:
        sizes[row.where or row.name] += row.bytes
    return ", ".join(line for line, _ in sizes.most_common(_MOST))
