"""Parameters of tests, of which some are left to `make slow`."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow(names: Iterable[Any], *which: Any) -> list[Any]:
    """The names, those in `which` marked as slow."""
    names = tuple(names)
    assert set(which) <= set(names)
    return [pytest.param(n, marks=pytest.mark.slow) if n in which else n for n in names]
