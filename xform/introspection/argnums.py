"""Positions of a function's arguments, such as `argnums`, as users write them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from xform.errors import WrongArgument


def numbers(value: Any, caller: str, name: str) -> tuple[int, ...]:
    """Return `value`, one position or a sequence of positions, as a tuple.

    Raise WrongArgument if it is neither; `caller` and `name` name the transform and its argument.
    """
    try:
        several = (value,) if isinstance(value, int | np.integer) else tuple(value)
        return tuple(map(operator.index, several))
    except TypeError:
        raise WrongArgument(
            f"{caller} with {name}={value!r}",
            "it is neither a position nor a sequence of positions",
            "",
            f"give positions of arguments, such as {name}=0 or {name}=(0, 2)",
        ) from None


def positions(argnums: int | Sequence[int], n: int, caller: str) -> tuple[int, ...]:
    """Return `argnums` as a tuple of non-negative positions, for a call with `n` arguments.

    Raise WrongArgument if a position is out of range or occurs twice.
    """
    several = numbers(argnums, caller, "argnums")
    for i in several:
        if not -n <= i < n:
            raise WrongArgument(
                f"{caller} with argnums={argnums}",
                f"the function was called with {n} positional argument{'s' * (n != 1)}",
                "",
                "pass the arguments to differentiate by position; keywords are held constant",
            )
    at = tuple(int(i) % n for i in several)
    distinct(at, caller, argnums)
    return at


def nonempty_positions(argnums: int | Sequence[int], n: int, caller: str) -> tuple[int, ...]:
    """Return `argnums` as a tuple of positions; raise WrongArgument if it names no argument.

    The call has `n` arguments, and `caller` is the transform, for messages.
    """
    if given := positions(argnums, n, caller):
        return given
    raise WrongArgument(
        f"{caller} with argnums={argnums!r}",
        "it names no argument",
        "",
        "give at least one position",
    )


def distinct(at: Sequence[int], caller: str, argnums: Any) -> None:
    """Raise WrongArgument if a position occurs twice in `at`, which came from `argnums`."""
    if len(set(at)) < len(at):
        raise WrongArgument(
            f"{caller} with argnums={argnums}",
            "it names one argument twice",
            "",
            "name each argument once",
        )
