"""The graph of scalar derivatives of a small program, and its Jacobian by vertex elimination."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xform._jax import JaxprEqn, Var
from xform.errors import WrongArgument
from xform.interpret.activity import path
from xform.interpret.cost import size
from xform.interpret.jvp import push
from xform.jacobians.accumulate import Leaves, Parts, split
from xform.jacobians.elimination import Edge, Elimination, ScalarGraph, fewest
from xform.passes.inline import Inline
from xform.program.arithmetic import Value, common_dtype, differentiable
from xform.program.ir import Mask, Program, bind, environment, gather, read, trace
from xform.program.source import frame, name_stack, source
from xform.registry.table import lookup, traits
from xform.registry.words import Bilinear, Linear, Pointwise

# Maximum number of edges: for larger programs, scalar elimination is not practical.
MOST = 50_000


def jacobian_by_elimination(
    prog: Program, active: Mask, wanted: Mask, args: Sequence[Value], holomorphic: bool
) -> tuple[list[Value], Leaves, Elimination]:
    """The outputs of a program, its Jacobian by the cheapest of three orders, and this order."""
    env, build = _build_graph(prog, active, wanted, args, holomorphic)
    ins, outs = _ends(prog, active, wanted)
    order = fewest(build.graph(ins, outs))
    avals = [v.aval for v in outs], [v.aval for v in ins]
    matrix = build.matrix(order, sum(map(size, outs)), sum(map(size, ins)))
    jacobian = split(Parts("neither", [matrix]), *avals) if outs and ins else [[] for _ in outs]
    return [read(env, v) for v in prog.outputs], jacobian, order


def graph_of(f: Callable[..., Any], *args: Value) -> ScalarGraph:
    """The graph of scalar derivatives of a function that returns one array, in all arguments."""
    prog = Inline().program(trace(lambda *xs: [f(*xs)], *args))
    ends = (True,) * len(args), (True,)
    return _build_graph(prog, *ends, args, False)[1].graph(*_ends(prog, *ends))


def _ends(prog: Program, active: Mask, wanted: Mask) -> tuple[list[Any], list[Any]]:
    """The active inputs and the wanted outputs."""
    return gather(prog.inputs, active), gather(prog.outputs, wanted)


def _build_graph(prog: Program, active: Mask, wanted: Mask, args: Sequence[Value], holomorphic: bool
           ) -> tuple[dict[Var, Value], _ScalarGraphBuilder]:  # fmt: skip
    """Run a program; returns the values of its variables, and a builder with its scalar graph."""
    env = environment(prog, args)
    build = _ScalarGraphBuilder(prog, active, wanted, holomorphic)
    outer = name_stack()
    for i, eqn in enumerate(prog.equations):
        xs = [read(env, v) for v in eqn.invars]
        env.update(zip(eqn.outvars, bind(eqn, xs, outer), strict=True))
        if i in build.steps:
            with source(eqn, outer), eqn.ctx.manager:
                build.add(eqn, xs, [env[v] for v in eqn.outvars], *build.steps[i])
    return env, build


class _ScalarGraphBuilder:
    """Collects the vertices, the edges and the local derivatives, equation by equation."""

    def __init__(self, prog: Program, active: Mask, wanted: Mask, holomorphic: bool):
        self.steps = path(prog, active, wanted).steps
        self.first: dict[Var, int] = {}
        self.slots: dict[Edge, int] = {}
        self.unit: list[bool] = []
        # For each block of local derivatives: the slots and the values.
        self.blocks: list[tuple[Any, Value]] = []
        self.vertices, self.holomorphic = 0, holomorphic
        for v, on in zip(prog.inputs, active, strict=True):
            if on:
                self.vertex(v)

    def vertex(self, v: Var) -> None:
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
        """Add the local derivatives of an equation."""
        for v, on in zip(eqn.outvars, outs, strict=True):
            if on:
                self.vertex(v)
        for j, (v, on) in enumerate(zip(eqn.invars, ins, strict=True)):
            if on and isinstance(v, Var) and v in self.first:
                for k, block in _local(eqn, xs, ys, j, outs).items():
                    rows, columns, values = block
                    begin = self.first[v], self.first[eqn.outvars[k]]
                    self._edges(begin[0] + columns, begin[1] + rows, values, eqn)

    def _edges(self, starts: Any, ends: Any, values: Value, eqn: JaxprEqn | None = None) -> None:
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
        if len(self.unit) > MOST:
            raise WrongArgument(
                'jacobian with elimination="markowitz"',
                f"the program has more than {MOST:,} scalar derivatives",
                frame(eqn) if eqn is not None else "",
                "drop elimination; the default works on arrays, and suits large programs",
            )

    def graph(self, ins: Sequence[Var], outs: Sequence[Any]) -> ScalarGraph:
        """The graph, with an additional vertex for each element of an output."""
        inputs = [self.first[v] + i for v in ins for i in range(size(v))]
        begin = self.vertices
        for v in outs:
            n = size(v)
            if isinstance(v, Var) and v in self.first:
                each = np.arange(n)
                self._edges(self.first[v] + each, self.vertices + each, np.ones(n))
            self.vertices += n
        outputs = range(begin, self.vertices)
        return ScalarGraph(tuple(self.slots), tuple(self.unit), tuple(inputs), tuple(outputs))

    def matrix(self, order: Elimination, rows: int, columns: int) -> Value:
        """The Jacobian, by all products of a level at once, level by level."""
        arrays = [v for _, v in self.blocks if not isinstance(v, np.ndarray)]
        dtype = common_dtype([v.dtype for v in arrays] or [np.dtype(np.float32)])
        values = jnp.zeros(order.slots, dtype)
        for slots, block in self.blocks:
            values = values.at[slots].add(jnp.asarray(block, dtype))
        for level in order.levels:
            to, a, b = np.array(level).T
            values = values.at[to].add(values[a] * values[b])
        out = jnp.zeros((rows, columns), dtype)
        if not order.left:
            return out
        edges = np.array(list(order.left))
        # The inputs are the first vertices, the outputs the last.
        at = edges[:, 1] - (self.vertices - rows), edges[:, 0]
        return out.at[at].set(values[np.array(list(order.left.values()))])


# Rows, columns and values of the nonzeros. Values that do not depend on inputs are NumPy arrays.
Block = tuple[Any, Any, Value]


def _local(eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value], j: int, outs: Mask
           ) -> dict[int, Block]:  # fmt: skip
    """The local derivatives of an equation in input `j`, by position of the output."""
    rule = lookup(eqn)
    n = size(eqn.invars[j])
    if traits(eqn.primitive).fusion == "elementwise" and _elementwise(eqn, j):
        (m,) = [size(v) for v in eqn.outvars]
        rows = np.arange(m)
        columns = rows if n == m else np.zeros(m, np.int64)
        if isinstance(rule, Pointwise):
            constant = rule.call(rule.formulas[j], eqn, ys[0], *xs)
            if isinstance(constant, int):
                return {0: (rows, columns, np.full(m, float(constant)))}
        dy = _pushed(eqn, xs, j, jnp.ones_like(xs[j]), outs)[0]
        return {} if dy is None else {0: (rows, columns, jnp.broadcast_to(dy, ys[0].shape).ravel())}
    inputs = list(enumerate(eqn.invars))
    if isinstance(rule, Linear) and not any(_is_coefficient(rule, i, v) for i, v in inputs):
        with jax.ensure_compile_time_eval():
            pairs = zip(xs, eqn.invars, strict=True)
            zeros = [jnp.zeros(x.shape, x.dtype) if isinstance(v, Var) else x for x, v in pairs]
            known = _dense(eqn, zeros, j, outs)
        return {k: _block(m, m) for k, m in _numpy(known).items()}
    found = _dense(eqn, xs, j, outs)
    if not isinstance(rule, Bilinear):
        return {k: _block(m, np.ones(m.shape)) for k, m in found.items()}
    with jax.ensure_compile_time_eval():  # random operands give nonzeros wherever there can be one
        random = [_random(i, v) for i, v in inputs]
        pattern = _numpy(_dense(eqn, random, j, outs))
    return {k: _block(m, pattern[k]) for k, m in found.items()}


def _block(matrix: Value, where: Any) -> Block:
    """The elements of `matrix` at the nonzeros of `where`."""
    rows, columns = np.nonzero(where)
    return rows, columns, matrix[rows, columns]


def _is_coefficient(rule: Linear, i: int, v: Any) -> bool:
    """Whether the matrix of a linear map depends on input `i`, for example an index or a factor."""
    is_linear = differentiable(v.aval) if rule.over is None else i in rule.over
    return isinstance(v, Var) and not is_linear


def _elementwise(eqn: JaxprEqn, j: int) -> bool:
    """Whether each output element depends on one element of input `j`: the same or the only one."""
    if len(eqn.outvars) != 1:
        return False
    own, out = eqn.invars[j], eqn.outvars[0]
    return size(own) == 1 or own.aval.shape == out.aval.shape  # pyright: ignore[reportAttributeAccessIssue]


def _pushed(eqn: JaxprEqn, xs: Sequence[Value], j: int, dx: Value, outs: Mask) -> Sequence[Value]:
    return push(
        lookup(eqn), eqn, xs, [dx if i == j else None for i in range(len(xs))], outs, False
    )[1]


def _dense(eqn: JaxprEqn, xs: Sequence[Value], j: int, outs: Mask) -> dict[int, Value]:
    """The local Jacobian in input `j` as a dense matrix, for each output that depends on it."""
    aval: Any = eqn.invars[j].aval
    n = math.prod(aval.shape)
    units = jnp.eye(n, dtype=aval.dtype).reshape(n, *aval.shape)
    live: list[int] = []

    def one(dx: Value) -> list[Value]:
        dys = _pushed(eqn, xs, j, dx, outs)
        live[:] = [k for k, dy in enumerate(dys) if dy is not None and outs[k]]
        return [dys[k] for k in live]

    columns = jax.vmap(one)(units)
    return {k: c.reshape(n, math.prod(c.shape[1:])).T for k, c in zip(live, columns, strict=True)}


def _numpy(matrices: dict[int, Value]) -> dict[int, Any]:
    return {k: np.asarray(m, np.complex128 if m.dtype.kind == "c" else np.float64)
            for k, m in matrices.items()}  # fmt: skip


def _random(i: int, v: Any) -> Value:
    if not isinstance(v, Var):
        return jnp.asarray(v.val)
    aval: Any = v.aval
    draw = np.random.default_rng(i)
    return jnp.asarray(draw.uniform(1.0, 2.0, aval.shape), aval.dtype)
