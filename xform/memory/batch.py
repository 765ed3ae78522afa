"""Resize the batch in a function's arguments: find which arguments have a batch, and its axis."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from xform.errors import BudgetInfeasible, WrongArgument
from xform.introspection.callables import argument_names
from xform.introspection.modules import arguments_for_jit, take_static_out
from xform.memory.lowering import ensure_jitted, is_jitted

Argnums = int | Sequence[int] | str | None


@dataclasses.dataclass(frozen=True)
class Resizer:
    """Makes arguments for any batch size.

    Attributes:
      start: the batch size of the given arguments.
      of: a description of the batch, such as "axis 0 of x".
      at: maps a batch size to the arguments.
    """

    start: int
    of: str
    at: Callable[[int], Sequence[Any]]


def by_inputs(inputs: Callable[..., Sequence[Any]]) -> Resizer:
    """A `Resizer` that calls `inputs(batch=n)` for the arguments."""
    if not callable(inputs):  # pyright: ignore[reportUnnecessaryComparison]
        raise WrongArgument(f"max_batch with inputs={inputs!r}", "it is not callable", "",
                            "give inputs(batch=), which returns the arguments")  # fmt: skip
    return Resizer(1, "by inputs(batch=n)", lambda n: inputs(batch=n))


def by_axis(f: Callable[..., Any], args: Sequence[Any], argnums: Argnums, axis: int) -> Resizer:
    """A `Resizer` that changes the size of one axis of the arguments at `argnums`.

    "auto" takes all arguments that have the same size on that axis as the last argument with
    arrays, if the function can be traced with twice that size. Otherwise it takes that last
    argument alone.
    """
    if isinstance(argnums, str) and argnums == "auto":
        return _by_trial(f, args, axis)
    places = _places(len(args), argnums)
    return _resizer(f, args, places, axis, _batch(args, places, axis))


def _by_trial(f: Callable[..., Any], args: Sequence[Any], axis: int) -> Resizer:
    last = max((i for i, x in enumerate(args) if _arrays(x)), default=len(args) - 1)
    start = _batch(args, _places(len(args), last), axis)
    alike = {i for i, x in enumerate(args) if _arrays(x) and _sizes([x], axis) == {start}}
    error: Exception | None = None
    for places in (alike, {last}):
        resizer = _resizer(f, args, places, axis, start)
        try:
            with contextlib.suppress(BudgetInfeasible):  # raised after the loss was traced
                _trace(f, resizer.at(2 * start))
        except Exception as problem:  # whatever the function raises for this batch
            error = problem
        else:
            return resizer
    message = str(error).strip().splitlines()[0]
    raise WrongArgument(
        f"max_batch of {getattr(f, '__name__', 'a function')}",
        f"cannot tell which arguments have a batch: with size {2 * start} instead of {start} on "
        f"axis {axis} of {_resizer(f, args, alike, axis, start).of.partition(' of ')[2]}, "
        f"tracing raised {type(error).__name__}: {message}",
        "",
        "name them with batch_argnums and batch_axis, such as batch_argnums=(1, 2), on the command "
        "line --batch-argnums 1,2 and --batch-axis; or give a function inputs(batch=) that makes "
        "the arguments",
    )


def _resizer(f: Callable[..., Any], args: Sequence[Any], places: set[int], axis: int, start: int
             ) -> Resizer:  # fmt: skip
    names = argument_names(f, len(args))
    at = lambda n: [_resized(x, axis, n) if i in places else x for i, x in enumerate(args)]
    return Resizer(start, f"axis {axis} of {', '.join(names[i] for i in sorted(places))}", at)


def _trace(f: Any, args: Sequence[Any]) -> None:
    """Trace a function; an error of the function passes through."""
    if is_jitted(f):
        f.trace(*args)
        return
    held, positional, named = take_static_out(*arguments_for_jit(f, args, {}))
    ensure_jitted(held).trace(*positional, **named)


def _places(count: int, batch_argnums: Argnums) -> set[int]:
    """The positions of the arguments that have a batch, among `count` arguments."""
    if batch_argnums is None:
        return set(range(count))
    positions: Any = batch_argnums
    ones: tuple[Any, ...] = tuple(positions) if isinstance(positions, Iterable) else (positions,)
    if any(not isinstance(i, int | np.integer) or not -count <= i < count for i in ones):
        raise WrongArgument(
            f"max_batch with batch_argnums={batch_argnums!r}",
            f"the function is given {count} positional arguments",
            "",
            "give the positions of the arguments that have a batch, or None for all of them",
        )
    return {i % count for i in ones}


def _arrays(tree: Any) -> list[Any]:
    """The leaves that are arrays or types of arrays."""
    return [x for x in jax.tree.leaves(tree) if hasattr(x, "shape") and hasattr(x, "dtype")]


def _sizes(trees: Sequence[Any], axis: int) -> set[int] | None:
    """The sizes of the arrays on an axis; None if one of them has no such axis."""
    shapes = [np.shape(x) for x in jax.tree.leaves(list(trees))]
    if any(not -len(shape) <= axis < len(shape) for shape in shapes):
        return None
    return {shape[axis] for shape in shapes}


def _batch(args: Sequence[Any], places: set[int], axis: int) -> int:
    """The batch size of the arguments at `places`."""
    number: Any = axis
    if not isinstance(number, int | np.integer):
        raise WrongArgument(f"max_batch with batch_axis={axis!r}", "it is not an integer", "",
                            "give the axis of the batch, such as 0")  # fmt: skip
    sizes = _sizes([args[i] for i in places], axis)
    if sizes is None or len(sizes) != 1:
        raise WrongArgument(
            f"max_batch with batch_axis={axis}, batch_argnums={sorted(places)}",
            f"the arrays in these arguments have different sizes on that axis: "
            f"{', '.join(map(str, sorted(sizes or ())))}" if sizes else
            "an array in these arguments has no such axis, or there are no arrays",
            "",
            "name the arguments that have a batch, all on the same axis, with batch_argnums and "
            "batch_axis (--batch-argnums, --batch-axis)",
        )  # fmt: skip
    return sizes.pop()


def _resized(tree: Any, axis: int, size: int) -> Any:
    """The types of a tree's arrays, with another size on the batch axis."""

    def leaf(x: Any) -> jax.ShapeDtypeStruct:
        shape = list(x.shape)
        shape[axis] = size
        return jax.ShapeDtypeStruct(tuple(shape), x.dtype, sharding=getattr(x, "sharding", None))

    return jax.tree.map(leaf, tree)
