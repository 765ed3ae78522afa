"""Remove mutable references (`jax.new_ref`) from a program: their contents become plain values.

This applies to references that a differentiated function creates. `remove_references` traces the
program again with a `RefCell` for each reference: `ref[...]` reads the value of the cell, and
`ref[...] = x` replaces it. A nested program, such as a loop's body, takes the value as an input and
returns the new value. The result is an ordinary program. References from outside the function are
left unchanged. Outside `jit`, `apply` does the same for one operation at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import checkpoint, lax  # JAX's own `checkpoint`, even if `xform.install` replaces it

from xform._jax import (
    JaxprEqn,
    Primitive,
    cond_p,
    custom_jvp_call_p,
    custom_vjp_call_p,
    is_zero,
    jaxpr_and_consts,
    jit,
    jit_p,
    primitive_named,
    scan_counts,
    scan_p,
    while_p,
)
from xform._jax.custom_functions import call_again, wrap_like
from xform._jax.mutable import reference_type
from xform.errors import NotDifferentiable
from xform.program.arithmetic import Value, differentiable
from xform.program.arrays import zeros
from xform.program.equation import bind, context, read, scan_like, switch, write
from xform.program.hijax import lower_equation
from xform.program.reference_operations import EMPTY_REF, NEW_REF, OPERATIONS, RefCell
from xform.program.source import frame, name_stack, source


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
    for cell in cells:
        cell.written = False
    outs, values = _CALLS_AND_LOOPS[primitive](params, list(args), cells)
    for cell, value in zip(cells, values, strict=True):
        cell.value = value if cell.written else cell.value
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
    with source(eqn, outer), context(eqn):
        return apply(eqn.primitive, eqn.params, xs, frame(eqn))


# Operations with nested programs: the values of the cells become inputs and outputs of the nested
# programs. Each function gets the parameters, the arguments, and the cells among these. It returns
# the outputs and the new values of the cells, and sets `written` of the cells.

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
        outs = _run(opened, consts, inputs)
        _mark_written(cells, [c.value is not v for c, v in zip(inner, values, strict=True)])
        return outs, _values(inner)

    return run


def _mark_written(cells: Sequence[RefCell], written: Sequence[bool]) -> None:
    """Set `written` of the cells that a nested program writes to."""
    for cell, on in zip(cells, written, strict=True):
        cell.written |= on


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
    (carry, values), (ys, slices) = scan_like(params, step, start, xs)
    new_values = dict(zip([*unsliced, *sliced], [*values, *slices], strict=True))
    return [*carry, *ys], [new_values[c] for c in cells]


# Functions with a derivative rule of their own. The call becomes a call of a function of values,
# and its rule a rule for values. Both make references to the values, for the user's function or
# rule. A reference and the value that it holds have the same tangents and cotangents.


def _custom_jvp(params: dict[str, Any], args: list[Any], cells: list[RefCell]):
    """Call a `custom_jvp` function. Its rule also gets references to tangents, and may write."""
    options = _bind_params(custom_jvp_call_p, params, cells, args)
    f, rule = options.pop("subfuns")

    def primal(*values: Value) -> list[Value]:
        outs, new = _call_on_references(f, args, values)
        _mark_written(cells, [c.written for c in new])
        return [*outs, *_values(new)]

    def push(*values: Value) -> list[Value]:
        outs, new = _call_on_references(rule, [*args, *args], values)
        n, k = len(outs) // 2, len(cells)
        _mark_written(cells, [c.written or dc.written for c, dc in zip(new, new[k:], strict=False)])
        return [*outs[:n], *_values(new[:k]), *outs[n:], *_values(new[k:])]

    subfuns = wrap_like(f, primal), wrap_like(rule, push)
    outs = custom_jvp_call_p.bind(*_contents(args), subfuns=subfuns, **options)
    n = len(outs) - len(cells)
    return outs[:n], outs[n:]


def _custom_vjp(params: dict[str, Any], args: list[Any], cells: list[RefCell]):
    """Call a `custom_vjp` function. It may only write to references that have no derivative."""
    options = _bind_params(custom_vjp_call_p, params, cells, args)
    f, forward_rule, backward_rule = options.pop("subfuns")
    out_trees = options["out_trees"]
    constant = [c.constant or not differentiable(jax.typeof(c.value)) for c in cells]
    n_constant = sum(constant)

    def primal(*values: Value) -> list[Value]:
        outs, new = _call_on_references(f, args, values)
        _mark_written(cells, [c.written for c in new])
        return [*outs, *_new_constants(new, constant)]

    def forward(*values_and_flags: Any) -> list[Value]:
        with_flags = [x for a in args for x in (a, None)]
        outs, new = _call_on_references(forward_rule, with_flags, values_and_flags)
        _mark_written(cells, [c.written for c in new])
        _, _, saved_inputs = out_trees()
        if any(i is not None and isinstance(args[i], RefCell) for i in saved_inputs):
            raise _refused(
                "its forward rule saves the reference, whose content may change before the "
                "backward pass",
                "save its content: ref[...]",
            )
        return [*outs, *_new_constants(new, constant)]

    def backward(*residuals_and_cts: Any) -> Any:
        n = len(residuals_and_cts) - n_constant
        return backward_rule.call_wrapped(*residuals_and_cts[:n])

    subfuns = (
        wrap_like(f, primal),
        wrap_like(forward_rule, forward),
        wrap_like(backward_rule, backward),
    )
    outs = custom_vjp_call_p.bind(*_contents(args), subfuns=subfuns, **options)
    n = len(outs) - n_constant
    new = iter(outs[n:])
    return outs[:n], [next(new) if on else c.value for c, on in zip(cells, constant, strict=True)]


def _bind_params(
    primitive: Primitive, params: dict[str, Any], cells: list[RefCell], args: list[Any]
) -> dict[str, Any]:
    """Return the parameters with which a custom call is bound: its functions are the `subfuns`.

    Raise NotDifferentiable for references that the functions cannot get.
    """
    if len(cells) < sum(isinstance(x, RefCell) for x in args):
        raise _refused("it gets one reference twice", "pass it once")
    if any(isinstance(x, RefCell) for x in args[: params.get("num_consts", 0)]):
        raise _refused("it closes over the reference", "pass the reference as an argument")
    return dict(params) if "subfuns" in params else primitive.get_bind_params(params)


def _contents(args: Sequence[Any]) -> list[Value]:
    return [x.value if isinstance(x, RefCell) else x for x in args]


def _call_on_references(f: Any, args: Sequence[Any], values: Sequence[Any]
                        ) -> tuple[list[Value], list[RefCell]]:  # fmt: skip
    """Call a function of JAX's calling convention; return its outputs, and cells for the contents.

    It gets `values`, and where `args` has a cell a reference to the value. Flags and symbolic zeros
    are passed on. The cells say whether the function has written to them.
    """
    cells = [RefCell(_dense(x), a.constant) if isinstance(a, RefCell) else None
             for x, a in zip(values, args, strict=True)]  # fmt: skip
    fixed = [isinstance(x, bool) or (is_zero(x) and c is None)
             for x, c in zip(values, cells, strict=True)]  # fmt: skip
    inputs = [x if c is None else c for x, c in zip(values, cells, strict=True)]
    traced = [x for x, is_fixed in zip(inputs, fixed, strict=True) if not is_fixed]

    def run(*xs: Value) -> list[Value]:
        rest = iter(xs)
        pairs = zip(values, fixed, strict=True)
        outs = call_again(f, *(x if is_fixed else next(rest) for x, is_fixed in pairs))
        return list(map(_dense, outs))

    types = [reference_type(jax.typeof(x.value)) if isinstance(x, RefCell) else jax.typeof(x)
             for x in traced]  # fmt: skip
    new = [c for c in cells if c is not None]
    old_values = _values(new)
    outs = _run(*jaxpr_and_consts(jax.make_jaxpr(run)(*types)), traced)
    for cell, value in zip(new, old_values, strict=True):
        cell.written = cell.value is not value
    return outs, new


def _dense(x: Any) -> Any:
    return zeros(x.aval) if is_zero(x) else x


def _new_constants(new: Sequence[RefCell], constant: Sequence[bool]) -> list[Value]:
    """Return the contents of the constant references after a `custom_vjp` call.

    Raise NotDifferentiable if the call has written to another reference.
    """
    if any(c.written and not on for c, on in zip(new, constant, strict=True)):
        raise _refused(
            "it writes to the reference, and its rule has no cotangent of the new content",
            "return the new content, or make the reference with kind='no_grad_no_remat'",
        )
    return [c.value for c, on in zip(new, constant, strict=True) if on]


def _refused(problem: str, remedy: str) -> NotDifferentiable:
    """Return the error for a custom call with a reference that the function made."""
    request = "derivative of a custom_jvp or custom_vjp function that gets a mutable reference"
    return NotDifferentiable(request, problem, frame(), remedy)


def _run_state(params: dict[str, Any], *values: Value) -> list[Any]:
    """Run a program whose inputs are all references; returns their final values."""
    cells = [RefCell(v) for v in values]
    _run(params["jaxpr"], (), cells)
    return _values(cells)


_run_state_p = primitive_named("run_state")
MAKES_REFERENCES = (NEW_REF, EMPTY_REF, _run_state_p)
_OPERATIONS = {**OPERATIONS, _run_state_p: _run_state}
_CALLS_AND_LOOPS: dict[Primitive | None, Callable[..., Any]] = {
    jit_p: _call,
    primitive_named("closed_call"): _call,
    primitive_named("core_call"): _call,
    primitive_named("remat2"): _call,
    custom_jvp_call_p: _custom_jvp,
    custom_vjp_call_p: _custom_vjp,
    cond_p: _cond,
    while_p: _while,
    scan_p: _scan,
}
