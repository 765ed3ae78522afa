"""Results in files: write any result as JSON, and read it back as an object of the same class.

The file of a result has its format, such as "xform plan 6", and the fields of its dataclass. Fields
with the metadata `NOT_STORED` are left out. The types of the fields say how to read them. If a part
is missing, has another type, or refers to something that does not exist, a ValueError names its
place in the data, such as `plan.rows[3].shape`.

JSON has no infinity, arrays, bytes and errors. They are objects with one key, which starts with $.
"""

from __future__ import annotations

import base64
import collections.abc
import dataclasses
import importlib
import json
import math
import os
import types
import typing
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from xform import errors
from xform.errors import WrongArgument, XformError
from xform.storage.files import atomic_write

# The metadata of a field that is not stored. It needs a default.
NOT_STORED = {"stored": False}

# For each class of results: its format with a version, and its module. Raise the version if a
# field changes its name or its meaning.
FORMATS = {
    "Coloring": ("xform coloring 1", "xform.sparse.coloring"),
    "Comparison": ("xform comparison 1", "xform.steps.compare"),
    "ComputationalGraph": ("xform graph 1", "xform.adjoints.computational_graph"),
    "DeviceComparison": ("xform device comparison 1", "xform.memory.measured"),
    "Difference": ("xform difference 1", "xform.memory.difference"),
    "Explanation": ("xform explanation 1", "xform.jacobians.explain"),
    "HealthHistory": ("xform health history 1", "xform.diagnosis.history"),
    "LargestBatch": ("xform largest batch 1", "xform.memory.capacity"),
    "MemoryReport": ("xform memory report 2", "xform.memory.report"),
    "NamePlan": ("xform name plan 1", "xform.names.name_plan"),
    "Pareto": ("xform pareto curve 1", "xform.planner.report.pareto"),
    "Pattern": ("xform pattern 1", "xform.sparse.pattern"),
    "PatternAndColoring": ("xform pattern and coloring 1", "xform.sparse.compressed"),
    "Plan": ("xform plan 6", "xform.planner.plan.plan"),
    "Reason": ("xform reason 1", "xform.memory.capacity"),
    "Report": ("xform health report 1", "xform.diagnosis.report"),
    "ResidualTable": ("xform residuals 1", "xform.planner.report.residuals"),
    "Spectrum": ("xform spectrum 1", "xform.curvature.spectrum"),
    "StepPlan": ("xform step plan 1", "xform.steps.step_plan"),
    "UpdateReport": ("xform update report 1", "xform.fused.update_report"),
}
# Suffixes of files that hold no JSON.
_NO_JSON = {".png", ".svg", ".pdf", ".jpg", ".jpeg", ".html"}
# How messages name a type.
_TYPE_NAMES = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    type(None): "null",
}


def load(path: str | os.PathLike[str]) -> Any:
    """Read a result that its method `save` wrote.

    All results have `save`: memory reports, comparisons, residuals, plans, Pareto curves, health
    reports, graphs, patterns and the others. A loaded result prints, plots and shows itself as
    before. A loaded plan is a policy. Arrays become NumPy arrays. A memory report loses its traced
    program, and a graph its pullbacks.

    Args:
      path: the file.

    Returns:
      The result, an object of the class that was saved.

    Raises:
      WrongArgument: the file holds no result, or another version of xform wrote it.
      OSError: the file cannot be read.

    >>> import tempfile
    >>> curve = xform.pareto(lambda x: jnp.sum(jnp.sin(x) ** 2), jnp.ones(8), verify=False)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     curve.save(f"{folder}/curve.json")
    ...     loaded = xform.load(f"{folder}/curve.json")
    >>> loaded == curve
    True
    """
    return load_as(None, path)


def load_as(name: str | None, path: str | os.PathLike[str]) -> Any:
    """Read a result from a file, of the class `name`, or of any class if it is None; see `load`."""
    return parse(name, Path(path).read_text(encoding="utf-8", errors="replace"), path)


def parse(name: str | None, text: str, path: str | os.PathLike[str]) -> Any:
    """Read a result from the text of the file `path`; see `load_as`."""
    kind = label(name) if name else "result"
    try:
        return _restore(json.loads(text), name)
    except (ValueError, RecursionError) as error:
        request, writer = (f"{name}.load", f"{name}.save") if name else ("load", "the method save")
        raise WrongArgument(
            f"{request}({str(path)!r})",
            f"the file holds no {kind}: {error}",
            "",
            f"pass a file that {writer} of this version of xform wrote",
        ) from error


def save(result: Any, path: str | os.PathLike[str]) -> None:
    """Write a result to a file, completely or not at all.

    Raises:
      WrongArgument: the name of the file ends like that of a picture or a page.
    """
    if (suffix := Path(path).suffix.lower()) in _NO_JSON:
        method = "save_html" if suffix == ".html" else "plot"
        other = f"; or call {method}({str(path)!r})" if hasattr(result, method) else ""
        raise WrongArgument(
            f"{type(result).__name__}.save({str(path)!r})",
            f"save writes JSON, and the name of the file ends in {suffix}",
            "",
            f"end the name in .json{other}",
        )
    with atomic_write(path) as partial:
        partial.write_text(json.dumps(to_data(result), indent=1, allow_nan=False) + "\n")


def label(name: str) -> str:
    """Return what messages call a result of the class `name`: the format without its version."""
    return FORMATS[name][0].removeprefix("xform ").rpartition(" ")[0]


def to_data(value: Any) -> Any:
    """Return a result, or a part of one, as data that JSON can hold."""
    match value:
        case np.ndarray() | np.generic() | jax.Array():
            return _array_data(value)
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {"$float": str(value)}
        case complex():
            return _array_data(np.asarray(value))
        case bytes():
            return {"$bytes": _packed(value)}
        case Mapping():
            return {str(k): to_data(v) for k, v in value.items()}
        case set() | frozenset():
            return sorted(map(to_data, value))
        case tuple() | list():
            return [to_data(v) for v in value]
        case XformError():
            return {"$error": [type(value).__name__, *map(to_data, value.__reduce__()[1])]}
        case _:
            return _object_data(value)


def _object_data(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, with the format of a result."""
    name = type(value).__name__
    stored = value.for_file() if hasattr(value, "for_file") else value
    head = {"format": FORMATS[name][0]} if name in FORMATS else {}
    return head | {f.name: to_data(getattr(stored, f.name)) for f in _fields(type(value))}


def _fields(kind: Any) -> list[dataclasses.Field[Any]]:
    """Return the stored fields of a dataclass."""
    return [f for f in dataclasses.fields(kind) if f.metadata.get("stored", True)]


def _array_data(array: Any) -> dict[str, Any]:
    """Return an array, or an array of random keys, as data."""
    if not isinstance(array.dtype, np.dtype):
        implementation = str(jax.random.key_impl(array))
        return {"$key": [implementation, to_data(jax.random.key_data(array))]}
    values = np.asarray(array)
    return {"$array": [str(values.dtype), list(values.shape), _packed(values.tobytes())]}


def _packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


def _unpacked(text: str) -> bytes:
    try:
        return zlib.decompress(base64.b64decode(text, validate=True))
    except zlib.error as error:
        raise ValueError(f"damaged bytes: {error}") from error


def _restore(data: Any, name: str | None = None) -> Any:
    """Return the result with these data, of the class `name`, or of any class if it is None."""
    found = data.get("format") if isinstance(data, dict) else None
    if name is None:
        names = [n for n, (text, _) in FORMATS.items() if text == found]
        if str(found).startswith("xform peaks "):
            raise ValueError("it has saved peaks, which xform.memory.growth compares with reports")
        if not names:
            raise ValueError(f"the format is {found!r}, which this version does not have")
        (name,) = names
    if found != FORMATS[name][0]:
        raise ValueError(f"the format is {found!r}, not {FORMATS[name][0]!r}")
    kind = getattr(importlib.import_module(FORMATS[name][1]), name)
    return from_data(kind, data, label(name))


def from_data(kind: Any, data: Any, place: str) -> Any:
    """Convert JSON data to the type `kind`: a dataclass, or the type of a field of one.

    `place` names the data in errors.

    Raises:
      ValueError: the data has another type; the message has the place and the expected type.
    """
    if kind is Any:
        return _untyped(data)
    if dataclasses.is_dataclass(kind):
        return _read_fields(kind, data, place)
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (tuple, frozenset, collections.abc.Sequence):
        expect(isinstance(data, list), place, data, "a list")
        kinds = [*inner] if origin is tuple and Ellipsis not in inner else [inner[0]] * len(data)
        expect(len(kinds) == len(data), place, data, f"a list of {len(kinds)} values")
        pairs = enumerate(zip(kinds, data, strict=True))
        parts = [from_data(k, x, f"{place}[{i}]") for i, (k, x) in pairs]
        return frozenset(parts) if origin is frozenset else tuple(parts)
    if origin in (dict, collections.abc.Mapping):
        expect(isinstance(data, dict), place, data, "an object")
        return {inner[0](k): from_data(inner[1], x, f"{place}.{k}") for k, x in data.items()}
    if origin is typing.Literal:
        expect(data in inner, place, data, " or ".join(map(repr, inner)))
        return data
    return _read_union(inner if origin is types.UnionType else (kind,), data, place)


def _read_union(kinds: tuple[Any, ...], data: Any, place: str) -> Any:
    """Convert JSON data to the first of some types that it has."""
    if isinstance(data, dict) and len(data) == 1 and next(iter(data)).startswith("$"):
        return _untyped(data)
    structured = [k for k in kinds if k not in _TYPE_NAMES]
    if structured and data is not None:
        objects = [k for k in structured if dataclasses.is_dataclass(k) or typing.get_origin(k)]
        expect(bool(objects), place, data, "an array")
        return from_data(objects[0], data, place)
    # By type, not isinstance: a bool is not a number here.
    is_number = float in kinds and type(data) is int
    names = " or ".join(_TYPE_NAMES[k] for k in kinds if k in _TYPE_NAMES)
    expect(type(data) in kinds or is_number, place, data, names)
    return data


def _untyped(data: Any) -> Any:
    """Read a value by the data alone: results by their format, other objects by their key."""
    match data:
        case {"$float": str(text)}:
            return float(text)
        case {"$bytes": str(text)}:
            return _unpacked(text)
        case {"$array": [str(dtype), list(shape), str(text)]}:
            return _read_array(dtype, shape, text)
        case {"$key": [str(implementation), keys]}:
            return jax.random.wrap_key_data(_untyped(keys), impl=implementation)
        case {"$error": [str(name), *arguments]}:
            return getattr(errors, name)(*arguments)
        case {"format": str()}:
            return _restore(data)
        case dict():
            return {k: _untyped(x) for k, x in data.items()}
        case list():
            return [_untyped(x) for x in data]
        case _:
            return data


def _read_array(dtype: str, shape: list[Any], text: str) -> Any:
    """Return an array, or a NumPy number if it has no axes."""
    try:
        return np.frombuffer(_unpacked(text), jax.numpy.dtype(dtype)).reshape(shape)[()]
    except TypeError as error:  # an unknown dtype
        raise ValueError(str(error)) from error


def _read_fields(kind: Any, data: Any, place: str) -> Any:
    """Convert a JSON object to the dataclass `kind`."""
    expect(isinstance(data, dict), place, data, "an object")
    if kind.__name__ in FORMATS:
        data = {k: x for k, x in data.items() if k != "format"}
    hints, fields = typing.get_type_hints(kind), _fields(kind)
    missing = dataclasses.MISSING
    required = {f.name for f in fields if f.default is missing and f.default_factory is missing}
    for name in sorted(required - data.keys()):
        raise ValueError(f"{place}.{name} is missing")
    for name in sorted(data.keys() - {f.name for f in fields}):
        raise ValueError(f"{place} has the unknown field {name!r}")
    value = kind(**{k: from_data(hints[k], x, f"{place}.{k}") for k, x in data.items()})
    if check := getattr(kind, "check_stored", None):
        check(value, place)
    return value


def expect(holds: bool, place: str, data: Any, expected: str) -> None:
    """Raise a ValueError unless `holds`: the data at `place` is not what is `expected`."""
    if not holds:
        text = repr(data)
        shown = text if len(text) < 40 else f"{text[:36]} ..."
        raise ValueError(f"{place} is {shown}, not {expected}")
