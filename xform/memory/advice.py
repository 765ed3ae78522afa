"""What would take fewer bytes, with numbers."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

from xform.memory.attribute import Row
from xform.text import human_bytes

# What is a smaller part of the whole is not worth a line.
_PART = 0.02
_MOST = 3


def advice(report: Any) -> list[str]:
    """What to change so that a function takes fewer bytes, the most promising first.

    `report` is its `MemoryReport`.
    """
    kinds = (_donations, _copies, _whole, _activations, _constants)
    found = [line for kind in kinds for line in kind(report)]
    worth = [(n, text) for n, text in found if n and n >= _PART * report.total_bytes]
    return [text for _, text in sorted(worth, key=lambda pair: -pair[0])]


def _donations(report: Any) -> Iterator[tuple[int, str]]:
    """Arguments whose memory an output of their type could take."""
    kinds = ("argument", "parameter", "optimizer state")
    outputs = collections.Counter(
        (r.dtype, r.shape) for r in report.peak if r.category in ("output", "gradient") and r.output
    )
    spared, names = 0, list[str]()
    for row in report.peak:
        if row.category in kinds and not row.output and outputs[row.dtype, row.shape]:
            outputs[row.dtype, row.shape] -= 1
            spared += row.bytes
            names.append(row.name)
    if names:
        yield (
            spared,
            f"donate {_several(names)} (donate_argnums), if nothing needs it afterwards: outputs "
            f"of the same type take that memory, up to {human_bytes(spared)} less",
        )


def _copies(report: Any) -> Iterator[tuple[int, str]]:
    """Values that are there in a second dtype."""
    rows = [r for r in report.peak if r.operation == "convert_element_type"]
    if rows:
        size = sum(r.bytes for r in rows)
        yield size, (f"{human_bytes(size)} are copies in another dtype, at {_places(rows)}: keep "
                     "the values in the dtype they are used in, or convert them later")  # fmt: skip


def _whole(report: Any) -> Iterator[tuple[int, str]]:
    """Arguments that every device has all of."""
    if report.compilation.devices == 1:
        return
    rows = [r for r in report.peak if (r.dtype, r.shape) in report.shapes
            and r.category in ("argument", "parameter", "optimizer state")]  # fmt: skip
    if rows:
        size = sum(r.bytes for r in rows)
        n = report.compilation.devices
        yield size, (f"{_several([r.name for r in rows])} are whole on every device: sharded over "
                     f"{n} they take {human_bytes(size - size // n)} less")  # fmt: skip


def _activations(report: Any) -> Iterator[tuple[int, str]]:
    """Values that wait for the backward pass."""
    rows = [r for r in report.peak if r.category == "activation"]
    if rows:
        size = sum(r.bytes for r in rows)
        # Which bytes can be had, and for what work, is not known before the loss is planned.
        yield (
            size,
            f"{human_bytes(size)} wait for the backward pass, most at {_places(rows)}: ask "
            "xform.pareto of the loss which peaks can be had, and what each costs; a peak that it "
            "names is a policy, xform.policies.budget(...)",
        )


def _constants(report: Any) -> Iterator[tuple[int, str]]:
    """Arrays that the function closes over; the compiler has constants of its own."""
    size = min(report.constant_bytes or 0, report.compilation.closed_bytes)
    yield size, (f"{human_bytes(size)} are part of the program, as arrays that the function closes "
                 "over: pass them as arguments, which can be sharded, donated, and shared with "
                 "other programs")  # fmt: skip


def _several(names: list[str]) -> str:
    rest = len(names) - _MOST
    return ", ".join(names[:_MOST]) + (f" and {rest} more" if rest > 0 else "")


def _places(rows: list[Row]) -> str:
    sizes = collections.Counter[str]()
    for row in rows:
        sizes[row.where or row.name] += row.bytes
    return ", ".join(place for place, _ in sizes.most_common(_MOST))
