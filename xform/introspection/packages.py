"""Installed packages: their versions, the name of xform for pip, and its extras.

An extra is a named set of optional dependencies, as in `pip install 'jax-xform[plot]'`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
from collections.abc import Generator

from xform.errors import MissingExtra

# On PyPI the name `xform` belongs to another project.
DISTRIBUTION = "jax-xform"


@functools.lru_cache(maxsize=32)
def version(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def own_version() -> str:
    """Return the version of xform; `0+unknown` if it runs from sources that are not installed."""
    return version(DISTRIBUTION) or "0+unknown"


def pip_argument(name: str) -> str:
    """Return the argument of `pip install` for xform with an extra, quoted for a shell."""
    return f"'{DISTRIBUTION}[{name}]'"


@contextlib.contextmanager
def require_package(package: str, name: str, by: str, brings: str) -> Generator[None]:
    """Return a context for the import of an optional package.

    It raises `MissingExtra` if the package is not installed.

    Args:
      package: the name under which Python imports it.
      name: its display name.
      by: what needs it, such as "xform.flax", for the error message.
      brings: the extra of xform that installs it.
    """
    try:
        yield
    except ModuleNotFoundError as missing:
        if missing.name != package:
            raise
        remedy = f"pip install {pip_argument(brings)}"
        raise MissingExtra(by, f"{name} is not installed", "", remedy) from None
