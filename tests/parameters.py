"""Parameters of tests, some of which run only in `make slow`."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow(names: Iterable[Any], *which: Any) -> list[Any]:
    """Return the names, with those in `which` marked as slow."""
    names = tuple(names)
    assert set(which) <= set(names)
    return [pytest.param(n, marks=pytest.mark.slow) if n in which else n for n in names]
