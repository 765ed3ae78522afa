"""Call the functions of users' derivative rules, of `custom_jvp` and of `custom_vjp`.

A custom_jvp rule is called once, and computes outputs and tangents together. The forward function
of a custom_vjp returns outputs and residuals. Its backward function is called with the residuals in
the backward pass.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xform._jax import (
    JaxprEqn,
    SymbolicZero,
    ad,
    cotangent_aval,
    is_zero,
    jaxprs_of,
    tangent_aval,
)
from xform._jax.custom_functions import BACKWARD_FILLS_ZEROS, pull_custom_vjp
from xform.errors import NoForwardMode, NotDifferentiable
from xform.interpret.absent import group_cotangents
from xform.interpret.ahead import runs_ahead
from xform.interpret.logs import log
from xform.interpret.pullback import RULE_RETURNED_NONE
from xform.program.arithmetic import Value, as_jax_value, instantiate
from xform.program.arrays import zeros
from xform.program.ir import Mask, Program, gather, program, spread
from xform.program.source import frame
from xform.registry.table import Rule, rule_of


def fill_zeros(values: Sequence[Value], avals: Sequence[Any], symbolic: bool) -> list[Value]:
    """Replace None by zeros, or by JAX's symbolic zeros if the custom rule takes these."""
    if not symbolic:
        return instantiate(values, avals)
    pairs = zip(values, avals, strict=True)
    return [SymbolicZero(tangent_aval(a)) if x is None else x for x, a in pairs]


def cotangents_for_rule(cts: Sequence[Value], avals: Sequence[Any], symbolic: bool) -> list[Value]:
    """Return the cotangents that the backward function of a `custom_vjp` gets.

    `symbolic` says whether the user's function takes symbolic zeros. The function that `vmap` puts
    around it must know which cotangents are zero in any case.
    """
    return fill_zeros(group_cotangents(cts), avals, symbolic or BACKWARD_FILLS_ZEROS)


def indexable(xs: Sequence[Value]) -> list[Value]:
    """Convert NumPy arrays to JAX arrays, which a custom rule may index by traced values."""
    return [jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in xs]


def residual_for_rule(x: Value) -> Value:
    """Convert a residual for the backward function: a Python number that is no bool to an array."""
    return x if isinstance(x, bool) else as_jax_value(x)


def none_if_zero(x: Value) -> Value:
    """Return a derivative from a user's rule; None for JAX's symbolic zeros and for float0."""
    if x is None or is_zero(x):
        return None
    return None if getattr(jax.typeof(x), "dtype", None) == jax.dtypes.float0 else x


def with_jax_zeros(values: Sequence[Value], variables: Sequence[Any],
                   kind: Callable[[Any], Any]) -> list[Value]:  # fmt: skip
    """Replace None among tangents or cotangents by `ad.Zero`, JAX's symbolic zero.

    `variables` are the primals. `kind` is `tangent_aval` or `cotangent_aval`.
    """
    pairs = zip(values, variables, strict=True)
    return [ad.Zero(kind(v.aval)) if x is None else x for x, v in pairs]


# Whether the rule of a `custom_jvp` is running.
IN_RULE: contextvars.ContextVar[bool] = contextvars.ContextVar("xform_in_rule", default=False)


@contextlib.contextmanager
def running_rule() -> Generator[None]:
    """Return a context in which the rule of a `custom_jvp` runs."""
    token = IN_RULE.set(True)
    try:
        yield
    finally:
        IN_RULE.reset(token)


def push_by_rule(
    rule: Callable[..., Any], symbolic: bool, xs: Sequence[Value], dxs: Sequence[Value]
):
    """Call the rule of a `custom_jvp`; return the outputs and their tangents."""
    with running_rule():
        out = rule(*xs, *fill_zeros(dxs, list(map(jax.typeof, xs)), symbolic))
    n = len(out) // 2
    return list(out[:n]), [none_if_zero(dy) for dy in out[n:]]


def pull_by_rule(fwd: Any, bwd: Any, out_trees: Any, symbolic: bool, xs: Sequence[Value],
                 active: Mask
                 ) -> tuple[list[Value], list[Value], Callable[..., list[Value]]]:  # fmt: skip
    """Call the forward rule of a `custom_vjp`; return outputs, residuals, and the pullback.

    The pullback is a function of residuals and cotangents, which calls the backward rule.
    """
    xs = indexable(xs)
    out = fwd.call_wrapped(*[a for pair in zip(xs, active, strict=True) for a in pair])
    _, res_tree, forwarded = out_trees()
    n = res_tree.num_leaves - sum(i is not None for i in forwarded)
    leaves, ys = iter(out[:n]), list(out[n:])
    residuals = [residual_for_rule(next(leaves)) if i is None else xs[i] for i in forwarded]
    ct_avals = [cotangent_aval(jax.typeof(y)) for y in ys]
    in_avals = [cotangent_aval(jax.typeof(x)) for x in gather(xs, active)]

    def pull(residuals: Sequence[Value], cts: Sequence[Value]) -> list[Value]:
        given = cotangents_for_rule(cts, ct_avals, symbolic)
        return spread(call_backward(bwd, residuals, given, active, in_avals), active)

    return ys, residuals, pull


def call_backward(bwd: Any, residuals: Sequence[Value], cts: Sequence[Value],
                  active: Sequence[bool], in_avals: Sequence[Any]) -> list[Value]:  # fmt: skip
    """Call the backward function of a `custom_vjp`; return the cotangents of the `active` inputs.

    `in_avals` are the types of these cotangents.
    """
    try:
        out, entries = pull_custom_vjp(bwd, residuals, cts)
    except Exception:
        if not runs_ahead():
            raise
        return list(map(zeros, in_avals))
    log(entries, "custom_vjp", frame())
    return [RULE_RETURNED_NONE if none_if_zero(ct) is None else ct for ct in gather(out, active)]


def no_forward_mode(where: str) -> NoForwardMode:
    """Return the error for forward mode through a `custom_vjp`."""
    return NoForwardMode(
        "forward-mode autodiff (jvp) of a custom_vjp function",
        "its rule says how to pull cotangents back, not how to push tangents forward",
        where,
        "use reverse mode (grad, vjp), or give the function a jax.custom_jvp rule instead",
    )


def closes_over_active(where: str) -> NotDifferentiable:
    """Return the error for a `custom_vjp` that closes over a value that is being differentiated."""
    return NotDifferentiable(
        "derivative of a custom_vjp function",
        "it closes over a value that is being differentiated, which its rule cannot see",
        where,
        "pass the value as an argument of the function",
    )


def calls_custom(prog: Program) -> bool:
    """Return whether a program calls functions with rules of their own, or a program in it does."""
    return _any_equation(prog, "calls custom", lambda eqn, rule: rule.traits.calls == "custom")


def calls_backward(prog: Program) -> bool:
    """Return whether a user's backward function is called to differentiate a program."""
    return _any_equation(prog, "calls backward", lambda eqn, rule: rule.calls_user_function)


def calls_with_symbolic_zeros(prog: Program) -> bool:
    """Return whether a backward function is called that is told which cotangents are zero."""
    return _any_equation(prog, "symbolic zeros", _takes_symbolic_zeros)


def _takes_symbolic_zeros(eqn: JaxprEqn, rule: Rule) -> bool:
    options = {**vars(eqn.params.get("_prim", rule)), **eqn.params}  # a call may be an object
    return rule.calls_user_function and bool(options.get("symbolic_zeros"))


def _any_equation(prog: Program, key: str, test: Callable[[JaxprEqn, Rule], bool]) -> bool:
    """Return whether `test` holds for an equation of a program, or of a program in it.

    The answer is kept under `key`.
    """
    if key not in prog.cache:
        prog.cache[key] = any(
            ((rule := rule_of(eqn.primitive)) is not None and test(eqn, rule))
            or any(_any_equation(program(jaxpr), key, test) for jaxpr in jaxprs_of(eqn))
            for eqn in prog.equations
        )
    return prog.cache[key]
