"""The parts of a computational graph: values, operations, edges and updates of adjoints."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from xform.adjoints.activity import Activity
from xform.program.arithmetic import Value as Array
from xform.storage.results import NOT_STORED

# A pullback: maps cotangents of an operation's outputs to cotangents of its inputs.
Pull = Callable[[Sequence[Array]], Sequence[Array]]


def array_data(x: Array) -> dict[str, Any]:
    """Return a value as plain data for JSON: its shape, and its number, or the norm of an array.

    Numbers that JSON cannot hold become text: "nan", "inf", complex numbers. For an extended dtype,
    such as that of a random key, the value is the name of the dtype.
    """
    if not isinstance(x.dtype, np.dtype):
        return {"shape": list(x.shape), "value": str(x.dtype)}
    array = np.asarray(x)
    if array.ndim == 0:
        return {"shape": [], "value": json_number(array[()])}
    return {"shape": list(array.shape), "norm": json_number(norm(array))}


def norm(x: Array) -> float:
    """Return the square root of the sum of the squares of all elements, computed in float64."""
    array = np.asarray(x)
    dtype = np.complex128 if np.iscomplexobj(array) else np.float64
    return float(np.linalg.norm(array.astype(dtype).ravel()))


def json_number(x: Any) -> Any:
    """Return a number as a Python number, or as text if JSON cannot hold it."""
    if np.iscomplexobj(x):
        return str(complex(x))
    is_bool = x.dtype == np.bool_ if isinstance(x, np.generic) else isinstance(x, bool)
    if is_bool:
        return bool(x)
    is_integer = jax.numpy.issubdtype(getattr(x, "dtype", type(x)), np.integer)
    number = int(x) if is_integer else float(x)
    return number if math.isfinite(number) else str(number)


@dataclasses.dataclass(frozen=True, eq=False)
class GraphValue:
    """A value of the graph, with its adjoint.

    Attributes:
      id: index in `ComputationalGraph.values`.
      name: a letter, or the text of a literal.
      label: name of the argument, or the name given by `xform.adjoints.name`; may be empty.
      array: the value itself.
      activity: "active", "stopped" or "constant".
      operation: index in `ComputationalGraph.operations` of the operation that computes it; -1
        for a literal.
      adjoint: gradient of the output with respect to this value; None if no path of derivatives
        leads from it to the output.
    """

    id: int
    name: str
    label: str
    array: Array
    activity: Activity
    operation: int
    adjoint: Array | None = None

    @property
    def type(self) -> str:
        """Dtype and shape, in short: `f32[3,4]`."""
        return jax.typeof(self.array).str_short(True)


@dataclasses.dataclass(frozen=True, eq=False)
class GraphOperation:
    """An operation of the graph.

    Attributes:
      id: index in `ComputationalGraph.operations`, which are in execution order.
      text: name and parameters of the primitive; "input" or "constant" for a given value.
      inputs, outputs: indices in `ComputationalGraph.values`.
      scope: the calls, loop iterations and named scopes around it, outermost first.
      where: the line of the user's code.
      closed: for a call, loop or branch kept as one operation, the number of equations in one run
        of each program inside it; else 0.
      pull: pullback from cotangents of the active outputs to cotangents of the active inputs; None
        if no derivative passes, or if the graph was read from a file.
    """

    id: int
    text: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    scope: tuple[str, ...] = ()
    where: str = ""
    closed: int = 0
    pull: Pull | None = dataclasses.field(default=None, metadata=NOT_STORED)


@dataclasses.dataclass(frozen=True)
class Partial:
    """A local derivative: of an operation's outputs with respect to one of its inputs.

    Attributes:
      shape: the shape of the outputs, followed by the shape of the input.
      value: the derivative, if it is a single number.
      norm: the square root of the sum of its squared entries; None for complex values.
      exact: whether `norm` is exact; otherwise it is estimated from random cotangents.
    """

    shape: tuple[int, ...]
    value: float | None
    norm: float | None
    exact: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Return the local derivative as plain data for JSON."""
        if self.value is not None:
            return {"shape": [], "value": json_number(self.value)}
        size = None if self.norm is None else json_number(self.norm)
        return {"shape": list(self.shape), "norm": size, "exact": self.exact}


@dataclasses.dataclass(frozen=True, eq=False)
class Edge:
    """An edge from a value to an operation that reads it.

    Attributes:
      id: index in `ComputationalGraph.edges`.
      source: index of the value.
      target: index of the operation.
      operand: position of the value among the operation's inputs.
      partial: the local derivative; None if no derivative passes.
      flow: contribution of this edge to the adjoint of the value: the local derivative times the
        adjoint of the operation's result. None if there is no contribution.
    """

    id: int
    source: int
    target: int
    operand: int
    partial: Partial | None = None
    flow: Array | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class AdjointUpdate:
    """One step of the backward pass: the contribution of an edge is added to an adjoint.

    Attributes:
      edge: index of the edge.
      total: adjoint of the edge's source value after the addition.
    """

    edge: int
    total: Array
