"""Analyze a pullback before it is called.

JAX calls the backward function of a `custom_vjp` when the pullback is called. A plan is needed
earlier, when `vjp` is called, and has to know the operations of the backward function. So the
backward function is called ahead of time too. The plan is used only if the function does the same
when the pullback is called. If it fails ahead of time, zeros stand for its results: the pullback
may never be called.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Generator
from typing import Any

# None: a backward function runs for good. _AHEAD: it runs ahead of time. Any other object: it runs
# for good, and what an earlier analysis found is out of date.
_PASS: contextvars.ContextVar[Any] = contextvars.ContextVar("xform_pass", default=None)
_AHEAD = object()


@contextlib.contextmanager
def _analysis(kind: Any) -> Generator[None]:
    token = _PASS.set(kind)
    try:
        yield
    finally:
        _PASS.reset(token)


def ahead_of_time() -> contextlib.AbstractContextManager[None]:
    """Return a context in which backward functions run ahead of time."""
    return _analysis(_AHEAD)


def up_to_date() -> contextlib.AbstractContextManager[None]:
    """Return a context in which each program is analyzed again."""
    return _analysis(object())


def runs_ahead() -> bool:
    """Return whether backward functions run ahead of time."""
    return _PASS.get() is _AHEAD


def analysis_key() -> Any:
    """Return a key for results of an analysis. Results with another key are out of date."""
    return _PASS.get()
