"""Import of optional packages when they are needed."""

from __future__ import annotations

import importlib
from typing import Any

from models.errors import InputError


def optional_module(module: str, by: str, extra: str = "data") -> Any:
    """Import a module of an optional package.

    Args:
      module: the name of the module.
      by: what needs the module, for the error message.
      extra: the extra of `jax-xform` that installs the package.

    Raises:
      InputError: the package is not installed. The message has the command that installs it.
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
