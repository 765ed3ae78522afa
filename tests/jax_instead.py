"""A pytest plugin that replaces xform's transforms by JAX's: `-p tests.jax_instead`.

If a test fails with it under a flag, and passes with it without the flag, JAX is the cause.
"""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.hookimpl
def pytest_collection_finish() -> None:
    # Imported late: conftest.py chooses the devices before JAX is imported.
    import xform
    from xform import everywhere

    for name, transform in everywhere.THEIRS.items():
        setattr(xform, name, without_policy(transform))


def without_policy(transform: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that accepts xform's arguments: JAX has no policy for a whole function."""

    def instead(*args: Any, **kwargs: Any) -> Any:
        if transform.__name__ not in ("checkpoint", "remat"):
            kwargs.pop("policy", None)
        return transform(*args, **kwargs)

    return instead
