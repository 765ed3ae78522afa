"""Check the decisions of a stored Plan: everything that they refer to must exist.

Else a ValueError names the place in the data, such as `plan.record.decisions[0].saved`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from xform.storage.results import expect, from_data


@dataclasses.dataclass(frozen=True)
class _DecisionRow:
    """The types of one entry of `Record.decisions`, which explains the fields."""

    program: int
    saved: tuple[int, ...]
    offloaded: dict[str, tuple[str, ...]]
    nodes: dict[str, tuple[int, ...]]
    snapshots: int | None
    asked: bool = False


def check_record(record: Any, place: str) -> None:
    """Check a `Record`: its decisions refer to existing programs and to decisions before them."""
    expect(bool(record.decisions), f"{place}.decisions", [], "a list of at least one decision")
    for i, row in enumerate(record.decisions):
        row_place = f"{place}.decisions[{i}]"
        decision: _DecisionRow = from_data(_DecisionRow, row, row_place)
        _check_indices([decision.program], len(record.programs), f"{row_place}.program", "programs")
        _check_indices(decision.saved, None, f"{row_place}.saved", "values")
        _check_keys(decision.offloaded, f"{row_place}.offloaded")
        _check_keys(decision.nodes, f"{row_place}.nodes")
        for k, memories in decision.offloaded.items():
            two = len(memories) == 2
            expect(two, f"{row_place}.offloaded.{k}", list(memories), "two memories")
        for k, indices in decision.nodes.items():
            _check_indices(indices, i, f"{row_place}.nodes.{k}", "decisions before it")
        positive = decision.snapshots is None or decision.snapshots > 0
        expect(positive, f"{row_place}.snapshots", decision.snapshots, "a positive number")
    for i, numbers in enumerate(record.slices):
        at, known = f"{place}.slices[{i}]", [n for n in numbers if n is not None]
        complete = len(numbers) == 5 and None not in numbers[:4]
        expect(complete, at, list(numbers), "four numbers, and a number or null")
        _check_indices(known, None, at, "positions")
        expect(known[3] > 1, at, list(numbers), "at least two slices")
    shapes = from_data(dict[str, tuple[tuple[int, ...], ...]], record.loops, f"{place}.loops")
    _check_keys(shapes, f"{place}.loops")
    for k, shape in shapes.items():
        positive = all(n > 0 for part in shape for n in part) and all(shape)
        expect(bool(shape) and positive, f"{place}.loops.{k}", list(shape), "positive trip counts")


def _check_keys(table: Mapping[str, Any], place: str) -> None:
    """Check that the keys of a JSON object are indices."""
    for k in table:
        expect(k.isdecimal(), f"a key of {place}", k, "an index in the program")


def _check_indices(indices: Sequence[int], end: int | None, place: str, of: str) -> None:
    """Check that indices are from 0 to below `end`; `of` names the things that they count."""
    for n in indices:
        if n < 0:
            raise ValueError(f"{place} refers to {n}, which is negative")
        if end is not None and n >= end:
            raise ValueError(f"{place} refers to {n}, but there are {end} {of}")
