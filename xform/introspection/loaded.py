"""The modules that Python has loaded, and the names that each one defines.

`sys.modules` may hold anything: None for a module that must not be imported, a lazy module, a C
library that claims to be a module, any other object. These functions never run code of an entry.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

# A namespace: the names that a module or class defines, and their values.
Names = dict[str, Any] | types.MappingProxyType[str, Any]


def loaded_modules() -> Iterator[tuple[str, dict[str, Any]]]:
    """Iterate over the loaded modules: pairs of a module's name and its namespace."""
    entries: list[tuple[Any, Any]] = list(sys.modules.items())
    for name, module in entries:
        names = names_of(module)
        if isinstance(name, str) and isinstance(names, dict):
            yield name, names


def names_of(x: Any) -> Names:
    """Return the namespace of a module or a class; empty for other objects.

    >>> names_of(None)
    {}
    """
    try:
        names = object.__getattribute__(x, "__dict__")
    except Exception:  # a class may define `__dict__` as a property that fails
        return {}
    return names if type(names) in (dict, types.MappingProxyType) else {}
