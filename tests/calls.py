"""Work without a clock: how many calls a function makes, the same on every machine."""

import sys
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def counted(f: Callable[[], T]) -> tuple[int, T]:
    """The calls of Python and C functions that `f()` makes in this thread, and its value."""
    calls = 0

    def count(frame: object, event: str, arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        value = f()
    finally:
        sys.setprofile(before)
    return calls, value
