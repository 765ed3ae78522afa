"""Read the JSON of a Plan and check the type of every part.

A part that is missing, has another type, or refers to something that does not exist is a ValueError
that names its place in the data.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from xform.planner.plan.record import Record

_TYPE_NAMES = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    type(None): "null",
}


@dataclasses.dataclass(frozen=True)
class _DecisionRow:
    """One row of a Record's decisions."""

    program: int
    saved: tuple[int, ...]
    offloaded: dict[str, tuple[str, ...]]
    nodes: dict[str, tuple[int, ...]]
    snapshots: int | None
    asked: bool = False


def read_plan_data(kind: Any, data: Any, at: str = "plan") -> Any:
    """Convert JSON data to the type `kind`: a dataclass, or the type of a field of one.

    `at` is the place of the data, for errors.

    Raises:
      ValueError: the data has another type; the message has the place and the expected type.
    """
    if kind is Any:
        return data
    if dataclasses.is_dataclass(kind):
        value = _fields(kind, data, at)
        if isinstance(value, Record):
            _check(value, at)
        return value
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        _expect(isinstance(data, list), at, data, "a list")
        return tuple(read_plan_data(inner[0], x, f"{at}[{i}]") for i, x in enumerate(data))
    if origin is dict:
        _expect(isinstance(data, dict), at, data, "an object")
        return {k: read_plan_data(inner[1], x, f"{at}.{k}") for k, x in data.items()}
    if origin is typing.Literal:
        _expect(data in inner, at, data, " or ".join(map(repr, inner)))
        return data
    allowed = inner if origin is types.UnionType else (kind,)
    # By type, not isinstance: a bool is not a number here.
    _expect(type(data) in allowed, at, data, " or ".join(_TYPE_NAMES[k] for k in allowed))
    return data


def _fields(kind: Any, data: Any, at: str) -> Any:
    _expect(isinstance(data, dict), at, data, "an object")
    hints = typing.get_type_hints(kind)
    needed = {f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING}
    for name in sorted(needed - data.keys()):
        raise ValueError(f"{at}.{name} is missing")
    for name in sorted(data.keys() - hints.keys()):
        raise ValueError(f"{at} has the unknown field {name!r}")
    return kind(**{k: read_plan_data(hints[k], x, f"{at}.{k}") for k, x in data.items()})


def _expect(holds: bool, at: str, data: Any, what: str) -> None:
    if not holds:
        text = repr(data)
        raise ValueError(f"{at} is {text if len(text) < 40 else f'{text[:36]} ...'}, not {what}")


def _check(record: Record, at: str) -> None:
    """Check that the decisions refer to existing programs and to decisions before them."""
    _expect(bool(record.decisions), f"{at}.decisions", [], "a list of at least one decision")
    for i, row in enumerate(record.decisions):
        row_at = f"{at}.decisions[{i}]"
        decision: _DecisionRow = read_plan_data(_DecisionRow, row, row_at)
        _check_indices(len(record.programs), [decision.program], f"{row_at}.program", "programs")
        _check_indices(None, decision.saved, f"{row_at}.saved", "values")
        _check_keys(decision.offloaded, f"{row_at}.offloaded")
        _check_keys(decision.nodes, f"{row_at}.nodes")
        for k, where in decision.offloaded.items():
            _expect(len(where) == 2, f"{row_at}.offloaded.{k}", list(where), "two memories")
        for k, numbers in decision.nodes.items():
            _check_indices(i, numbers, f"{row_at}.nodes.{k}", "decisions before it")
        snapshots = decision.snapshots is None or decision.snapshots > 0
        _expect(snapshots, f"{row_at}.snapshots", decision.snapshots, "a positive number")
    shapes = read_plan_data(dict[str, tuple[tuple[int, ...], ...]], record.loops, f"{at}.loops")
    _check_keys(shapes, f"{at}.loops")
    for k, shape in shapes.items():
        trips = all(n > 0 for part in shape for n in part) and all(shape)
        _expect(bool(shape) and trips, f"{at}.loops.{k}", list(shape), "positive trip counts")


def _check_keys(table: Mapping[str, Any], at: str) -> None:
    for k in table:
        _expect(k.isdecimal(), f"a key of {at}", k, "an index in the program")


def _check_indices(end: int | None, numbers: Sequence[int], at: str, of: str) -> None:
    for n in numbers:
        if n < 0:
            raise ValueError(f"{at} refers to {n}, which is negative")
        if end is not None and n >= end:
            raise ValueError(f"{at} refers to {n}, but there are {end} {of}")
