"""Read the JSON of a stored Plan and check the type of every part.

If a part is missing, has another type, or refers to something that does not exist, a ValueError
names its place in the data, such as `plan.rows[3].shape`.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from xform.planner.plan.record import Record

# How messages name a type.
_TYPE_NAMES = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    type(None): "null",
}


@dataclasses.dataclass(frozen=True)
class _DecisionRow:
    """The types of one entry of `Record.decisions`, which explains the fields."""

    program: int
    saved: tuple[int, ...]
    offloaded: dict[str, tuple[str, ...]]
    nodes: dict[str, tuple[int, ...]]
    snapshots: int | None
    asked: bool = False


def read_plan_data(kind: Any, data: Any, place: str = "plan") -> Any:
    """Convert JSON data to the type `kind`: a dataclass, or the type of a field of one.

    `place` names the data in errors.

    Raises:
      ValueError: the data has another type; the message has the place and the expected type.
    """
    if kind is Any:
        return data
    if dataclasses.is_dataclass(kind):
        value = _read_fields(kind, data, place)
        if isinstance(value, Record):
            _check_record(value, place)
        return value
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        _expect(isinstance(data, list), place, data, "a list")
        return tuple(read_plan_data(inner[0], x, f"{place}[{i}]") for i, x in enumerate(data))
    if origin is dict:
        _expect(isinstance(data, dict), place, data, "an object")
        return {k: read_plan_data(inner[1], x, f"{place}.{k}") for k, x in data.items()}
    if origin is typing.Literal:
        _expect(data in inner, place, data, " or ".join(map(repr, inner)))
        return data
    allowed = inner if origin is types.UnionType else (kind,)
    # By type, not isinstance: a bool is not a number here.
    _expect(type(data) in allowed, place, data, " or ".join(_TYPE_NAMES[k] for k in allowed))
    return data


def _read_fields(kind: Any, data: Any, place: str) -> Any:
    """Convert a JSON object to the dataclass `kind`."""
    _expect(isinstance(data, dict), place, data, "an object")
    hints = typing.get_type_hints(kind)
    required = {f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING}
    for name in sorted(required - data.keys()):
        raise ValueError(f"{place}.{name} is missing")
    for name in sorted(data.keys() - hints.keys()):
        raise ValueError(f"{place} has the unknown field {name!r}")
    return kind(**{k: read_plan_data(hints[k], x, f"{place}.{k}") for k, x in data.items()})


def _expect(holds: bool, place: str, data: Any, expected: str) -> None:
    """Raise a ValueError unless `holds`: the data at `place` is not what is `expected`."""
    if not holds:
        text = repr(data)
        shown = text if len(text) < 40 else f"{text[:36]} ..."
        raise ValueError(f"{place} is {shown}, not {expected}")


def _check_record(record: Record, place: str) -> None:
    """Check that the decisions refer to existing programs and to decisions before them."""
    _expect(bool(record.decisions), f"{place}.decisions", [], "a list of at least one decision")
    for i, row in enumerate(record.decisions):
        row_place = f"{place}.decisions[{i}]"
        decision: _DecisionRow = read_plan_data(_DecisionRow, row, row_place)
        _check_indices([decision.program], len(record.programs), f"{row_place}.program", "programs")
        _check_indices(decision.saved, None, f"{row_place}.saved", "values")
        _check_keys(decision.offloaded, f"{row_place}.offloaded")
        _check_keys(decision.nodes, f"{row_place}.nodes")
        for k, memories in decision.offloaded.items():
            two = len(memories) == 2
            _expect(two, f"{row_place}.offloaded.{k}", list(memories), "two memories")
        for k, indices in decision.nodes.items():
            _check_indices(indices, i, f"{row_place}.nodes.{k}", "decisions before it")
        positive = decision.snapshots is None or decision.snapshots > 0
        _expect(positive, f"{row_place}.snapshots", decision.snapshots, "a positive number")
    for i, numbers in enumerate(record.slices):
        at, known = f"{place}.slices[{i}]", [n for n in numbers if n is not None]
        complete = len(numbers) == 5 and None not in numbers[:4]
        _expect(complete, at, list(numbers), "four numbers, and a number or null")
        _check_indices(known, None, at, "positions")
        _expect(known[3] > 1, at, list(numbers), "at least two slices")
    shapes = read_plan_data(dict[str, tuple[tuple[int, ...], ...]], record.loops, f"{place}.loops")
    _check_keys(shapes, f"{place}.loops")
    for k, shape in shapes.items():
        positive = all(n > 0 for part in shape for n in part) and all(shape)
        _expect(bool(shape) and positive, f"{place}.loops.{k}", list(shape), "positive trip counts")


def _check_keys(table: Mapping[str, Any], place: str) -> None:
    """Check that the keys of a JSON object are indices."""
    for k in table:
        _expect(k.isdecimal(), f"a key of {place}", k, "an index in the program")


def _check_indices(indices: Sequence[int], end: int | None, place: str, of: str) -> None:
    """Check that indices are from 0 to below `end`; `of` names the things that they count."""
    for n in indices:
        if n < 0:
            raise ValueError(f"{place} refers to {n}, which is negative")
        if end is not None and n >= end:
            raise ValueError(f"{place} refers to {n}, but there are {end} {of}")
