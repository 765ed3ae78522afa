"""The modules that Python has loaded, and the names that each one holds.

Anything may stand in `sys.modules`: None for a module that must not be imported, a module that
loads itself when it is first used, a C library that claims to be a module, any other object.
Nothing here runs the code of such an entry.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

Names = dict[str, Any] | types.MappingProxyType[str, Any]


def loaded() -> Iterator[tuple[str, dict[str, Any]]]:
    """Iterate over the entries of `sys.modules` that hold names: where each stands, its names."""
    entries: list[tuple[Any, Any]] = list(sys.modules.items())
    for name, module in entries:
        names = names_of(module)
        if isinstance(name, str) and isinstance(names, dict):
            yield name, names


def names_of(x: Any) -> Names:
    """The names that a module or a class holds; empty for what holds none.

    >>> names_of(None)
    {}
    """
    try:
        names = object.__getattribute__(x, "__dict__")
    except Exception:  # a class can define `__dict__` as it likes
        return {}
    return names if type(names) in (dict, types.MappingProxyType) else {}
