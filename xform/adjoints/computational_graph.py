"""`graph`: the computational graph of a scalar function at a point, with local derivatives.

`recorder` runs the function operation by operation and records the graph. `accumulate` then
computes the adjoint of each value, the gradient of the output with respect to it.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.tree_util import keystr

from xform._jax import Tracer
from xform.adjoints.accumulate import pull_adjoints, push_adjoints
from xform.adjoints.graph_page import write_page
from xform.adjoints.graph_text import format_table, graphviz_text
from xform.adjoints.parts import AdjointUpdate, Edge, GraphOperation, GraphValue, array_data
from xform.adjoints.recorder import Recorder
from xform.errors import WrongArgument
from xform.introspection.argnums import positions
from xform.introspection.callables import argument_names, check_callable, function_name
from xform.introspection.modules import is_array_or_type
from xform.program.arithmetic import differentiable
from xform.program.ir import gather
from xform.terminal.notebook import Result
from xform.transforms.check import check_output, check_scalar
from xform.transforms.function import function_call, trace_function


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ComputationalGraph(Result):
    """A computational graph at a point: print it, or use `to_dict`, `to_dot` or `save_html`.

    Attributes:
      function: name of the function.
      values: all values, in order of computation.
      operations: the operations that compute the values, in execution order.
      edges: one edge for each value that an operation reads.
      output: index of the function's output in `values`.
      pushed: the updates of adjoints in the backward pass, operation by operation: each operation
        adds a contribution to the adjoint of each of its inputs.
      pulled: the updates of the same backward pass, value by value: each value sums the
        contributions of the operations that read it.
    """

    function: str
    values: tuple[GraphValue, ...]
    operations: tuple[GraphOperation, ...]
    edges: tuple[Edge, ...]
    output: int
    pushed: tuple[AdjointUpdate, ...]
    pulled: tuple[AdjointUpdate, ...]

    def __getitem__(self, name: str) -> GraphValue:
        """Return the value with this name.

        It is the name of an argument, a name that `xform.adjoints.name` set, or a letter from the
        printed graph.

        Raises:
          WrongArgument: no value has this name. The message lists similar names.
        """
        computed = [v for v in self.values if v.operation >= 0]
        matches = [v for v in computed if v.label == name] or [
            v for v in computed if v.name == name
        ]
        if not matches:
            names = [n for v in computed for n in (v.label, v.name) if n]
            similar = difflib.get_close_matches(str(name), names, 3, 0.4) or names[:3]
            raise WrongArgument(
                f"graph of {self.function}[{name!r}]",
                "no value has this name",
                "",
                f"use a name that the printed graph shows, such as {', '.join(map(repr, similar))}",
            )
        return matches[0]

    def __str__(self) -> str:
        return self.text()

    def text(self, rows: int | None = 200, lines: bool = False) -> str:
        """Format the graph as a table with one line for each value.

        A line shows the operation, the value, its adjoint, and the operation's local derivatives.

        Args:
          rows: largest number of values, half of them the first and half the last; None: all.
          lines: whether to show the line of your code that each value comes from.
        """
        return format_table(self.to_dict(), rows, lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the graph as plain data for JSON.

        Arrays are given by shape and norm. NaN and infinity are text: "nan" and "inf".
        """
        return {
            "function": self.function,
            "output": self.output,
            "values": [_value_data(v) for v in self.values],
            "operations": [_operation_data(op) for op in self.operations],
            "edges": [_edge_data(e) for e in self.edges],
            "pushed": [_update_data(update) for update in self.pushed],
            "pulled": [_update_data(update) for update in self.pulled],
        }

    def to_dot(self) -> str:
        """Return the graph in Graphviz's language, for `dot -Tsvg`. Scopes become clusters."""
        return graphviz_text(self.to_dict())

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write an HTML page that draws the graph and steps through its forward and backward pass.

        The page is one file and needs no network. In the picture of a large graph, a scope (a call,
        a loop iteration or a named scope) is one box until you open it; the table lists all values.

        Args:
          path: the file to write.
        """
        write_page(self.to_dict(), path)


def _value_data(v: GraphValue) -> dict[str, Any]:
    return {
        "id": v.id,
        "name": v.name,
        "label": v.label,
        "type": v.type,
        "activity": v.activity,
        "operation": v.operation,
        **array_data(v.array),
        "adjoint": None if v.adjoint is None else array_data(v.adjoint),
    }


def _operation_data(op: GraphOperation) -> dict[str, Any]:
    lists = {k: list(getattr(op, k)) for k in ("inputs", "outputs", "scope")}
    return {k: getattr(op, k) for k in ("id", "text", "where", "closed")} | lists


def _update_data(update: AdjointUpdate) -> dict[str, Any]:
    return {"edge": update.edge, "total": array_data(update.total)}


def _edge_data(e: Edge) -> dict[str, Any]:
    return {
        "id": e.id,
        "source": e.source,
        "target": e.target,
        "operand": e.operand,
        "partial": None if e.partial is None else e.partial.to_dict(),
        "flow": None if e.flow is None else array_data(e.flow),
    }


def graph(
    f: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] | None = None,
    expand_up_to: int | None = 64,
    **kwargs: Any,
) -> ComputationalGraph:
    """Compute the computational graph of a scalar function at a point.

    Each operation that the function runs is a vertex, shown with its result. Each edge leads from a
    value to an operation that reads it. The edge holds the local derivative: a number, or the shape
    and norm of a block of the Jacobian. The adjoint of a value is the gradient of the output with
    respect to it: the sum, over its outgoing edges, of the local derivative times the adjoint of
    the operation's result.

    A value is "active" if a derivative with respect to the arguments passes through it. It is
    "stopped" if it is computed from active values but no derivative passes (`stop_gradient`,
    integers). It is "constant" if it depends on no active argument.

    Args:
      f: pure function that returns a real scalar. It is traced, as under `jit`.
      *args: arrays and floats in pytrees. All other leaves, including Python integers, are passed
        to `f` unchanged.
      argnums: position or positions of the active arguments. None: all floating-point arguments.
        The default is None, not 0 as for `grad`, because a graph shows the derivatives with respect
        to every input.
      expand_up_to: a call, loop or branch is expanded into its operations if it runs at most this
        many equations, over all iterations. Others stay one operation. None: expand all.
      **kwargs: keyword arguments of `f`, which stay constant.

    Returns:
      A `ComputationalGraph`, with `graph["x"].adjoint`, `print(graph)`, `graph.to_dict()`,
      `graph.to_dot()` and `graph.save_html(path)`.

    Raises:
      NotScalar: `f` returned something other than a scalar.
      WrongDtype: the output is not real.
      WrongArgument: the call is under `jit`, where values are not known.
      MissingRule: a primitive in `f` has no rule.

    Cost: operations run one by one, each with its derivative, at some milliseconds per operation.
    All values stay in memory. The norm of a local derivative with more than 4,096 entries is
    estimated from 8 random cotangents; adjoints are never estimated.
    Source: Griewank and Walther, "Evaluating Derivatives", 2nd edition, sections 2.2, 3.2 and 9.2.

    >>> g = xform.adjoints.graph(lambda x, y: jnp.sin(x) * y, 0.0, 3.0)
    >>> float(g["x"].adjoint)
    3.0
    >>> print(g)
    graph of <lambda>: 2 operations, 2 active inputs, output 0.0
    variable     operation  value  adjoint  local derivatives  activity
    a:f32[]   x  input      0.0    3.0                         active
    b:f32[]   y  input      3.0    0.0                         active
    c:f32[]      sin a      0.0    3.0      ∂a 1.0             active
    d:f32[]      mul c b    0.0    1.0      ∂c 3.0, ∂b 0.0     active
    """
    check_callable(f, "graph")
    caller = f"graph of {function_name(f)}"
    paths, tree = jax.tree.flatten_with_path(args)
    is_traced = [is_array_or_type(x) or isinstance(x, float | complex) for _, x in paths]

    def of_arrays(*arrays: Any) -> Any:
        remaining = iter(arrays)
        pairs = zip(paths, is_traced, strict=True)
        leaves = [next(remaining) if traced else x for (_, x), traced in pairs]
        return f(*tree.unflatten(leaves), **kwargs)

    call = function_call(of_arrays, [x for _, x in gather(paths, is_traced)], caller)
    fun, flat = trace_function(call)
    if any(isinstance(x, Tracer) for x in flat):
        raise WrongArgument(
            caller,
            "an argument, or a value that the function closes over, is traced and has no value yet",
            "",
            "call graph outside jit, vmap and grad; inside, use xform.adjoints.partials at named "
            "values",
        )
    out = jax.tree.unflatten(fun.signature.out_tree, fun.signature.out_avals)
    check_scalar("graph", function_name(f), out)
    names = argument_names(f, len(args))
    active_args = range(len(args)) if argnums is None else positions(argnums, len(args), "graph")
    recorder = Recorder(expand_up_to)
    inputs = [recorder.add_leaf(x, "", "constant") for x in flat[: fun.n_consts]]
    for (path, _), x in zip(gather(paths, is_traced), flat[fun.n_consts :], strict=True):
        active = path[0].idx in active_args and differentiable(jax.typeof(x))
        label = names[path[0].idx] + keystr(path[1:])
        inputs.append(recorder.add_leaf(x, label, "active" if active else "constant"))
    output = recorder.run(fun.program, inputs)[0]
    check_output("graph", recorder.values[output].array, holomorphic=False)
    return _with_adjoints(function_name(f), recorder, output)


def _with_adjoints(name: str, recorder: Recorder, output: int) -> ComputationalGraph:
    """Return the recorded graph of a function of this name, with the adjoints of its values."""
    recorded = recorder.values, recorder.operations, recorder.edges
    adjoints, flows, pushed = push_adjoints(*recorded, output)
    _, pulled = pull_adjoints(*recorded, output)
    values = [dataclasses.replace(v, adjoint=adjoints.get(v.id)) for v in recorder.values]
    edges = [dataclasses.replace(e, flow=flows.get(e.id)) for e in recorder.edges]
    operations = tuple(recorder.operations)
    return ComputationalGraph(
        name, tuple(values), operations, tuple(edges), output, tuple(pushed), tuple(pulled)
    )
