"""Stable names for Python objects.

`xform.program.fingerprint` writes a program as a text, and needs a name for each class, function
and primitive in it. If the object is an attribute of a module, its name consists of the names of
the module and of the attribute. That name is the same in every process. Any other object gets a
unique name with a random number for the process, which no later process can find again.
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

from xform._jax import Primitive, primitive_named
from xform.introspection.loaded import loaded_modules, names_of

_LIBRARIES = ("builtins", "copyreg", "jax", "jaxlib", "numpy")

# By name: the first object that got the name.
_claims: dict[str, weakref.ref[Any]] = {}
_numbers = itertools.count()
_PROCESS = uuid.uuid4().hex[:12]
# By `id` of an object and the function that makes its text: a reference to the object, its text.
_texts: dict[tuple[int, Any], tuple[Callable[[], Any], str]] = {}


def primitive_name(primitive: Primitive) -> str:
    """Return the name of a primitive.

    If it is not JAX's, the module that holds it is added, or a unique name if no module holds it or
    an earlier primitive had that place.
    """
    return cached_text(primitive, _primitive_name)


def _primitive_name(primitive: Primitive) -> str:
    name = primitive.name
    if primitive_named(name) is primitive:
        return name
    places = sorted(
        f"{module}.{k}"
        for module, names in loaded_modules()
        for k, v in [*names.items()]
        if v is primitive
    )
    if not places or _claims.setdefault(places[0], weakref.ref(primitive))() is not primitive:
        return f"{name}@{unique_name(primitive)}"
    return f"{name}@{places[0]}"


def name_of(x: Any) -> str:
    """Return the name of a class, function or module; with a number if it is not importable."""
    if isinstance(x, types.ModuleType):
        return f"module {x.__name__}" if sys.modules.get(x.__name__) is x else unique_name(x)
    name = f"{x.__module__}.{x.__qualname__}"
    return _claim_name(name, x) if is_importable(x) else f"{name} {unique_name(x)}"


def is_importable(x: Any) -> bool:
    """Return whether an object can be imported by its module and qualified name."""
    found: Any = sys.modules.get(getattr(x, "__module__", None) or "")
    for part in getattr(x, "__qualname__", "").split("."):
        found = names_of(found).get(part)
    return found is not None and found is x


def from_library(x: Any) -> bool:
    """Return whether an object belongs to Python, NumPy or JAX: its name gets no other object."""
    return (x.__module__ or "").partition(".")[0] in _LIBRARIES


def _claim_name(name: str, x: Any) -> str:
    """Return `name` for the first object that has it. For a later object, add a number.

    A notebook cell that runs twice defines two objects of the same name.
    """
    if not from_library(x) and _claims.setdefault(name, weakref.ref(x))() is not x:
        return f"{name} {unique_name(x)}"
    return name


def unique_name(x: Any) -> str:
    """Return a name that no other object has, in any process."""
    return cached_text(x, _new_name, keep=True)


def _new_name(_: Any) -> str:
    return f"<{_PROCESS}:{next(_numbers)}>"


def cached_text(x: Any, make: Callable[[Any], str], keep: bool = False) -> str:
    """Return the text `make(x)` of an immutable object `x`, cached for each `make` while `x` lives.

    If `x` does not support weak references, the text is not cached, unless `keep` is True. Then `x`
    is never freed.
    """
    key = id(x), make
    known = _texts.get(key)
    if known is not None and known[0]() is x:
        return known[1]
    text = make(x)
    try:
        _texts[key] = weakref.ref(x, functools.partial(_forget, key)), text
    except TypeError:
        if keep:
            _texts[key] = (lambda: x), text
    return text


def _forget(key: tuple[int, Any], ref: Any) -> None:
    if key in _texts and _texts[key][0] is ref:
        del _texts[key]


def digest(parts: Iterable[str | bytes]) -> str:
    """Return a hash of a sequence of texts, 32 hexadecimal digits of SHA-256."""
    hasher = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        hasher.update(b"%d:" % len(data) + data)
    return hasher.hexdigest()[:32]
