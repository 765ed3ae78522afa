"""Unusual entries of `sys.modules`."""

import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Library:
    """A library opened by cffi: it claims to be a module and has no `__dict__`."""

    __slots__ = ()
    __class__ = types.ModuleType  # type: ignore[assignment]


class Refusing(types.ModuleType):
    """A module that fails for every name, even for names that each object has."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")


class Failing:
    """An object that fails for each name that it does not hold."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")


class Classless:
    """An object that fails to give its class to `isinstance`."""

    @property
    def __class__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("no class")


class Dictless:
    """An object that fails to give its `__dict__`."""

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("no dict")


class Misleading:
    """An object whose `__dict__` is not a dict."""

    __dict__ = 3  # type: ignore[assignment]


def _lazy(folder: Path) -> types.ModuleType:
    """A module that is loaded when a name of it is first read. Here that must not happen."""
    path = folder / "lazily.py"
    path.write_text("raise RuntimeError('it was loaded')")
    spec = importlib.util.spec_from_file_location("lazily", path)
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ODD: dict[str, Callable[[Path], Any]] = {
    "None": lambda _: None,
    "a C library": lambda _: Library(),
    "a module that refuses": lambda _: Refusing("refusing"),
    "an object that fails": lambda _: Failing(),
    "an object without a class": lambda _: Classless(),
    "an object without a dict": lambda _: Dictless(),
    "an object with another dict": lambda _: Misleading(),
    "a class": lambda _: Failing,
    "a number": lambda _: 3,
    "a lazy module": _lazy,
}


def put(name: str, folder: Path, patch: Any) -> Any:
    """Put one of them into `sys.modules`, as `odd`, during a test."""
    entry = ODD[name](folder)
    patch.setitem(sys.modules, "odd", entry)
    return entry
