"""The arguments of a function with another batch: which of them have one, and on which axis."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from xform.callables import argument_names
from xform.errors import BudgetInfeasible, WrongArgument
from xform.memory.lowering import is_jitted, jitted
from xform.modules import compilable, holding

Argnums = int | Sequence[int] | str | None


@dataclasses.dataclass(frozen=True)
class Resizer:
    """Makes arguments of any batch.

    Attributes:
      start: the batch that they have.
      of: what of them is the batch, in words.
      at: from a size to the arguments.
    """

    start: int
    of: str
    at: Callable[[int], Sequence[Any]]


def by_inputs(inputs: Callable[..., Sequence[Any]]) -> Resizer:
    """Arguments that `inputs(batch=n)` makes."""
    if not callable(inputs):  # pyright: ignore[reportUnnecessaryComparison]
        raise WrongArgument(f"max_batch with inputs={inputs!r}", "it is not callable", "",
                            "give a function of batch= that returns the arguments")  # fmt: skip
    return Resizer(1, "by inputs(batch=n)", lambda n: inputs(batch=n))


def by_axis(f: Callable[..., Any], args: Sequence[Any], argnums: Argnums, axis: int) -> Resizer:
    """Arguments with another size on one axis: of those at `argnums`, or of those that are found.

    Found ("auto") are all that are as long on that axis as the last argument that has arrays, if
    the function can be traced so with twice the batch; else that argument alone.
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
            with contextlib.suppress(BudgetInfeasible):  # its loss was traced before it was planned
                _trace(f, resizer.at(2 * start))
        except Exception as problem:  # of the function: it does not take this batch
            error = problem
        else:
            return resizer
    message = str(error).strip().splitlines()[0]
    raise WrongArgument(
        f"max_batch of {getattr(f, '__name__', 'a function')}",
        f"which arguments have a batch is not found: with {2 * start} in the place of {start} on "
        f"axis {axis} of {_resizer(f, args, alike, axis, start).of.partition(' of ')[2]}, "
        f"{type(error).__name__}: {message}",
        "",
        "name them: batch_argnums=(1, 2), on the command line --batch-argnums 1,2, and batch_axis, "
        "--batch-axis; or give a function inputs(batch=) that makes the arguments",
    )


def _resizer(f: Callable[..., Any], args: Sequence[Any], places: set[int], axis: int, start: int
             ) -> Resizer:  # fmt: skip
    names = argument_names(f, len(args))
    at = lambda n: [_resized(x, axis, n) if i in places else x for i, x in enumerate(args)]
    return Resizer(start, f"axis {axis} of {', '.join(names[i] for i in sorted(places))}", at)


def _trace(f: Any, args: Sequence[Any]) -> None:
    """Trace a function, or raise what it raises."""
    if is_jitted(f):
        f.trace(*args)
        return
    held, positional, named = holding(*compilable(f, args, {}))
    jitted(held).trace(*positional, **named)


def _places(count: int, batch_argnums: Argnums) -> set[int]:
    """Which of that many arguments have a batch."""
    if batch_argnums is None:
        return set(range(count))
    positions: Any = batch_argnums
    ones: tuple[Any, ...] = tuple(positions) if isinstance(positions, Iterable) else (positions,)
    if any(not isinstance(i, int | np.integer) or not -count <= i < count for i in ones):
        raise WrongArgument(
            f"max_batch with batch_argnums={batch_argnums!r}",
            f"the function is given {count} positional arguments",
            "",
            "give positions of the arguments that have a batch, or None for all of them",
        )
    return {i % count for i in ones}


def _arrays(tree: Any) -> list[Any]:
    """The leaves that have a shape."""
    return [x for x in jax.tree.leaves(tree) if hasattr(x, "shape") and hasattr(x, "dtype")]


def _sizes(trees: Sequence[Any], axis: int) -> set[int] | None:
    """The sizes of arrays on an axis; None if one of them has no such axis."""
    shapes = [np.shape(x) for x in jax.tree.leaves(list(trees))]
    if any(not -len(shape) <= axis < len(shape) for shape in shapes):
        return None
    return {shape[axis] for shape in shapes}


def _batch(args: Sequence[Any], places: set[int], axis: int) -> int:
    """The size of the batch in some arguments."""
    number: Any = axis
    if not isinstance(number, int | np.integer):
        raise WrongArgument(f"max_batch with batch_axis={axis!r}", "it is no axis", "",
                            "give the axis of the batch, such as 0")  # fmt: skip
    sizes = _sizes([args[i] for i in places], axis)
    if sizes is None or len(sizes) != 1:
        raise WrongArgument(
            f"max_batch with batch_axis={axis}, batch_argnums={sorted(places)}",
            f"the leaves of those arguments have {', '.join(map(str, sorted(sizes or ())))} "
            "there, not one size" if sizes else
            "the leaves of those arguments have no size there, not one size",
            "",
            "name the arguments that have a batch, all on the same axis, by batch_argnums and "
            "batch_axis (--batch-argnums, --batch-axis)",
        )  # fmt: skip
    return sizes.pop()


def _resized(tree: Any, axis: int, size: int) -> Any:
    """Types of arrays with another batch."""

    def leaf(x: Any) -> jax.ShapeDtypeStruct:
        shape = list(x.shape)
        shape[axis] = size
        return jax.ShapeDtypeStruct(tuple(shape), x.dtype, sharding=getattr(x, "sharding", None))

    return jax.tree.map(leaf, tree)
