"""A Plan's JSON, read back: every part of the type that it was written with.

What is missing, of another type, or names what is not there is a ValueError that says where it is.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from xform.planner.plan.record import Record

_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    type(None): "null",
}


@dataclasses.dataclass(frozen=True)
class _Row:
    """One row of a Record's decisions."""

    program: int
    saved: tuple[int, ...]
    offloaded: dict[str, tuple[str, ...]]
    nodes: dict[str, tuple[int, ...]]
    snapshots: int | None
    asked: bool = False


def read(kind: Any, data: Any, at: str = "the plan") -> Any:
    """Data of JSON as a dataclass, or as what one of its fields holds.

    Raises:
      ValueError: with the place in the data, and what should be there.
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
        return tuple(read(inner[0], x, f"{at}[{i}]") for i, x in enumerate(data))
    if origin is dict:
        _expect(isinstance(data, dict), at, data, "an object")
        return {k: read(inner[1], x, f"{at}.{k}") for k, x in data.items()}
    if origin is typing.Literal:
        _expect(data in inner, at, data, " or ".join(map(repr, inner)))
        return data
    several = inner if origin is types.UnionType else (kind,)
    # A truth value is no number.
    _expect(type(data) in several, at, data, " or ".join(_WORDS[k] for k in several))
    return data


def _fields(kind: Any, data: Any, at: str) -> Any:
    _expect(isinstance(data, dict), at, data, "an object")
    hints = typing.get_type_hints(kind)
    needed = {f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING}
    for name in sorted(needed - data.keys()):
        raise ValueError(f"{at} has no {name}")
    for name in sorted(data.keys() - hints.keys()):
        raise ValueError(f"{at} has {name}, which no plan has")
    return kind(**{k: read(hints[k], x, f"{at}.{k}") for k, x in data.items()})


def _expect(holds: bool, at: str, data: Any, what: str) -> None:
    if not holds:
        text = repr(data)
        raise ValueError(f"{at} is {text if len(text) < 40 else f'{text[:36]} ...'}, not {what}")


def _check(record: Record, at: str) -> None:
    """Decisions name programs, values and decisions that are there, the last one all others."""
    _expect(bool(record.decisions), f"{at}.decisions", [], "a list of one decision at least")
    for i, row in enumerate(record.decisions):
        here = f"{at}.decisions[{i}]"
        decision: _Row = read(_Row, row, here)
        _below(len(record.programs), [decision.program], f"{here}.program", "programs")
        _below(None, decision.saved, f"{here}.saved", "values")
        _places(decision.offloaded, f"{here}.offloaded")
        _places(decision.nodes, f"{here}.nodes")
        for k, where in decision.offloaded.items():
            _expect(len(where) == 2, f"{here}.offloaded.{k}", list(where), "two memories")
        for k, numbers in decision.nodes.items():
            _below(i, numbers, f"{here}.nodes.{k}", "decisions before it")
        snapshots = decision.snapshots is None or decision.snapshots > 0
        _expect(snapshots, f"{here}.snapshots", decision.snapshots, "a positive number")
    shapes = read(dict[str, tuple[tuple[int, ...], ...]], record.loops, f"{at}.loops")
    _places(shapes, f"{at}.loops")
    for k, shape in shapes.items():
        trips = all(n > 0 for part in shape for n in part) and all(shape)
        _expect(bool(shape) and trips, f"{at}.loops.{k}", list(shape), "positive trips")


def _places(table: Mapping[str, Any], at: str) -> None:
    for k in table:
        _expect(k.isdecimal(), f"a name in {at}", k, "a place in the program")


def _below(end: int | None, numbers: Sequence[int], at: str, of: str) -> None:
    for n in numbers:
        if n < 0:
            raise ValueError(f"{at} names {n}, which is negative")
        if end is not None and n >= end:
            raise ValueError(f"{at} names {n}: there are {end} {of}")
