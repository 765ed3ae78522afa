"""`linear_call`: a linear function with a transpose given by the user."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.custom_derivatives import linear_call

from xform._jax import JaxprEqn, cotangent_aval
from xform.interpret.jvp import jvp
from xform.interpret.pullback import pullback
from xform.program.arithmetic import Value, add, instantiate
from xform.program.ir import Mask, evaluate, program
from xform.registry.table import Rule, declare
from xform.registry.traits import Traits


class LinearCall(Rule):
    """The rule of a call that is linear in its last inputs; the inputs before them are fixed.

    The function and its transpose serve the linear inputs, in either order. A derivative in the
    fixed inputs goes through the function itself.
    """

    def push(self, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value], dxs: Sequence[Value]):
        forth, back, n = _functions(eqn)
        terms: list[list[Value]] = []
        if any(dx is not None for dx in dxs[n:]):
            moved = instantiate(dxs, eqn.invars)
            terms.append(linear_call(forth, back, list(xs[:n]), moved[n:]))
        if any(dx is not None for dx in dxs[:n]):
            fixed = [*dxs[:n], *[None] * (len(xs) - n)]
            terms.append(jvp(program(eqn.params["callee"]), xs, fixed)[1])
        return [_sum(parts) for parts in zip(*terms, strict=True)]

    def pull(self, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value], cts: Sequence[Value],
             active: Mask):  # fmt: skip
        forth, back, n = _functions(eqn)
        full = instantiate(cts, eqn.outvars, kind=cotangent_aval)
        result: list[Value] = [None] * len(xs)
        if any(active[n:]):
            result[n:] = linear_call(back, forth, list(xs[:n]), full)
        if any(active[:n]):
            fixed = (*active[:n], *[False] * (len(xs) - n))
            wanted = (True,) * len(ys)
            result[:n] = pullback(program(eqn.params["callee"]), fixed, wanted, xs)[1](full)[:n]
        return [ct if on else None for ct, on in zip(result, active, strict=True)]


def _functions(eqn: JaxprEqn) -> tuple[Callable[..., Any], Callable[..., Any], int]:
    """Return the function and its transpose, both of (fixed, linear); and how many are fixed.

    The fixed inputs are the function's constants, then the residuals that the caller passed. The
    transpose has constants of its own.
    """
    params = eqn.params
    n_consts = params["num_callee_consts"]

    def forth(fixed: list[Value], linear: list[Value]) -> list[Value]:
        return evaluate(program(params["callee"]), [*fixed, *linear])

    def back(fixed: list[Value], linear: list[Value]) -> list[Value]:
        transpose, consts = params["transpose_thunk"]()
        return evaluate(program(transpose), [*consts, *fixed[n_consts:], *linear])

    return forth, back, n_consts + params["num_res"]


def _sum(terms: Sequence[Value]) -> Value:
    present = [t for t in terms if t is not None]
    return None if not present else add(present)


declare(LinearCall, "linear_call", "linear", (),
        Traits(call="callee", calls="custom"),
        known=("callee", "transpose_thunk", "num_callee_consts", "num_res"))  # fmt: skip
