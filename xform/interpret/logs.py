"""Logs of users' backward functions.

Since JAX 0.11 the backward function of a `custom_vjp` may return a log with the cotangents: a dict
of pytrees. `pull.with_logs(ct)` returns the cotangents, and the entries of all logs of that pass.

If a program is traced once and run later, as under `jit`, the trace has no value for an entry. Then
only its key is recorded, with a description of the place, and a user who asks for the logs gets an
error.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Generator, Mapping
from typing import Any

from xform.errors import NotDifferentiable, WrongCotangent

_NOW: contextvars.ContextVar[Logs | None] = contextvars.ContextVar("xform_logs", default=None)


class Logs:
    """The log entries of one backward pass.

    Attributes:
      entries: the entries, by key.
      without: the keys that are logged without a value, with a text that describes the place.
    """

    def __init__(self) -> None:
        self.entries: dict[Any, Any] = {}
        self.without: dict[Any, str] = {}

    def places(self, place: str) -> dict[Any, str]:
        """Return a place for each key: `place`, or for a key without a value its recorded place."""
        return {key: self.without.get(key, place) for key in (*self.entries, *self.without)}

    def checked(self, name: str) -> dict[Any, Any]:
        """Return the entries; raise NotDifferentiable if one has no value."""
        for key, place in self.without.items():
            raise NotDifferentiable(
                f"with_logs of the pullback of {name}",
                f"the entry {key!r} is logged inside {place}, from which xform returns no logs",
                "",
                "log outside of it, or call the pullback without with_logs",
            )
        return self.entries


@contextlib.contextmanager
def collect_logs() -> Generator[Logs]:
    """Collect the log entries of the backward functions that run in this context."""
    logs = Logs()
    token = _NOW.set(logs)
    try:
        yield logs
    finally:
        _NOW.reset(token)


def log(entries: Any, operation: str, where: str) -> None:
    """Add the log of a backward function, a dict or None, to the logs that are being collected.

    `operation` and `where` are the custom function's name and source line, for messages.

    Raises:
      WrongCotangent: the log is something else, or a key was logged before in this pass.
    """
    if entries is None:
        return
    if type(entries) is not dict:
        raise WrongCotangent(
            f"pullback of {operation}",
            f"its backward function logs a {type(entries).__name__}; a backward-pass log is None "
            "or a dict",
            where,
            "return a dict of trees, or None",
        )
    if (logs := _NOW.get()) is not None:
        _check_new(logs, entries, operation, where)
        logs.entries.update(entries)


def log_without(places: Mapping[Any, str], operation: str, where: str) -> None:
    """Record keys that a program logs without a value, with a text for each that says where.

    `operation` and `where` are the name and the source line of the equation with that program.

    Raises:
      WrongCotangent: a key was logged before in this pass.
    """
    if (logs := _NOW.get()) is not None:
        _check_new(logs, places, operation, where)
        logs.without.update(places)


def _check_new(logs: Logs, keys: Mapping[Any, Any], operation: str, where: str) -> None:
    """Raise WrongCotangent if one of `keys` has been logged before."""
    for key in keys:
        if key in logs.entries or key in logs.without:
            raise WrongCotangent(
                f"pullback of {operation}",
                f"Duplicate backward-pass log key {key!r}: it is logged twice in one pass",
                where,
                "give each entry a key of its own",
            )
