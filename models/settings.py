"""Settings: trees of frozen dataclasses, checked, read from TOML and flags, and written as TOML.

A field made by `setting` says what it is and which values it takes. A field that holds another such
dataclass is a section: `[optim]` in TOML. Names are unique in a whole tree, so that each is a flag
of its own: `learning_rate` in `[optim]` is `--learning-rate`.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import operator
import tomllib
import types
import typing
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from models.errors import InputError

Change = Literal["free", "named", "never"]
Tree = TypeVar("Tree")


@dataclasses.dataclass(frozen=True)
class About:
    """What is known of a setting.

    Attributes:
      help: what it is.
      least, above, most: bounds of a number; `above` is not reached.
      choices: all values that a text may have.
      change: whether a run that goes on may have another value than before: "free", "named" (if
        the user says that it is meant), or "never".
    """

    help: str
    least: float | None = None
    above: float | None = None
    most: float | None = None
    choices: Collection[str] = ()
    change: Change = "named"


def setting(default: Any, help: str, **about: Any) -> Any:
    """A field with a default. Only one whose default is None may be None."""
    return dataclasses.field(default=default, metadata={"about": About(help, **about)})


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A setting in a tree: its name, in which sections it is, and what it holds.

    `kind` is the type of its value; of a tuple, `item` is that of each element.
    """

    name: str
    sections: tuple[str, ...]
    kind: type
    item: type
    optional: bool
    about: About
    value: Any

    @property
    def flag(self) -> str:
        """As it stands on a command line."""
        return "--" + self.name.replace("_", "-")

    def checked(self, given: Any, called: str) -> Any:
        """A value of the right type and within the bounds, or an `InputError`."""
        if self.kind is tuple and self.item is int:
            return self._numbers(given, called)
        if self.kind is tuple:
            return self._texts(given, called)
        value = self._typed(given, called)
        self._bounded(value, called)
        return value

    def _bounded(self, value: Any, called: str) -> None:
        about = self.about
        if about.choices and value not in about.choices:
            near = nearest(str(value), about.choices)
            raise InputError(f"{called} is {value!r}: give one of {', '.join(about.choices)}{near}")
        bounds = [("at least", about.least, operator.ge), ("above", about.above, operator.gt),
                  ("at most", about.most, operator.le)]  # fmt: skip
        for words, bound, holds in bounds:
            if bound is not None and not holds(value, bound):
                raise InputError(f"{called} is {value}, and must be {words} {bound}")

    def _numbers(self, given: Any, called: str) -> tuple[int, ...]:
        parts = [
            part
            for one in (given if isinstance(given, list | tuple) else [given])
            for part in (one.split(",") if isinstance(one, str) else [one])
        ]
        try:
            numbers = tuple(int(part) if isinstance(part, str) else part for part in parts)
        except ValueError:
            numbers = ("",)
        if not all(type(n) is int for n in numbers):
            raise InputError(f"{called} is {given!r}, and must be whole numbers: 16,32")
        for n in numbers:
            self._bounded(n, called)
        return numbers

    def _texts(self, given: Any, called: str) -> tuple[str, ...]:
        given = [given] if isinstance(given, str) else given
        if not isinstance(given, list | tuple) or not all(isinstance(x, str) for x in given):
            raise InputError(f"{called} is {given!r}, and must be a list of texts")
        if wrong := [x for x in given if not _is_utf8(x)]:
            raise InputError(f"{called} is {wrong[0]!r}, which is not UTF-8")
        return tuple(given)

    def _typed(self, value: Any, called: str) -> Any:
        if isinstance(value, str):
            if not _is_utf8(value):
                raise InputError(f"{called} is {value!r}, which is not UTF-8")
            if self.kind is Path:
                if not value or "\0" in value:
                    raise InputError(f"{called} is {value!r}, which names no file or folder")
                return Path(value)
        if self.kind is float and type(value) is int:
            return float(str(value))  # infinite, where `float(value)` is an error
        if type(value) is not self.kind and not (self.kind is Path and isinstance(value, Path)):
            raise InputError(f"{called} is {value!r}, and must be {_WANTED[self.kind]}")
        return value


_WANTED = {int: "a whole number", float: "a number", bool: "true or false", str: "a text",
           Path: "a path"}  # fmt: skip


def leaves(tree: Any, sections: tuple[str, ...] = ()) -> Iterator[Leaf]:
    """All settings of a tree, those of sections after those around them."""
    hints = typing.get_type_hints(type(tree))
    inner: list[tuple[str, Any]] = []
    for field in dataclasses.fields(tree):
        value = getattr(tree, field.name)
        if dataclasses.is_dataclass(value):
            inner.append((field.name, value))
            continue
        hint = hints[field.name]
        args, several = typing.get_args(hint), typing.get_origin(hint) is tuple
        kinds = [k for k in args if k is not types.NoneType] or [hint]
        kind, about = tuple if several else kinds[0], field.metadata["about"]
        yield Leaf(field.name, sections, kind, kinds[0], types.NoneType in args, about, value)
    for name, value in inner:
        yield from leaves(value, (*sections, name))


def replaced(tree: Tree, values: Mapping[str, Any], by_flag: bool = False) -> Tree:
    """The tree with other values for some settings, given by name; `InputError` for a wrong one."""
    known = {leaf.name: leaf for leaf in leaves(tree)}
    for name in values.keys() - known.keys():
        raise InputError(f"{name} is no setting of such a model{nearest(name, known)}")
    checked = {
        name: known[name].checked(value, known[name].flag if by_flag else name)
        for name, value in values.items()
    }
    return _replaced(tree, checked)


def _replaced(tree: Any, values: Mapping[str, Any]) -> Any:
    own = {f.name: getattr(tree, f.name) for f in dataclasses.fields(tree)}
    new = {
        name: _replaced(value, values) if dataclasses.is_dataclass(value) else values[name]
        for name, value in own.items()
        if name in values or dataclasses.is_dataclass(value)
    }
    try:
        return dataclasses.replace(tree, **new)
    except ValueError as error:
        raise InputError(str(error)) from None


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """A TOML document; `where` is what an error calls it."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{where} is no TOML: {error}") from None


def from_toml(tree: Tree, data: Mapping[str, Any], where: str) -> Tree:
    """The tree with the values of a TOML document; unknown names are refused."""
    known = {(*leaf.sections, leaf.name): leaf for leaf in leaves(tree)}
    sections = {path[:n] for path in known for n in range(1, len(path))}
    values: dict[str, Any] = {}

    def read(table: Mapping[str, Any], at: tuple[str, ...]) -> None:
        for name, value in table.items():
            path = (*at, name)
            if path in sections and isinstance(value, Mapping):
                read(value, path)
            elif path in known:
                values[name] = known[path].checked(value, f"{name} in {where}")
            else:
                names = [".".join(p) for p in (*known, *sections)]
                homes = [".".join(p) for p in known if p[-1] == name]
                near = f": did you mean {homes[0]}?" if homes else nearest(".".join(path), names)
                raise InputError(f"{where} has {'.'.join(path)}, which is no setting{near}")

    read(data, ())
    return _replaced(tree, values)


def to_toml(tree: Any) -> str:
    """The whole tree as TOML; a setting that is None is left out."""
    lines: list[str] = []
    section: tuple[str, ...] = ()
    for leaf in leaves(tree):
        if leaf.sections != section:
            section = leaf.sections
            lines += ["", f"[{'.'.join(section)}]"]
        if leaf.value is not None:
            lines.append(f"{leaf.name} = {literal(leaf.value)}")
    return "\n".join([*lines, ""])


def literal(value: Any) -> str:
    """A value as TOML."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, str | Path):
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def nearest(name: str, names: Collection[str], cutoff: float = 0.5) -> str:
    """End an error with the nearest name, if its likeness is at least the cutoff."""
    found = difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    return f": did you mean {found[0]}?" if found else ""
