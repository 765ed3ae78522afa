"""Resize the batch in a function's arguments, for `max_batch`.

A batch is an axis of some of the arguments. These functions find out which arguments have it, and
make arguments with another batch size.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from xform.errors import BudgetInfeasible, WrongArgument
from xform.introspection.callables import argument_names
from xform.memory.lowering import jitted_with_arguments

Argnums = int | Sequence[int] | str | None


@dataclasses.dataclass(frozen=True)
class Resizer:
    """Makes arguments for any batch size.

    Attributes:
      start_size: the batch size of the given arguments.
      description: a description of the batch, such as "axis 0 of x".
      make_arguments: returns the arguments for a batch size.
    """

    start_size: int
    description: str
    make_arguments: Callable[[int], Sequence[Any]]


def resizer_by_inputs(inputs: Callable[..., Sequence[Any]]) -> Resizer:
    """Return a `Resizer` that calls `inputs(batch=n)` for the arguments."""
    if not callable(inputs):  # pyright: ignore[reportUnnecessaryComparison]
        raise WrongArgument(
            f"max_batch with inputs={inputs!r}",
            "it is not callable",
            "",
            "pass a function inputs(batch=n) that returns the arguments",
        )
    return Resizer(1, "by inputs(batch=n)", lambda n: inputs(batch=n))


def resizer_by_axis(
    f: Callable[..., Any], args: Sequence[Any], argnums: Argnums, axis: int
) -> Resizer:
    """Return a `Resizer` that changes the size of one axis of the arguments at `argnums`.

    "auto" takes the last argument with arrays, and every other argument that has the same size on
    that axis. If the function cannot be traced with twice that size in all of these, "auto" takes
    the last one alone.

    Raises:
      WrongArgument: the arguments have no such axis or different sizes on it, or "auto" finds no
        arguments that can be resized.
    """
    if isinstance(argnums, str) and argnums == "auto":
        return _resizer_by_trial(f, args, axis)
    positions = _positions(len(args), argnums)
    return _resizer(f, args, positions, axis, _batch_size(args, positions, axis))


def _resizer_by_trial(f: Callable[..., Any], args: Sequence[Any], axis: int) -> Resizer:
    """Return the `Resizer` for "auto": trace the function to find out which arguments to resize."""
    last = max((i for i, x in enumerate(args) if _arrays(x)), default=len(args) - 1)
    start = _batch_size(args, _positions(len(args), last), axis)
    equal_size = {i for i, x in enumerate(args) if _arrays(x) and _sizes([x], axis) == {start}}
    error: Exception | None = None
    for positions in (equal_size, {last}):
        resizer = _resizer(f, args, positions, axis, start)
        try:
            with contextlib.suppress(BudgetInfeasible):  # raised only after the function was traced
                _trace(f, resizer.make_arguments(2 * start))
        except Exception as problem:  # whatever the function raises for this batch
            error = problem
        else:
            return resizer
    message = str(error).strip().splitlines()[0]
    raise WrongArgument(
        f"max_batch of {getattr(f, '__name__', 'a function')}",
        f"cannot tell which arguments have a batch: with size {2 * start} instead of {start} on "
        f"axis {axis} of {_names(f, args, equal_size)}, "
        f"tracing raised {type(error).__name__}: {message}",
        "",
        "name them with batch_argnums and batch_axis, such as batch_argnums=(1, 2), on the command "
        "line --batch-argnums 1,2 and --batch-axis; or give a function inputs(batch=n) that makes "
        "the arguments",
    )


def _resizer(f: Callable[..., Any], args: Sequence[Any], positions: set[int], axis: int,
             start_size: int) -> Resizer:  # fmt: skip
    """Return a `Resizer` that changes an axis of the arguments at these positions."""
    make = lambda n: [_resized(x, axis, n) if i in positions else x for i, x in enumerate(args)]
    return Resizer(start_size, f"axis {axis} of {_names(f, args, positions)}", make)


def _names(f: Callable[..., Any], args: Sequence[Any], positions: set[int]) -> str:
    """Return the names of the arguments at these positions, as text."""
    names = argument_names(f, len(args))
    return ", ".join(names[i] for i in sorted(positions))


def _trace(f: Any, args: Sequence[Any]) -> None:
    """Trace a function; an error of the function passes through."""
    jitted, positional, named = jitted_with_arguments(f, args, {})
    jitted.trace(*positional, **named)


def _positions(count: int, batch_argnums: Argnums) -> set[int]:
    """Return the positions of the arguments that have a batch, among `count` arguments."""
    if batch_argnums is None:
        return set(range(count))
    given: Any = batch_argnums
    positions: tuple[Any, ...] = tuple(given) if isinstance(given, Iterable) else (given,)
    if any(not isinstance(i, int | np.integer) or not -count <= i < count for i in positions):
        raise WrongArgument(
            f"max_batch with batch_argnums={batch_argnums!r}",
            f"the function is given {count} positional arguments",
            "",
            "give the positions of the arguments that have a batch, or None for all of them",
        )
    return {i % count for i in positions}


def _arrays(tree: Any) -> list[Any]:
    """Return the leaves that are arrays or types of arrays."""
    return [x for x in jax.tree.leaves(tree) if hasattr(x, "shape") and hasattr(x, "dtype")]


def _sizes(trees: Sequence[Any], axis: int) -> set[int] | None:
    """Return the sizes of all arrays on an axis; None if one of them has no such axis."""
    shapes = [np.shape(x) for x in jax.tree.leaves(list(trees))]
    if any(not -len(shape) <= axis < len(shape) for shape in shapes):
        return None
    return {shape[axis] for shape in shapes}


def _batch_size(args: Sequence[Any], positions: set[int], axis: int) -> int:
    """Return the batch size of the arguments at these positions."""
    number: Any = axis
    if not isinstance(number, int | np.integer):
        raise WrongArgument(f"max_batch with batch_axis={axis!r}", "it is not an integer", "",
                            "give the axis of the batch, such as 0")  # fmt: skip
    sizes = _sizes([args[i] for i in positions], axis)
    if sizes is None or len(sizes) != 1:
        raise WrongArgument(
            f"max_batch with batch_axis={axis}, batch_argnums={sorted(positions)}",
            f"the arrays in these arguments have different sizes on that axis: "
            f"{', '.join(map(str, sorted(sizes or ())))}" if sizes else
            "an array in these arguments has no such axis, or there are no arrays",
            "",
            "name the arguments that have a batch, all on the same axis, with batch_argnums and "
            "batch_axis (--batch-argnums, --batch-axis)",
        )  # fmt: skip
    return sizes.pop()


def _resized(tree: Any, axis: int, size: int) -> Any:
    """Return the types of a tree's arrays, with another size on the batch axis."""

    def leaf(x: Any) -> jax.ShapeDtypeStruct:
        shape = list(x.shape)
        shape[axis] = size
        return jax.ShapeDtypeStruct(tuple(shape), x.dtype, sharding=getattr(x, "sharding", None))

    return jax.tree.map(leaf, tree)
