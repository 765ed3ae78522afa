"""What the extras bring, imported when it is needed."""

from __future__ import annotations

import importlib
from typing import Any

from models.errors import InputError


def needed(module: str, by: str, extra: str = "data") -> Any:
    """A module of a package that may be missing.

    Args:
      module: its name.
      by: what needs it, in an error.
      extra: of this package, that brings it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:
            raise
        raise InputError(
            f'{by}: {package} is not installed, run: pip install "jax-xform[{extra}]"'
        ) from None
