"""What a computational graph is made of: values, operations, and the edges between them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from xform.adjoints.colour import Colour
from xform.arithmetic import Value as Array

Pull = Callable[[Sequence[Array]], Sequence[Array]]


def measure(x: Array) -> dict[str, Any]:
    """A value as JSON takes it: its shape, and its number, or the norm of an array.

    What JSON has no number for is text: "nan", "inf", complex numbers.
    """
    if not isinstance(x.dtype, np.dtype):
        return {"shape": list(x.shape), "value": str(x.dtype)}
    wide = np.asarray(x)
    if wide.ndim == 0:
        return {"shape": [], "value": plain(wide[()])}
    return {"shape": list(wide.shape), "norm": plain(norm(wide))}


def norm(x: Array) -> float:
    """The square root of the sum of the squares, in 64 bits."""
    wide = np.asarray(x)
    kind = np.complex128 if np.iscomplexobj(wide) else np.float64
    return float(np.linalg.norm(wide.astype(kind).ravel()))


def plain(x: Any) -> Any:
    """A number as one of Python's, or as text where JSON has none like it."""
    if np.iscomplexobj(x):
        return str(complex(x))
    if x.dtype == np.bool_ if isinstance(x, np.generic) else isinstance(x, bool):
        return bool(x)
    whole = jax.numpy.issubdtype(getattr(x, "dtype", type(x)), np.integer)
    number = int(x) if whole else float(x)
    return number if math.isfinite(number) else str(number)


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    """A value of the graph, and what the output changes by with it.

    Attributes:
      id: its place in `Graph.values`.
      name: a letter, or the text of a literal.
      label: the argument that it is, or the name that `xform.name` gave it; may be empty.
      array: the value itself.
      colour: "active", "stopped" or "constant".
      operation: the place of what makes it in `Graph.operations`; -1 for a literal.
      adjoint: the gradient of the output in it; None where no path of derivatives leads from it.
    """

    id: int
    name: str
    label: str
    array: Array
    colour: Colour
    operation: int
    adjoint: Array | None = None

    @property
    def type(self) -> str:
        """Its dtype and shape, in short."""
        return jax.typeof(self.array).str_short(True)


@dataclasses.dataclass(frozen=True, eq=False)
class Operation:
    """What makes values of others.

    Attributes:
      id: its place in `Graph.operations`; they are in the order in which they run.
      text: what is applied; "input" or "constant" for what the function is given.
      inputs, outputs: places in `Graph.values`.
      scope: the calls, trips of loops and named scopes that it is in, the outermost first.
      where: the user's line.
      closed: how many equations the programs hold that are in it, and were not opened.
      pull: of cotangents of the active outputs, those of the active inputs; None where no
        derivative passes.
    """

    id: int
    text: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    scope: tuple[str, ...] = ()
    where: str = ""
    closed: int = 0
    pull: Pull | None = None


@dataclasses.dataclass(frozen=True)
class Partial:
    """A local derivative: of one operation's outputs in one of its inputs, all else held.

    Attributes:
      shape: that of the outputs, then that of the input.
      value: the number, if that is all it is.
      norm: the square root of the sum of its squares; None where numbers are complex.
      exact: whether `norm` is, or estimated by random cotangents.
    """

    shape: tuple[int, ...]
    value: float | None
    norm: float | None
    exact: bool = True

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it."""
        if self.value is not None:
            return {"shape": [], "value": plain(self.value)}
        size = None if self.norm is None else plain(self.norm)
        return {"shape": list(self.shape), "norm": size, "exact": self.exact}


@dataclasses.dataclass(frozen=True, eq=False)
class Edge:
    """That an operation reads a value.

    Attributes:
      id: its place in `Graph.edges`.
      source: the value.
      target: the operation.
      operand: as which of its inputs.
      partial: the local derivative; None where none passes.
      flow: what the value's adjoint gets along this edge; None where nothing flows.
    """

    id: int
    source: int
    target: int
    operand: int
    partial: Partial | None = None
    flow: Array | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """One edge taken on the way back.

    Attributes:
      edge: which.
      total: the adjoint of the edge's source, as far as it is added up then.
    """

    edge: int
    total: Array
