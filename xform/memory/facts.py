"""Facts about the bytes of a program, and the lines that they come from.

They promise nothing: only the compiler knows how many bytes a change would spare.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from xform.memory.attribute import Row
from xform.memory.changes import ARGUMENTS, MADE
from xform.memory.updates import waiting
from xform.text import human_bytes, several

_MOST = 3
_STATE = ("parameter", "optimizer state", "gradient")


class Fact(NamedTuple):
    """Something that takes bytes: how many, and a sentence."""

    bytes: int
    text: str


def largest(report: Any) -> str:
    """The largest buffer at the peak: what it takes, what it is, and its line."""
    row = max(report.peak, key=lambda row: row.bytes)
    kind = f"{row.dtype}[{','.join(map(str, row.shape))}]"
    made = row.name if row.operation == "parameter" else f"made by {row.operation}"
    at = f" at {row.where}" if row.where else ""
    return (f"the largest buffer takes {human_bytes(row.bytes)} of the "
            f"{human_bytes(report.total_bytes)}: {kind}, {row.category}, {made}{at}")  # fmt: skip


def facts(report: Any) -> Iterator[Fact]:
    """The facts that a `MemoryReport` shows."""
    for kind in (_donations, _state, _applied, _copies, _classes, _activations, _wide, _constants):
        yield from kind(report)


def _donations(report: Any) -> Iterator[Fact]:
    """Arguments of the types of outputs."""
    outputs = collections.Counter(
        (r.dtype, r.shape) for r in report.peak if r.category in ("output", "gradient") and r.output
    )
    rows = list[Row]()
    for row in report.peak:
        if row.category in ARGUMENTS and not row.output and outputs[row.dtype, row.shape]:
            outputs[row.dtype, row.shape] -= 1
            rows.append(row)
    if rows:
        size = sum(r.bytes for r in rows)
        yield Fact(
            size,
            f"{several([r.name for r in rows])} ({human_bytes(size)}) have the types of outputs: "
            "donate them (donate_argnums) if nothing reads them afterwards, and the compiler may "
            "write the outputs into their memory",
        )


def _state(report: Any) -> Iterator[Fact]:
    """The state of training, where one device is too small."""
    if report.compilation.devices == 1 and report.compilation.over_bytes:
        size = sum(r.bytes for r in report.peak if r.category in _STATE)
        yield Fact(
            size,
            f"parameters, their gradients and the optimizer's state take {human_bytes(size)}: "
            "several devices can share them",
        )


def _applied(report: Any) -> Iterator[Fact]:
    """Gradients that wait for each other before they are applied."""
    if found := waiting(report):
        size, at = sum(r.bytes for r in found.rows), f", at {found.where}" if found.where else ""
        yield Fact(
            found.spared,
            f"{human_bytes(size)} of gradients wait for a number that is made of all of them (a "
            f"norm, or whether they are finite){at}: with a number for each gradient, as of "
            "optax.clip_by_block_rms, each can be applied as soon as it is made",
        )


def _copies(report: Any) -> Iterator[Fact]:
    """Values that are there in a second dtype."""
    rows = [r for r in report.peak if r.operation == "convert_element_type"]
    size = sum(r.bytes for r in rows)
    yield Fact(size, f"{human_bytes(size)} are copies in another dtype, at {_places(rows)}")


def _classes(report: Any) -> Iterator[Fact]:
    """Values with a number for each class of a loss."""
    for n in report.shown.classes:
        rows = [r for r in report.peak if r.category in MADE and n in r.shape]
        size = sum(r.bytes for r in rows)
        yield Fact(
            size,
            f"{human_bytes(size)} have a number for each of {n} classes (logits), at "
            f"{_places(rows)}: the loss can be computed for a part of the positions at a time, in "
            "a jax.lax.scan over xform.remat of it",
        )


def _activations(report: Any) -> Iterator[Fact]:
    """Values that wait for the backward pass."""
    rows = [r for r in report.peak if r.category == "activation"]
    size = sum(r.bytes for r in rows)
    # Only planning the loss tells which peaks are possible, and their recomputed work.
    yield Fact(
        size,
        f"{human_bytes(size)} wait for the backward pass, most at {_places(rows)}: "
        'use policy="auto" to fit the device, or xform.policies.budget(...) with a peak that '
        "xform.pareto lists for the loss",
    )


def _wide(report: Any) -> Iterator[Fact]:
    """Activations in float32."""
    rows = [r for r in report.peak if r.category == "activation" and r.dtype == "f32"]
    size = sum(r.bytes for r in rows)
    yield Fact(size, f"activations of {human_bytes(size)} are float32, most at {_places(rows)}")


def _constants(report: Any) -> Iterator[Fact]:
    """Arrays that the function closes over; the compiler has constants of its own."""
    size = min(report.constant_bytes or 0, report.compilation.closed_bytes)
    yield Fact(
        size,
        f"{human_bytes(size)} are part of the program, as arrays that the function closes over: "
        "pass them as arguments, which can be sharded, donated, and shared with other programs",
    )


def _places(rows: Sequence[Row]) -> str:
    sizes = collections.Counter[str]()
    for row in rows:
        sizes[row.where or row.name] += row.bytes
    return ", ".join(place for place, _ in sizes.most_common(_MOST))
