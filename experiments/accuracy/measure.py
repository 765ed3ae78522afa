"""Worst errors of a function and of its derivatives, in units in the last place."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import xform
from experiments.accuracy.functions import Formula, Function
from experiments.accuracy.points import points
from experiments.accuracy.references import Exact, references

TRANSFORMS: dict[str, Any] = {"jax": jax, "xform": xform}
WAYS = {"eager": lambda f: f, "jit": jax.jit}
BAR = 8.0  # units in the last place; or twice the function's own error


@dataclasses.dataclass(frozen=True)
class Row:
    """A derivative in one type, with its worst errors outside and under `jit`.

    Attributes:
      function: the function's name.
      order: the arguments of the derivative.
      dtype: the type.
      points: the number of points where the derivative is a normal number.
      own: errors of the function itself.
      jax, xform: errors of its derivative.
      at: the point of xform's worst error.
    """

    function: str
    order: tuple[int, ...]
    dtype: str
    points: int
    own: tuple[float, ...]
    jax: tuple[float, ...]
    xform: tuple[float, ...]
    at: tuple[float, ...]

    @property
    def name(self) -> str:
        return self.function + "".join(f" d{'ab'[i]}" for i in self.order)

    @property
    def missed(self) -> bool:
        """Whether the error exceeds both 8 units and twice the function's own error."""
        return any(x > max(BAR, 2 * own) for x, own in zip(self.xform, self.own, strict=True))

    @property
    def worse(self) -> bool:
        """Whether JAX's derivative is more accurate by more than one unit."""
        return max(self.xform) > max(self.jax) + 1


def derivative(transform: Any, f: Formula, order: tuple[int, ...]) -> Formula:
    """Return the derivative of an elementwise function, as a function of arrays."""
    for i in order:
        f = transform.grad(lambda *x, f=f: jnp.sum(f(*x)), i)
    return f


def worst(f: Formula, xs: Any, exact: Exact, where: np.ndarray, dtype: str) -> tuple[float, int]:
    """Return the largest error at the chosen points, and the index of that point."""
    errors = np.where(where, exact.errors(np.asarray(f(*xs)), dtype), 0.0)
    return float(errors.max()), int(errors.argmax())


def rows(function: Function, dtype: str, count: int, folder: Path | None = None,
         ways: Sequence[str] = tuple(WAYS)) -> Iterator[Row]:  # fmt: skip
    """Return the rows of a function in one type."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        xs = points(function, dtype, count)
        true = references(function, dtype, xs, folder)
        value = true.pop(())
        own = tuple(worst(way(function.f), xs, value, value.normal(dtype), dtype)[0]
                    for way in map(WAYS.__getitem__, ways))  # fmt: skip
        for order, exact in true.items():
            normal = exact.normal(dtype)
            if not normal.any():
                continue
            found = {
                name: [worst(way(derivative(t, function.f, order)), xs, exact, normal, dtype)
                       for way in map(WAYS.__getitem__, ways)]
                for name, t in TRANSFORMS.items()
            }  # fmt: skip
            at = max(found["xform"])[1]
            yield Row(
                function.name, order, dtype, int(normal.sum()), own,
                *(tuple(error for error, _ in found[name]) for name in TRANSFORMS),
                tuple(float(x[at]) for x in xs),
            )  # fmt: skip
