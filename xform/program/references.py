"""Remove mutable references (`jax.new_ref`) from a program: their contents become plain values.

This applies to references that a differentiated function creates. `remove_references` traces the
program again with a `RefCell` for each reference: `ref[...]` reads the value of the cell, and
`ref[...] = x` replaces it. A nested program, such as a loop's body, takes the value as an input and
returns the new value. The result is an ordinary program. References from outside the function are
left unchanged. Outside `jit`, `apply` does the same for one operation at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import checkpoint, lax  # JAX's own `checkpoint`, even if `xform.install` replaces it

from xform._jax import (
    JaxprEqn,
    Primitive,
    cond_p,
    jaxpr_and_consts,
    jit,
    jit_p,
    primitive_named,
    scan_counts,
    scan_p,
    while_p,
)
from xform.errors import NotDifferentiable
from xform.program.equation import bind, read, scan_options, switch, write
from xform.program.hijax import lower_equation
from xform.program.reference_indexing import add_at, read_at, write_at
from xform.program.source import frame, name_stack, source

Value = Any


@dataclasses.dataclass(eq=False)
class RefCell:
    """A Python object in place of a reference. It holds the reference's current value.

    `constant`: no derivative passes through it (a reference of kind "no_grad_no_remat").
    """

    value: Value
    constant: bool = False

    def put(self, value: Value) -> None:
        """Replace the value."""
        self.value = lax.stop_gradient(value) if self.constant else value


def makes_references(jaxpr: Any) -> bool:
    """Return whether a jaxpr creates references, not counting nested programs."""
    return any(eqn.primitive in MAKES_REFERENCES for eqn in jaxpr.eqns)


def remove_references(jaxpr: Any, consts: Sequence[Any]) -> Any:
    """Convert a jaxpr that creates references to an equivalent jaxpr without references."""
    run = lambda *args: _run(jaxpr, consts, args)
    inputs = (*jaxpr.constvars, *jaxpr.invars)[len(consts) :]
    return jax.make_jaxpr(run)(*[v.aval for v in inputs])


def uses_references(primitive: Primitive, args: Sequence[Any]) -> bool:
    """Return whether an operation creates a reference, or has a RefCell among its arguments."""
    return primitive in MAKES_REFERENCES or any(isinstance(x, RefCell) for x in args)


def apply(primitive: Primitive, params: dict[str, Any], args: Sequence[Any],
          where: str = "") -> list[Any]:  # fmt: skip
    """Run an operation for which `uses_references` is True; updates the cells among `args`.

    `where` is the user's line, for error messages.
    """
    name = primitive.name
    if primitive in _OPERATIONS:
        return _OPERATIONS[primitive](params, *args)
    if primitive not in _CALLS_AND_LOOPS:
        raise NotDifferentiable(
            f"derivative of a program that passes a mutable reference to {name}",
            f"xform does not support references as arguments of {name}",
            where,
            f"read the reference first, pass the value to {name}, and write the result back",
        )
    cells = list(dict.fromkeys(x for x in args if isinstance(x, RefCell)))
    outs, values = _CALLS_AND_LOOPS[primitive](params, list(args), cells)
    for cell, value in zip(cells, values, strict=True):
        cell.value = value
    return list(outs)


def _run(jaxpr: Any, consts: Sequence[Value], args: Sequence[Value]) -> list[Value]:
    """Evaluate a jaxpr; updates the cells among `args`."""
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    outer = name_stack()
    for eqn in map(lower_equation, jaxpr.eqns):
        xs = [read(env, v) for v in eqn.invars]
        write(env, eqn.outvars, _apply_equation(eqn, xs, outer))
    return [read(env, v) for v in jaxpr.outvars]


def _apply_equation(eqn: JaxprEqn, xs: Sequence[Value], outer: Any) -> list[Value]:
    """Bind an equation, or run it with cells if it uses references."""
    if not uses_references(eqn.primitive, xs):
        return bind(eqn, xs, outer)
    with source(eqn, outer), eqn.ctx.manager:
        return apply(eqn.primitive, eqn.params, xs, frame(eqn))


# Operations on one reference. Each function gets the parameters and the operands, and returns a
# list of outputs.


def _new(params: dict[str, Any], value: Value) -> list[Any]:
    """Create a reference."""
    cell = RefCell(None, params["kind"] == "no_grad_no_remat")
    cell.put(value)
    return [cell]


def _empty(params: dict[str, Any]) -> list[Any]:
    """Create a reference without a value; it holds zeros."""
    ty = params["ty"]
    return [RefCell(lax.full(ty.shape, 0, ty.dtype))]


def _get(params: dict[str, Any], cell: RefCell, *indices: Value) -> list[Any]:
    return [read_at(cell.value, jax.tree.unflatten(params["tree"], indices))]


def _swap(params: dict[str, Any], cell: RefCell, value: Value, *indices: Value) -> list[Any]:
    """Write a part of the value, and return what was there."""
    transforms = jax.tree.unflatten(params["tree"], indices)
    old = read_at(cell.value, transforms)
    cell.put(write_at(cell.value, transforms, value))
    return [old]


def _addupdate(params: dict[str, Any], cell: RefCell, value: Value, *indices: Value) -> list[Any]:
    """Add to a part of the value."""
    transforms = jax.tree.unflatten(params["tree"], indices)
    cell.put(add_at(cell.value, transforms, value))
    return []


# Operations with nested programs: the values of the cells become inputs and outputs of the nested
# programs. Each function gets the parameters, the arguments, and the cells among these. It returns
# the outputs and the new values of the cells.

_Function = Callable[..., tuple[list[Value], list[Value]]]


def _as_function(jaxpr: Any, args: Sequence[Any], cells: Sequence[RefCell]) -> _Function:
    """Return a nested program as a function `(inputs, cell values) -> (outputs, new cell values)`.

    `args` shows which inputs are cells. The function ignores its inputs at these positions.
    """
    opened, consts = jaxpr_and_consts(jaxpr)
    cell_numbers = [cells.index(x) if isinstance(x, RefCell) else None for x in args]

    def run(args: Sequence[Value], values: Sequence[Value]):
        inner = [RefCell(v, c.constant) for v, c in zip(values, cells, strict=True)]
        inputs = [x if i is None else inner[i] for x, i in zip(args, cell_numbers, strict=True)]
        return _run(opened, consts, inputs), [c.value for c in inner]

    return run


def _without_cells(args: Sequence[Any]) -> list[Any]:
    return [None if isinstance(x, RefCell) else x for x in args]


def _values(cells: Sequence[RefCell]) -> list[Value]:
    return [c.value for c in cells]


def _call(params: dict[str, Any], args: list[Any], cells: list[RefCell]):
    body = params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]
    run = _as_function(body, args, cells)
    if "name" in params:
        run.__name__ = params["name"]
        return jit(run)(_without_cells(args), _values(cells))
    if "policy" in params:
        run = checkpoint(run, policy=params["policy"], prevent_cse=params["prevent_cse"])
    return run(_without_cells(args), _values(cells))


def _cond(params: dict[str, Any], args: list[Any], cells: list[RefCell]):
    index, *operands = args
    branches = [_as_function(b, operands, cells) for b in params["branches"]]
    return switch(params, index, branches, _without_cells(operands), _values(cells))


def _while(params: dict[str, Any], args: list[Any], cells: list[RefCell]):
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, body_consts = args[:n_cond], args[n_cond : n_cond + n_body]
    carry = args[n_cond + n_body :]
    cond = _as_function(params["cond_jaxpr"], [*cond_consts, *carry], cells)
    body = _as_function(params["body_jaxpr"], [*body_consts, *carry], cells)
    of_cond, of_body = _without_cells(cond_consts), _without_cells(body_consts)
    return lax.while_loop(  # the state is the carry and the values of the cells
        lambda state: cond([*of_cond, *state[0]], state[1])[0][0],
        lambda state: body([*of_body, *state[0]], state[1]),
        (list(carry), _values(cells)),
    )


def _scan(params: dict[str, Any], args: list[Any], cells: list[RefCell]):
    """Run a scan. A cell among the scanned inputs is scanned along its first axis."""
    n_consts, n_carry = scan_counts(params)
    consts, carry = _without_cells(args[:n_consts]), args[n_consts : n_consts + n_carry]
    scanned = args[n_consts + n_carry :]
    sliced = [x for x in scanned if isinstance(x, RefCell)]
    unsliced = [c for c in cells if c not in sliced]
    run = _as_function(params["jaxpr"], args, [*unsliced, *sliced])

    def step(state: Any, x: Any) -> Any:
        carry, values = state
        inputs, slices = x
        outs, new = run([*consts, *carry, *inputs], [*values, *slices])
        n = len(unsliced)
        return (outs[:n_carry], new[:n]), (outs[n_carry:], new[n:])

    start, xs = (list(carry), _values(unsliced)), (_without_cells(scanned), _values(sliced))
    (carry, values), (ys, slices) = lax.scan(step, start, xs, **scan_options(params))
    new_values = dict(zip([*unsliced, *sliced], [*values, *slices], strict=True))
    return [*carry, *ys], [new_values[c] for c in cells]


def _run_state(params: dict[str, Any], *values: Value) -> list[Any]:
    """Run a program whose inputs are all references; returns their final values."""
    cells = [RefCell(v) for v in values]
    _run(params["jaxpr"], (), cells)
    return _values(cells)


_new_p, _empty_p, _run_state_p = (
    primitive_named("new_ref"),
    primitive_named("empty_ref"),
    primitive_named("run_state"),
)
MAKES_REFERENCES = (_new_p, _empty_p, _run_state_p)
_OPERATIONS: dict[Primitive | None, Callable[..., list[Any]]] = {
    _new_p: _new,
    _empty_p: _empty,
    primitive_named("free_ref"): lambda params, cell: [],
    primitive_named("freeze"): lambda params, cell: [cell.value],
    primitive_named("get"): _get,
    primitive_named("swap"): _swap,
    primitive_named("addupdate"): _addupdate,
    _run_state_p: _run_state,
}
_CALLS_AND_LOOPS: dict[Primitive | None, Callable[..., Any]] = {
    jit_p: _call,
    primitive_named("closed_call"): _call,
    primitive_named("core_call"): _call,
    primitive_named("remat2"): _call,
    cond_p: _cond,
    while_p: _while,
    scan_p: _scan,
}
