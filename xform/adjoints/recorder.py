"""Evaluate a program operation by operation, and record each operation with its pullback.

Each value that a program computes gets a number, its id. Each equation becomes an operation, with
an edge for each value that it reads, and the shape and norm of its local derivative, a block of the
operation's Jacobian. Small calls, loops and branches are expanded: the operations that they run are
recorded in their place, iteration by iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xform._jax import JaxprEqn, Literal, Var, cotangent_aval
from xform.adjoints.activity import Activity, equation_activities
from xform.adjoints.parts import Edge, GraphOperation, GraphValue, Partial, Pull, norm
from xform.passes.inline import inlinable_body, region_body
from xform.passes.listing import VariableNames, literal, operation
from xform.passes.structured import plain_call_body
from xform.program.arithmetic import Value as Array
from xform.program.arrays import basis, filled, random
from xform.program.flow import Flow
from xform.program.ir import Program, bind, evaluate, gather, read, spread, trace
from xform.program.source import frame, name_stack, source
from xform.registry.table import flow_of, label, traits
from xform.transforms.reverse import vjp

# The calls, loop iterations and named scopes around an operation, outermost first.
Scope = tuple[str, ...]


class Recorder:
    """Evaluates programs and records their values, operations and edges in execution order.

    Args:
      expand: expand a call, loop or branch if it runs at most this many equations; None: all.
    """

    def __init__(self, expand: int | None):
        self.values: list[GraphValue] = []
        self.operations: list[GraphOperation] = []
        self.edges: list[Edge] = []
        self._expand = expand
        self._names = VariableNames()

    def add_leaf(self, array: Array, label: str, activity: Activity) -> int:
        """Record an argument (with its label) or a constant (with an empty label); return its id.

        A constant is a value that the function closes over.
        """
        text = "input" if label else "constant"
        (value,) = self._add(text, (), [array], [activity], label)
        return value

    def run(self, prog: Program, inputs: Sequence[int], scope: Scope = ()) -> list[int]:
        """Evaluate a program on recorded values, record its operations, and return output ids."""
        env: dict[Var, int] = dict(zip(prog.inputs, inputs, strict=True))
        env |= {v: self.add_leaf(x, "", "constant") for v, x in prog.consts}
        for eqn in prog.equations:
            ids = [self._atom(v, env) for v in eqn.invars]
            stack = str(eqn.source_info.name_stack)
            inner_scope = (*scope, *filter(None, stack.split("/")))
            outs = self._record_inside(eqn, ids, inner_scope)
            if outs is None:
                outs = self._record_one(eqn, ids, inner_scope)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [self._atom(v, env) for v in prog.outputs]

    def _atom(self, atom: Any, env: dict[Var, int]) -> int:
        """Return the id of a variable, or of a new value for a literal."""
        if not isinstance(atom, Literal):
            return env[atom]
        aval: Any = atom.aval
        array = jnp.asarray(read({}, atom), aval.dtype)
        value = GraphValue(len(self.values), literal(atom), "", array, "constant", -1)
        self.values.append(value)
        return value.id

    def _add(self, text: str, inputs: Sequence[int], arrays: Sequence[Array],
             activities: Sequence[Activity], label: str = "", **fields: Any
             ) -> list[int]:  # fmt: skip
        """Add an operation with its result arrays; return the ids of the results."""
        first, op = len(self.values), len(self.operations)
        for i, (x, activity) in enumerate(zip(arrays, activities, strict=True), first):
            self.values.append(GraphValue(i, self._names.plain(i), label, x, activity, op))
        outputs = list(range(first, first + len(arrays)))
        self.operations.append(GraphOperation(op, text, tuple(inputs), tuple(outputs), **fields))
        return outputs

    def _record_one(self, eqn: JaxprEqn, ids: Sequence[int], scope: Scope) -> list[int]:
        """Evaluate an equation and record it as one operation with its edges; return output ids."""
        xs = [self.values[i].array for i in ids]
        activities = equation_activities(eqn, [self.values[i].activity for i in ids])
        active = [self.values[i].activity == "active" for i in ids]
        wanted = [activity == "active" for activity in activities]
        pull: Pull | None = None
        if any(wanted):
            ys, pull = _vjp_of(eqn, xs, active, wanted)
        else:
            ys = bind(eqn, xs)
        op = len(self.operations)
        partials: list[Any] = [None] * len(ids)
        if pull is not None:
            elementwise = traits(eqn.primitive).fusion == "elementwise"
            of_active = partials_of(pull, gather(ys, wanted), gather(xs, active), elementwise)
            partials = spread(of_active, active)
        for operand, (i, partial) in enumerate(zip(ids, partials, strict=True)):
            self.edges.append(Edge(len(self.edges), i, op, operand, partial))
        name = label(eqn.primitive, eqn.params) or ""
        return self._add(operation(eqn), ids, ys, activities, name, scope=scope,
                         where=frame(eqn), closed=_equations_inside(eqn),
                         pull=pull)  # fmt: skip

    def _record_inside(self, eqn: JaxprEqn, ids: Sequence[int], scope: Scope) -> list[int] | None:
        """Record the operations inside an equation and return its output ids.

        Return None, and record nothing, if the equation is not to be expanded.
        """
        flow = flow_of(eqn)
        if flow is not None and flow.condition is not None:
            return self._while(flow, ids, scope)
        if self._expand is not None and equations_run(eqn) > self._expand:
            return None
        if flow is not None and flow.length is not None:
            return self._scan(eqn, flow, ids, scope) if flow.length else None
        if flow is not None and flow.index is not None:
            if eqn.params.get("branches_platforms") is not None:
                return None
            index = int(self.values[ids[flow.index]].array)
            taken = flow.bodies[index]
            inputs = [ids[k] for k in taken.operands]
            return self.run(taken.program, inputs, (*scope, f"branch {index}"))
        body = plain_call_body(eqn) or region_body(eqn) or inlinable_body(eqn)
        if body is None:
            return None
        name = eqn.params.get("name") or ""
        return self.run(body, ids, (*scope, f"{eqn.primitive.name} {name}".rstrip()))

    def _scan(self, eqn: JaxprEqn, flow: Flow, ids: Sequence[int], scope: Scope) -> list[int]:
        """Record the operations of all iterations of a scan."""
        (body,), outputs = flow.bodies, dict[int, list[int]]()
        for t in flow.iterations:
            inner_scope = (*scope, f"scan, iteration {t}")
            one = lambda x, t=t: lax.index_in_dim(x, t, keepdims=False)
            take = lambda i, one=one, inner=inner_scope: self._record_function(eqn, one, [i], inner)
            outputs[t] = self.run(body.program, flow.inputs(body, ids, take), inner_scope)
            ids = flow.after(ids, outputs[t])
        stack = lambda *ys: jnp.stack(ys)
        return flow.results(ids, [outputs[t] for t in range(flow.length)],
                            lambda ys: self._record_function(eqn, stack, ys, scope))  # fmt: skip

    def _while(self, flow: Flow, ids: Sequence[int], scope: Scope) -> list[int] | None:
        """Record the operations of a while loop; return None if these are too many.

        The loop is run first to count its iterations.
        """
        (body,), condition = flow.bodies, flow.condition
        assert condition is not None
        values, iterations = [self.values[i].array for i in ids], 0
        equations_each = max(1, _equations_of(body.program))
        while evaluate(condition.program, [values[k] for k in condition.operands])[0]:
            iterations += 1
            if self._expand is not None and iterations * equations_each > self._expand:
                return None
            outputs = evaluate(body.program, [values[k] for k in body.operands])
            values = flow.after(values, outputs)
        for t in range(iterations):
            inputs = [ids[k] for k in body.operands]
            outs = self.run(body.program, inputs, (*scope, f"while, iteration {t}"))
            ids = flow.after(ids, outs)
        carried = {r: ids[k] for k, r in flow.carried.items()}
        return [carried[r] for r in body.results]

    def _record_function(self, eqn: JaxprEqn, f: Callable[..., Array], ids: Sequence[int],
                         scope: Scope) -> int:  # fmt: skip
        """Record the operations of `f`, which takes values `ids`; return the result's id.

        `f` takes a slice or stacks results, as the loop itself does.
        """
        with source(eqn, name_stack()):
            prog = trace(lambda *xs: [f(*xs)], *(self.values[i].array for i in ids))
        (out,) = self.run(prog, ids, scope)
        return out


def _vjp_of(eqn: JaxprEqn, xs: Sequence[Array], active: Sequence[bool], wanted: Sequence[bool]
            ) -> tuple[list[Array], Pull]:  # fmt: skip
    """Return an equation's outputs, and the pullback from wanted outputs to active inputs."""

    def run(*active_xs: Array) -> tuple[list[Array], list[Array]]:
        remaining = iter(active_xs)
        pairs = zip(xs, active, strict=True)
        ys = bind(eqn, [next(remaining) if is_active else x for x, is_active in pairs])
        return gather(ys, wanted), gather(ys, [not is_wanted for is_wanted in wanted])

    wanted_ys, pull, other_ys = vjp(run, *gather(xs, active), has_aux=True)
    next_wanted, next_other = iter(wanted_ys), iter(other_ys)
    ys = [next(next_wanted if is_wanted else next_other) for is_wanted in wanted]
    return ys, lambda cts: pull(list(cts))


def equations_run(eqn: JaxprEqn) -> int:
    """Return how many equations run inside an equation, for the limit `expand`.

    A loop counts all iterations, or one if their number is not known. A branch counts as its
    largest branch. An equation without programs counts 0.
    """
    flow = flow_of(eqn)
    if flow is None:
        return 0
    length = 1 if flow.length is None else flow.length
    return length * max(map(_equations_of, flow.programs))


def _equations_of(prog: Program) -> int:
    """Return how many equations a program runs. One that runs programs counts as theirs."""
    if "equations run" not in prog.cache:
        prog.cache["equations run"] = sum(max(1, equations_run(eqn)) for eqn in prog.equations)
    return prog.cache["equations run"]


def _equations_inside(eqn: JaxprEqn) -> int:
    """Return how many equations one run of each nested program has, for `GraphOperation.closed`."""
    flow = flow_of(eqn)
    return 0 if flow is None else sum(map(_equations_of, flow.programs))


# The most entries of a Jacobian whose norm is computed exactly.
_MAX_ENTRIES = 4096
# The number of random cotangents that estimate the norm of a larger Jacobian.
_RANDOM_COTANGENTS = 8


def partials_of(pull: Pull, ys: Sequence[Array], xs: Sequence[Array], elementwise: bool
                ) -> list[Partial]:  # fmt: skip
    """Return the local derivative of an operation with respect to each of `xs`.

    Args:
      pull: pullback from cotangents of `ys` to cotangents of `xs`.
      ys: the active outputs.
      xs: the active inputs.
      elementwise: whether each output element depends only on the input elements at the same
        position. If the shapes are equal too, one pullback of ones gives the diagonal of each
        block, and all other entries are zero.
    """
    rows, sizes = sum(y.size for y in ys), [x.size for x in xs]
    shapes = [(*(ys[0].shape if len(ys) == 1 else (rows,)), *x.shape) for x in xs]
    if any(np.iscomplexobj(v) for v in (*ys, *xs)):
        return [Partial(shape, None, None) for shape in shapes]
    avals = [cotangent_aval(jax.typeof(y)) for y in ys]
    if rows == 1 or (elementwise and all(x.shape == ys[0].shape for x in xs)):
        pairs = zip(shapes, pull([filled(aval, 1) for aval in avals]), strict=True)
        return [Partial(shape, None if shape else float(ct), norm(ct)) for shape, ct in pairs]
    if rows * max(sizes, default=0) <= _MAX_ENTRIES:
        blocks = jax.vmap(lambda *cts: pull(cts))(*basis(avals))
        pairs = zip(shapes, blocks, strict=True)
        return [Partial(shape, None, norm(block)) for shape, block in pairs]
    squares = np.zeros(len(xs))
    for cts in _random_cotangents(avals):
        squares += [norm(ct) ** 2 for ct in pull(cts)]
    estimates = np.sqrt(squares / _RANDOM_COTANGENTS).tolist()
    pairs = zip(shapes, estimates, strict=True)
    return [Partial(shape, None, estimate, exact=False) for shape, estimate in pairs]


def _random_cotangents(avals: Sequence[Any]) -> Iterator[list[Any]]:
    """Yield normally distributed cotangents of types `avals`.

    The expected squared norm of the pulled-back cotangent is the squared norm of the Jacobian.
    """
    for key in jax.random.split(jax.random.key(0), _RANDOM_COTANGENTS):
        keys = jax.random.split(key, len(avals))
        pairs = zip(keys, avals, strict=True)
        yield [random(jax.random.normal, key, aval) for key, aval in pairs]
