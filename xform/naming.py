"""Names of what Python holds, and numbers for what has none.

A class, a function or a primitive is called by the place where a module holds it, the same in every
process. Whatever is not found at a place has a number, of this process alone.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import sys
import types
import uuid
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from xform._jax import Primitive, named
from xform.loaded import loaded, names_of

_LIBRARIES = ("builtins", "copyreg", "jax", "jaxlib", "numpy")


def primitive_name(primitive: Primitive) -> str:
    """A primitive: JAX's by its name, another by the module that holds it too."""
    return once(primitive, _place)


def _place(primitive: Primitive) -> str:
    name = primitive.name
    if named(name) is primitive:
        return name
    places = sorted(
        f"{module}.{k}" for module, names in loaded() for k, v in [*names.items()] if v is primitive
    )
    if not places or _claims.setdefault(places[0], weakref.ref(primitive))() is not primitive:
        return f"{name}@{itself(primitive)}"
    return f"{name}@{places[0]}"


def name_of(x: Any) -> str:
    """The name of a class, a module, or what a module holds; and a number, if it is not found."""
    if isinstance(x, types.ModuleType):
        return f"module {x.__name__}" if sys.modules.get(x.__name__) is x else itself(x)
    name = f"{x.__module__}.{x.__qualname__}"
    return _claimed(name, x) if is_importable(x) else f"{name} {itself(x)}"


def is_importable(x: Any) -> bool:
    """Whether a module holds something by its own name."""
    at: Any = sys.modules.get(getattr(x, "__module__", None) or "")
    for part in getattr(x, "__qualname__", "").split("."):
        at = names_of(at).get(part)
    return at is not None and at is x


def from_library(x: Any) -> bool:
    """Whether something is of Python, NumPy or JAX, in which no name is given twice."""
    return (x.__module__ or "").partition(".")[0] in _LIBRARIES


def _claimed(name: str, x: Any) -> str:
    """A name, which belongs to the first that had it: a cell of a notebook may be run again."""
    if not from_library(x) and _claims.setdefault(name, weakref.ref(x))() is not x:
        return f"{name} {itself(x)}"
    return name


def itself(x: Any) -> str:
    """What nothing else is called, in this process or another."""
    return once(x, lambda _: f"<{_PROCESS}:{next(_numbers)}>", keep=True)


_claims: dict[str, weakref.ref[Any]] = {}
_numbers = itertools.count()
_PROCESS = uuid.uuid4().hex[:12]
# Of objects, by `id`: the object, if it still lives, and its text.
_texts: dict[int, tuple[Callable[[], Any], str]] = {}


def once(x: Any, make: Callable[[Any], str], keep: bool = False) -> str:
    """The text of an immutable object, made once. What cannot be referred to weakly may be kept."""
    known = _texts.get(id(x))
    if known is not None and known[0]() is x:
        return known[1]
    text = make(x)
    try:
        _texts[id(x)] = weakref.ref(x, functools.partial(_forget, id(x))), text
    except TypeError:
        if keep:
            _texts[id(x)] = (lambda: x), text
    return text


def _forget(key: int, ref: Any) -> None:
    if key in _texts and _texts[key][0] is ref:
        del _texts[key]


def digest(parts: Iterable[str | bytes]) -> str:
    """A short text for long ones, one by one: other parts have another."""
    hasher = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        hasher.update(b"%d:" % len(data) + data)
    return hasher.hexdigest()[:32]
