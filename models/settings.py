"""Settings: trees of frozen dataclasses, checked, read from TOML and flags, and written as TOML.

A settings dataclass has two kinds of fields:

- a setting, made by `setting`, with a help text and the values that are allowed;
- a section, which holds another settings dataclass, such as `optim`: `[optim]` in TOML.

Names of settings are unique in the whole tree, so each has its own flag: `learning_rate` in
`[optim]` is `--learning-rate`. A wrong name or value raises `InputError`, a one-line message.
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
    """Description of a setting.

    Attributes:
      help: its line in `--help`.
      least, above, most: bounds of a number; `above` is exclusive, the others are inclusive.
      choices: the allowed values of a string; empty for any.
      change: whether a resumed run may have another value than before: "free" (yes), "named" (only
        if `--override` names the setting), or "never".
    """

    help: str
    least: float | None = None
    above: float | None = None
    most: float | None = None
    choices: Collection[str] = ()
    change: Change = "named"


def setting(default: Any, help: str, **about: Any) -> Any:
    """Return a dataclass field for a setting.

    Args:
      default: its default. A setting may be None only if its default is None, because `to_toml`
        leaves None out.
      help: its line in `--help`.
      **about: further fields of its `About`, such as `least=1`.
    """
    return dataclasses.field(default=default, metadata={"about": About(help, **about)})


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A setting of a particular tree, with its value.

    Attributes:
      name: its name, such as "learning_rate".
      sections: the names of the sections around it, from the outermost.
      kind: the type of the value.
      item: the type of each element, if the value is a tuple.
      optional: whether the value may be None.
      about: its description.
      value: its value in the tree.
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
        """The flag on the command line, such as `--learning-rate`."""
        return "--" + self.name.replace("_", "-")

    def checked(self, given: Any, called: str) -> Any:
        """Convert a given value to the setting's type, and check that it is allowed.

        Args:
          given: a value from TOML, or the text of a flag.
          called: the name of the setting in messages, such as "--batch".

        Raises:
          InputError: the value has another type or is not allowed.
        """
        if self.kind is tuple and self.item is int:
            return self._numbers(given, called)
        if self.kind is tuple:
            return self._texts(given, called)
        value = self._typed(given, called)
        self._check_allowed(value, called)
        return value

    def _check_allowed(self, value: Any, called: str) -> None:
        """Check choices and bounds."""
        about = self.about
        if about.choices and value not in about.choices:
            near = nearest(str(value), about.choices)
            raise InputError(f"{called} is {value!r}: use one of {', '.join(about.choices)}{near}")
        bounds = [("at least", about.least, operator.ge), ("above", about.above, operator.gt),
                  ("at most", about.most, operator.le)]  # fmt: skip
        for words, bound, holds in bounds:
            if bound is not None and not holds(value, bound):
                raise InputError(f"{called} is {value}, but must be {words} {bound}")

    def _numbers(self, given: Any, called: str) -> tuple[int, ...]:
        """Convert integers, texts such as "16,32", or a list of them to a tuple of integers."""
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
            raise InputError(f"{called} is {given!r}, but must be integers, such as 16,32")
        for n in numbers:
            self._check_allowed(n, called)
        return numbers

    def _texts(self, given: Any, called: str) -> tuple[str, ...]:
        """Convert a text or a list of texts to a tuple."""
        given = [given] if isinstance(given, str) else given
        if not isinstance(given, list | tuple) or not all(isinstance(x, str) for x in given):
            raise InputError(f"{called} is {given!r}, but must be a list of strings")
        if wrong := [x for x in given if not _is_utf8(x)]:
            raise InputError(f"{called} is {wrong[0]!r}, which is not UTF-8")
        return tuple(given)

    def _typed(self, value: Any, called: str) -> Any:
        """Convert a value that is not a tuple to the setting's type."""
        if isinstance(value, str):
            if not _is_utf8(value):
                raise InputError(f"{called} is {value!r}, which is not UTF-8")
            if self.kind is Path:
                if not value or "\0" in value:
                    raise InputError(f"{called} is {value!r}, which is not a path")
                return Path(value)
        if self.kind is float and type(value) is int:
            return float(str(value))  # `float(value)` raises where the value overflows
        if type(value) is not self.kind and not (self.kind is Path and isinstance(value, Path)):
            raise InputError(f"{called} is {value!r}, but must be {_TYPE_NAMES[self.kind]}")
        return value


_TYPE_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a string",
               Path: "a path"}  # fmt: skip


def leaves(tree: Any, sections: tuple[str, ...] = ()) -> Iterator[Leaf]:
    """Iterate over all settings of a tree. A section's own settings come before its subsections."""
    hints = typing.get_type_hints(type(tree))
    subsections: list[tuple[str, Any]] = []
    for field in dataclasses.fields(tree):
        value = getattr(tree, field.name)
        if dataclasses.is_dataclass(value):
            subsections.append((field.name, value))
            continue
        hint = hints[field.name]
        args, is_tuple = typing.get_args(hint), typing.get_origin(hint) is tuple
        kinds = [k for k in args if k is not types.NoneType] or [hint]
        kind, about = tuple if is_tuple else kinds[0], field.metadata["about"]
        yield Leaf(field.name, sections, kind, kinds[0], types.NoneType in args, about, value)
    for name, value in subsections:
        yield from leaves(value, (*sections, name))


def replaced(tree: Tree, values: Mapping[str, Any], by_flag: bool = False) -> Tree:
    """Return the tree with new values for some settings.

    Args:
      tree: the settings.
      values: new values by the setting's name.
      by_flag: name settings by their flags in error messages.

    Raises:
      InputError: an unknown name, or a value that is not allowed.
    """
    known = {leaf.name: leaf for leaf in leaves(tree)}
    for name in values.keys() - known.keys():
        raise InputError(f"this kind of model has no setting {name}{nearest(name, known)}")
    checked = {
        name: known[name].checked(value, known[name].flag if by_flag else name)
        for name, value in values.items()
    }
    return _replaced(tree, checked)


def _replaced(tree: Any, values: Mapping[str, Any]) -> Any:
    """Return the tree with new values, which are already checked."""
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
    """Parse a TOML document. `where` is its name in an error message."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{where} is not valid TOML: {error}") from None


def from_toml(tree: Tree, data: Mapping[str, Any], where: str) -> Tree:
    """Return the tree with the values of a TOML document.

    Args:
      tree: the settings.
      data: the parsed document.
      where: its name in messages, such as "run.toml".

    Raises:
      InputError: an unknown name, or a value that is not allowed.
    """
    known = {(*leaf.sections, leaf.name): leaf for leaf in leaves(tree)}
    sections = {path[:n] for path in known for n in range(1, len(path))}
    values: dict[str, Any] = {}

    def read(table: Mapping[str, Any], outer: tuple[str, ...]) -> None:
        for name, value in table.items():
            path = (*outer, name)
            if path in sections and isinstance(value, Mapping):
                read(value, path)
            elif path in known:
                values[name] = known[path].checked(value, f"{name} in {where}")
            else:
                names = [".".join(p) for p in (*known, *sections)]
                same_name = [".".join(p) for p in known if p[-1] == name]
                near = (
                    f": did you mean {same_name[0]}?"
                    if same_name
                    else nearest(".".join(path), names)
                )
                raise InputError(f"{where} has {'.'.join(path)}, which is not a setting{near}")

    read(data, ())
    return _replaced(tree, values)


def to_toml(tree: Any) -> str:
    """Return the whole tree as TOML text. Settings that are None are left out."""
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
    """Return a value as TOML text."""
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
    """Return ": did you mean ...?" for the most similar name, or "" below the similarity cutoff."""
    found = difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    return f": did you mean {found[0]}?" if found else ""
