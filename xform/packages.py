"""What pip knows: xform as a distribution, and the versions of what is installed."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
from collections.abc import Generator

from xform.errors import MissingExtra

# The package index has another project of the name `xform`.
DISTRIBUTION = "jax-xform"


@functools.lru_cache(maxsize=32)
def version(package: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def own_version() -> str:
    """The version of xform; of sources that nobody installed only the form of one."""
    return version(DISTRIBUTION) or "0+unknown"


def extra(name: str) -> str:
    """What to give to `pip install` for xform with one of its extras, quoted for a shell."""
    return f"'{DISTRIBUTION}[{name}]'"


@contextlib.contextmanager
def required(package: str, name: str, by: str, brings: str) -> Generator[None]:
    """Context in which a module imports what it needs and an extra of xform brings."""
    try:
        yield
    except ModuleNotFoundError as missing:
        if missing.name != package:
            raise
        remedy = f"pip install {extra(brings)}"
        raise MissingExtra(by, f"{name} is not installed", "", remedy) from None
