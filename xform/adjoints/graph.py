"""`graph`: the computational graph of a scalar function at a point, with local derivatives."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.tree_util import keystr

from xform._jax import Tracer
from xform.adjoints.accumulate import pulled, pushed
from xform.adjoints.page import write
from xform.adjoints.parts import Edge, Operation, Step, Value, measure
from xform.adjoints.printed import dot, text
from xform.adjoints.walk import Recorder
from xform.arithmetic import differentiable
from xform.callables import argument_names, check_callable, function_name
from xform.errors import WrongArgument
from xform.ir import gather
from xform.modules import shaped
from xform.transforms.check import check_output, check_scalar
from xform.transforms.function import call, function, positions


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    """A computational graph: print it, or see `to_dict`, `to_dot` and `save_html`.

    Attributes:
      function: what it is of.
      values: in the order in which they are made.
      operations: what makes them, in the order in which it runs.
      edges: that an operation reads a value.
      output: the place of the output among the values.
      pushed: the way back, edge by edge, as each operation hands on what flows to its inputs.
      pulled: the same as each value collects what comes from its consumers.
    """

    function: str
    values: tuple[Value, ...]
    operations: tuple[Operation, ...]
    edges: tuple[Edge, ...]
    output: int
    pushed: tuple[Step, ...]
    pulled: tuple[Step, ...]

    def __getitem__(self, name: str) -> Value:
        """The value of this name: an argument, a name by `xform.name`, or a letter.

        Raises:
          WrongArgument: there is none; names like it are shown.
        """
        made = [v for v in self.values if v.operation >= 0]
        found = [v for v in made if v.label == name] or [v for v in made if v.name == name]
        if not found:
            names = [n for v in made for n in (v.label, v.name) if n]
            like = difflib.get_close_matches(str(name), names, 3, 0.4) or names[:3]
            raise WrongArgument(
                f"graph of {self.function}[{name!r}]",
                "no value has this name",
                "",
                f"print the graph for its names, such as {', '.join(map(repr, like))}",
            )
        return found[0]

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def text(self, rows: int | None = 200, lines: bool = False) -> str:
        """A line for each value: what makes it, the value, its adjoint, its local derivatives.

        Args:
          rows: how many values at most, the first and the last; None: all.
          lines: whether the user's line stands behind each.
        """
        return text(self.to_dict(), rows, lines)

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON takes it. Arrays are shapes and norms; "nan" and "inf" are text."""
        return {
            "function": self.function,
            "output": self.output,
            "values": [_value(v) for v in self.values],
            "operations": [_operation(op) for op in self.operations],
            "edges": [_edge(e) for e in self.edges],
            "pushed": [{"edge": s.edge, "total": measure(s.total)} for s in self.pushed],
            "pulled": [{"edge": s.edge, "total": measure(s.total)} for s in self.pulled],
        }

    def to_dot(self) -> str:
        """The graph in Graphviz's language: `dot -Tsvg`. Scopes are clusters."""
        return dot(self.to_dict())

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write one HTML page that draws the graph, and steps through it forward and backward.

        It needs no network. Of a large graph the picture shows what its scopes hold when they are
        opened, and the table all of it.
        """
        write(self.to_dict(), path)


def _value(v: Value) -> dict[str, Any]:
    return {
        "id": v.id,
        "name": v.name,
        "label": v.label,
        "type": v.type,
        "colour": v.colour,
        "operation": v.operation,
        **measure(v.array),
        "adjoint": None if v.adjoint is None else measure(v.adjoint),
    }


def _operation(op: Operation) -> dict[str, Any]:
    kept = ("id", "text", "where", "closed")
    lists = {k: list(getattr(op, k)) for k in ("inputs", "outputs", "scope")}
    return {k: getattr(op, k) for k in kept} | lists


def _edge(e: Edge) -> dict[str, Any]:
    return {
        "id": e.id,
        "source": e.source,
        "target": e.target,
        "operand": e.operand,
        "partial": None if e.partial is None else e.partial.to_dict(),
        "flow": None if e.flow is None else measure(e.flow),
    }


def graph(
    f: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] | None = None,
    expand: int | None = 64,
    **kwargs: Any,
) -> Graph:
    """The computational graph of a scalar function at a point.

    Each operation that the function runs is a vertex, with the value it makes. Each edge, from a
    value to an operation that reads it, bears the local derivative: a number, or the shape and norm
    of a block of the Jacobian. On the way back each value gets its adjoint, the gradient of the
    output in it: the sum over its out-edges of the local derivative times the consumer's adjoint.

    A value is "active" if a derivative in the arguments passes through it, "stopped" if it is
    computed from active ones but no derivative passes (`stop_gradient`, integers), and "constant"
    if it depends on no active argument.

    Args:
      f: pure function that returns a real scalar. It is traced, as under `jit`.
      *args: arrays and floats in pytrees; all else, Python's integers too, is held as it is.
      argnums: position or positions of the arguments that are active; None: all floats.
      expand: calls, loops and branches are opened that run at most so many equations, trips
        counted; others are one operation. None: all are opened.
      **kwargs: keyword arguments of `f`, held constant.

    Returns:
      A `Graph`: `graph["x"].adjoint`, `print(graph)`, `graph.to_dict()`, `graph.to_dot()`,
      `graph.save_html(path)`.

    Raises:
      NotScalar: `f` returned something other than a scalar.
      WrongDtype: the output is not real.
      WrongArgument: under `jit`, where there are no values.
      MissingRule: a primitive in `f` has no rule.

    Cost: operations run one by one, with a derivative each: some milliseconds for an operation. The
    norm of a local derivative of over 4,096 entries is estimated, from 8 random cotangents; the
    adjoints are not. All values are held.
    Source: Griewank and Walther, "Evaluating Derivatives", 2nd edition, sections 2.2, 3.2 and 9.2.

    >>> g = xform.graph(lambda x, y: jnp.sin(x) * y, 0.0, 3.0)
    >>> float(g["x"].adjoint)
    3.0
    >>> print(g)
    graph of <lambda>: 2 operations, 2 active inputs, output 0.0
    value       operation  is   adjoint  local derivatives  colour
    a:f32[]  x  input      0.0  3.0                         active
    b:f32[]  y  input      3.0  0.0                         active
    c:f32[]     sin a      0.0  3.0      ∂a 1.0             active
    d:f32[]     mul c b    0.0  1.0      ∂c 3.0, ∂b 0.0     active
    """
    check_callable(f, "graph")
    asked = f"graph of {function_name(f)}"
    paths, tree = jax.tree.flatten_with_path(args)
    traced = [shaped(x) or isinstance(x, float | complex) for _, x in paths]

    def run(*arrays: Any) -> Any:
        rest = iter(arrays)
        leaves = [next(rest) if t else x for (_, x), t in zip(paths, traced, strict=True)]
        return f(*tree.unflatten(leaves), **kwargs)

    bound = call(run, [x for _, x in gather(paths, traced)], asked)
    fun, flat = function(bound)
    if any(isinstance(x, Tracer) for x in flat):
        raise WrongArgument(
            asked,
            "its arguments, or what it closes over, are traced: there are no values yet",
            "",
            "call it outside jit, vmap and grad; of names inside a jitted function ask partials",
        )
    out = jax.tree.unflatten(fun.signature.out_tree, fun.signature.out_avals)
    check_scalar("graph", function_name(f), out)
    called = argument_names(f, len(args))
    at = range(len(args)) if argnums is None else positions(argnums, len(args), "graph")
    record = Recorder(expand)
    inputs = [record.given(x, "", "constant") for x in flat[: fun.n_consts]]
    for (path, _), x in zip(gather(paths, traced), flat[fun.n_consts :], strict=True):
        active = path[0].idx in at and differentiable(jax.typeof(x))
        label = called[path[0].idx] + keystr(path[1:])
        inputs.append(record.given(x, label, "active" if active else "constant"))
    output = record.run(fun.program, inputs)[0]
    check_output("graph", record.values[output].array, holomorphic=False)
    return _adjoints(function_name(f), record, output)


def _adjoints(name: str, record: Recorder, output: int) -> Graph:
    adjoints, flows, pushes = pushed(record.values, record.operations, record.edges, output)
    _, pulls = pulled(record.values, record.operations, record.edges, output)
    values = [dataclasses.replace(v, adjoint=adjoints.get(v.id)) for v in record.values]
    edges = [dataclasses.replace(e, flow=flows.get(e.id)) for e in record.edges]
    operations = tuple(record.operations)
    return Graph(name, tuple(values), operations, tuple(edges), output, tuple(pushes), tuple(pulls))
