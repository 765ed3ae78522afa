"""The graph of scalar derivatives of a small program, and its Jacobian by vertex elimination.

Each element of a value on a path from the differentiated inputs to the outputs is a vertex. An edge
is the derivative of an element of an operation's result in an element of an operand (a local
derivative). `elimination` decides the order of the multiplications of edges; this file computes the
values of the edges and multiplies them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xform._jax import JaxprEqn, Var, run_at_once, tangent_aval
from xform.errors import WrongArgument
from xform.interpret.activity import path
from xform.interpret.cost import size
from xform.interpret.jvp import push
from xform.jacobians.accumulate import Blocks, JacobianMatrices, split_into_blocks
from xform.jacobians.elimination import Edge, Elimination, ScalarGraph, cheapest_elimination
from xform.jacobians.segments import crosses_devices
from xform.passes.inline import Inline
from xform.program.arithmetic import Value, differentiable
from xform.program.arrays import basis, common_dtype, filled, replicated
from xform.program.ir import Mask, Program, bind, context, environment, gather, read, trace
from xform.program.source import frame, name_stack, source
from xform.registry.table import lookup, traits
from xform.registry.words import Bilinear, Linear, Pointwise

# Maximum number of edges: for larger programs, scalar elimination is not practical.
_MAX_EDGES = 50_000


def jacobian_by_elimination(
    prog: Program, active: Mask, wanted: Mask, args: Sequence[Value], holomorphic: bool
) -> tuple[list[Value], Blocks, Elimination]:
    """Return the outputs of a program, its Jacobian, and the elimination that computed it.

    The elimination is the cheapest of three.

    Args:
      prog: the program.
      active: a mask of the inputs that are differentiated.
      wanted: a mask of the outputs that are differentiated.
      args: the inputs.
      holomorphic: whether the program is complex-differentiable.

    Raises:
      WrongArgument: the program communicates between the devices of a `shard_map`, or has too many
        scalar derivatives.
    """
    if (eqn := crosses_devices(prog, active, wanted)) is not None:
        raise WrongArgument(
            'jacobian with elimination="markowitz"',
            f"{eqn.primitive} makes values of one device depend on those of others",
            frame(eqn),
            "drop elimination; the default computes it in reverse mode, like jax.jacobian",
        )
    env, builder = _build_graph(prog, active, wanted, args, holomorphic)
    ins, outs = gather(prog.inputs, active), gather(prog.outputs, wanted)
    order = cheapest_elimination(builder.graph(ins, outs))
    matrix = builder.matrix(order, sum(map(size, outs)), sum(map(size, ins)))
    if outs and ins:
        blocks = split_into_blocks(
            JacobianMatrices("neither", [matrix]), [v.aval for v in outs], [v.aval for v in ins]
        )
    else:
        blocks = [[] for _ in outs]
    return [read(env, v) for v in prog.outputs], blocks, order


def scalar_graph_of(f: Callable[..., Any], *args: Value) -> ScalarGraph:
    """Return the graph of scalar derivatives, in all arguments, of `f`, which returns one array."""
    prog = Inline().program(trace(lambda *xs: [f(*xs)], *args))
    _, builder = _build_graph(prog, (True,) * len(args), (True,), args, False)
    return builder.graph(prog.inputs, prog.outputs)


def _build_graph(prog: Program, active: Mask, wanted: Mask, args: Sequence[Value], holomorphic: bool
           ) -> tuple[dict[Var, Value], _ScalarGraphBuilder]:  # fmt: skip
    """Run a program; return the values of its variables, and a builder with its scalar graph."""
    env = environment(prog, args)
    builder = _ScalarGraphBuilder(prog, active, wanted, holomorphic)
    outer = name_stack()
    for i, eqn in enumerate(prog.equations):
        xs = [read(env, v) for v in eqn.invars]
        env.update(zip(eqn.outvars, bind(eqn, xs, outer), strict=True))
        if i in builder.steps:
            with source(eqn, outer), context(eqn):
                builder.add(eqn, xs, [env[v] for v in eqn.outvars], *builder.steps[i])
    return env, builder


class _ScalarGraphBuilder:
    """Collects the vertices, the edges and the local derivatives, equation by equation.

    Attributes:
      steps: for each differentiated equation, by its index, masks of its active operands and its
        wanted results.
      first: the vertex of the first element of each value; the other elements follow.
      slots: the position of each edge.
      unit: for each edge, whether its derivative is 1 or -1.
      blocks: arrays of local derivatives, each with the slots that they belong to.
      vertices: the number of vertices.
      holomorphic: whether the program is complex-differentiable.
    """

    def __init__(self, prog: Program, active: Mask, wanted: Mask, holomorphic: bool):
        self.steps = path(prog, active, wanted).steps
        self.first: dict[Var, int] = {}
        self.slots: dict[Edge, int] = {}
        self.unit: list[bool] = []
        self.blocks: list[tuple[Any, Value]] = []
        self.vertices, self.holomorphic = 0, holomorphic
        for v in gather(prog.inputs, active):
            self.add_vertices(v)

    def add_vertices(self, v: Var) -> None:
        """Add a vertex for each element of a value."""
        aval: Any = v.aval
        if jnp.issubdtype(aval.dtype, np.complexfloating) and not self.holomorphic:
            raise WrongArgument(
                'jacobian with elimination="markowitz"',
                f"a complex value of type {aval.str_short()} has two derivatives for each element",
                "",
                "drop elimination, or set holomorphic=True if the function is holomorphic",
            )
        self.first[v] = self.vertices
        self.vertices += size(v)

    def add(self, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value], ins: Mask, outs: Mask
            ) -> None:  # fmt: skip
        """Add the local derivatives of an equation with operands `xs` and results `ys`.

        `ins` and `outs` are masks of the active operands and the wanted results.
        """
        for v in gather(eqn.outvars, outs):
            self.add_vertices(v)
        for j, (v, is_active) in enumerate(zip(eqn.invars, ins, strict=True)):
            if is_active and isinstance(v, Var) and v in self.first:
                for k, block in _local_derivatives(eqn, xs, ys, j, outs).items():
                    rows, columns, values = block
                    starts, ends = self.first[v] + columns, self.first[eqn.outvars[k]] + rows
                    self._add_edges(starts, ends, values, eqn)

    def _add_edges(
        self, starts: Any, ends: Any, values: Value, eqn: JaxprEqn | None = None
    ) -> None:
        """Add the edges from `starts` to `ends`, with the derivatives `values`.

        If an edge exists already, the new derivative is added to the derivative on it.
        """
        known = isinstance(values, np.ndarray)
        slots: list[int] = []
        for i, edge in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
            if edge in self.slots:  # the equation reads the value twice
                self.unit[self.slots[edge]] = False
            else:
                self.slots[edge] = len(self.unit)
                self.unit.append(known and abs(values[i]) == 1)
            slots.append(self.slots[edge])
        self.blocks.append((np.array(slots, np.int64), values))
        if len(self.unit) > _MAX_EDGES:
            raise WrongArgument(
                'jacobian with elimination="markowitz"',
                f"the program has more than {_MAX_EDGES:,} scalar derivatives",
                frame(eqn) if eqn is not None else "",
                "drop elimination; the default works on arrays, and suits large programs",
            )

    def graph(self, ins: Sequence[Var], outs: Sequence[Any]) -> ScalarGraph:
        """Return the graph, with an additional vertex for each element of an output."""
        inputs = [self.first[v] + i for v in ins for i in range(size(v))]
        first_output = self.vertices
        for v in outs:
            n = size(v)
            if isinstance(v, Var) and v in self.first:
                elements = np.arange(n)
                self._add_edges(self.first[v] + elements, self.vertices + elements, np.ones(n))
            self.vertices += n
        outputs = range(first_output, self.vertices)
        return ScalarGraph(tuple(self.slots), tuple(self.unit), tuple(inputs), tuple(outputs))

    def matrix(self, order: Elimination, rows: int, columns: int) -> Value:
        """Return the Jacobian as one matrix: the products of `order`, one level at a time."""
        arrays = [v for _, v in self.blocks if not isinstance(v, np.ndarray)]
        dtype = common_dtype([v.dtype for v in arrays] or [np.dtype(np.float32)])
        values = jnp.zeros(order.slots, dtype)
        for slots, block in self.blocks:
            values = values.at[slots].add(replicated(jnp.asarray(block, dtype)))
        for level in order.levels:
            added_to, a, b = np.array(level).T
            values = values.at[added_to].add(values[a] * values[b])
        matrix = jnp.zeros((rows, columns), dtype)
        if not order.remaining:
            return matrix
        edges = np.array(list(order.remaining))
        # The inputs are the first vertices, the outputs the last.
        positions = edges[:, 1] - (self.vertices - rows), edges[:, 0]
        return matrix.at[positions].set(values[np.array(list(order.remaining.values()))])


# Rows, columns and values of the nonzeros of the Jacobian of one result in one operand.
# Values that do not depend on inputs are NumPy arrays.
_Nonzeros = tuple[Any, Any, Value]


def _local_derivatives(eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value], j: int, outs: Mask
           ) -> dict[int, _Nonzeros]:  # fmt: skip
    """Return the local derivatives of an equation in operand `j`, by position of the result."""
    rule = lookup(eqn)
    if traits(eqn.primitive).fusion == "elementwise" and _is_elementwise(eqn, j):
        (m,) = [size(v) for v in eqn.outvars]
        rows = np.arange(m)
        columns = rows if size(eqn.invars[j]) == m else np.zeros(m, np.int64)
        if isinstance(rule, Pointwise):
            constant = rule.call(rule.formulas[j], eqn, ys[0], *xs)
            if isinstance(constant, int):
                return {0: (rows, columns, np.full(m, float(constant)))}
        dy = _tangents(eqn, xs, j, filled(tangent_aval(jax.typeof(xs[j])), 1), outs)[0]
        return {} if dy is None else {0: (rows, columns, jnp.broadcast_to(dy, ys[0].shape).ravel())}
    operands = list(enumerate(eqn.invars))
    if isinstance(rule, Linear) and not any(_is_coefficient(rule, i, v) for i, v in operands):
        with run_at_once():  # the matrix depends on no operand
            pairs = zip(xs, eqn.invars, strict=True)
            zeros = [jnp.zeros(x.shape, x.dtype) if isinstance(v, Var) else x for x, v in pairs]
            known = _dense_jacobians(eqn, zeros, j, outs)
        return {k: _nonzeros(m, m) for k, m in _to_numpy(known).items()}
    dense = _dense_jacobians(eqn, xs, j, outs)
    if not isinstance(rule, Bilinear):
        return {k: _nonzeros(m, np.ones(m.shape)) for k, m in dense.items()}
    with run_at_once():  # random operands give nonzeros wherever there can be one
        random = [_random(i, v) for i, v in operands]
        pattern = _to_numpy(_dense_jacobians(eqn, random, j, outs))
    return {k: _nonzeros(m, pattern[k]) for k, m in dense.items()}


def _nonzeros(matrix: Value, pattern: Any) -> _Nonzeros:
    """Return the elements of `matrix` at the nonzeros of `pattern`."""
    rows, columns = np.nonzero(pattern)
    return rows, columns, matrix[rows, columns]


def _is_coefficient(rule: Linear, i: int, v: Any) -> bool:
    """Return whether operand `i` determines the matrix of a linear map, as an index does."""
    is_linear = differentiable(v.aval) if rule.argnums is None else i in rule.argnums
    return isinstance(v, Var) and not is_linear


def _is_elementwise(eqn: JaxprEqn, j: int) -> bool:
    """Return whether each element of the result depends on one element of operand `j`.

    This is the element at the same indices, or the operand's only element.
    """
    if len(eqn.outvars) != 1:
        return False
    operand, out = eqn.invars[j], eqn.outvars[0]
    return size(operand) == 1 or operand.aval.shape == out.aval.shape  # pyright: ignore[reportAttributeAccessIssue]


def _tangents(eqn: JaxprEqn, xs: Sequence[Value], j: int, dx: Value, outs: Mask) -> Sequence[Value]:
    """Return the tangents of the results if operand `j` has the tangent `dx`."""
    dxs = [dx if i == j else None for i in range(len(xs))]
    return push(lookup(eqn), eqn, xs, dxs, outs, False)[1]


def _dense_jacobians(eqn: JaxprEqn, xs: Sequence[Value], j: int, outs: Mask) -> dict[int, Value]:
    """Return the local Jacobians in operand `j`, as a dense matrix for each dependent result."""
    (units,) = basis([tangent_aval(jax.typeof(xs[j]))])
    n = len(units)
    dependent: list[int] = []

    def column(dx: Value) -> list[Value]:
        dys = _tangents(eqn, xs, j, dx, outs)
        dependent[:] = [k for k, dy in enumerate(dys) if dy is not None and outs[k]]
        return [dys[k] for k in dependent]

    columns = zip(dependent, jax.vmap(column)(units), strict=True)
    return {k: c.reshape(n, math.prod(c.shape[1:])).T for k, c in columns}


def _to_numpy(matrices: dict[int, Value]) -> dict[int, Any]:
    """Convert matrices to NumPy, in double precision."""
    return {k: np.asarray(m, np.complex128 if m.dtype.kind == "c" else np.float64)
            for k, m in matrices.items()}  # fmt: skip


def _random(i: int, v: Any) -> Value:
    """Return a random value for operand `i`, without zeros; a literal keeps its value."""
    if not isinstance(v, Var):
        return jnp.asarray(v.val)
    aval: Any = v.aval
    draw = np.random.default_rng(i)
    return jnp.asarray(draw.uniform(1.0, 2.0, aval.shape), aval.dtype)
