"""The rule of `jax.custom_derivatives.linear_call`: a linear function with the user's transpose."""

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
    """The rule of `linear_call`. The call is linear in its last inputs; the others are fixed.

    For the linear inputs, a push calls the function, and a pull calls its transpose. Both calls are
    a `linear_call` again, so they can be transposed too. For the fixed inputs, the function's own
    program is differentiated.
    """

    def push(self, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value], dxs: Sequence[Value]):
        function, transpose, n = _functions(eqn)
        terms: list[list[Value]] = []
        if any(dx is not None for dx in dxs[n:]):
            full = instantiate(dxs, eqn.invars)
            terms.append(linear_call(function, transpose, list(xs[:n]), full[n:]))
        if any(dx is not None for dx in dxs[:n]):
            of_fixed = [*dxs[:n], *[None] * (len(xs) - n)]
            terms.append(jvp(program(eqn.params["callee"]), xs, of_fixed)[1])
        return [_sum(parts) for parts in zip(*terms, strict=True)]

    def pull(self, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value], cts: Sequence[Value],
             active: Mask):  # fmt: skip
        function, transpose, n = _functions(eqn)
        full = instantiate(cts, eqn.outvars, kind=cotangent_aval)
        in_cts: list[Value] = [None] * len(xs)
        if any(active[n:]):
            in_cts[n:] = linear_call(transpose, function, list(xs[:n]), full)
        if any(active[:n]):
            of_fixed = (*active[:n], *[False] * (len(xs) - n))
            wanted = (True,) * len(ys)
            _, pull = pullback(program(eqn.params["callee"]), of_fixed, wanted, xs)
            in_cts[:n] = pull(full)[:n]
        return [ct if on else None for ct, on in zip(in_cts, active, strict=True)]


def _functions(eqn: JaxprEqn) -> tuple[Callable[..., Any], Callable[..., Any], int]:
    """Return the function, its transpose, and the number of fixed inputs.

    Both functions take a list of fixed inputs and a list of linear inputs. The fixed inputs are the
    function's constants, then the residuals that the caller passed. The transpose does not use the
    function's constants, and has constants of its own.
    """
    params = eqn.params
    n_consts = params["num_callee_consts"]

    def function(fixed: list[Value], linear: list[Value]) -> list[Value]:
        return evaluate(program(params["callee"]), [*fixed, *linear])

    def transpose(fixed: list[Value], linear: list[Value]) -> list[Value]:
        jaxpr, consts = params["transpose_thunk"]()
        return evaluate(program(jaxpr), [*consts, *fixed[n_consts:], *linear])

    return function, transpose, n_consts + params["num_res"]


def _sum(terms: Sequence[Value]) -> Value:
    """Return the sum of the terms that are not None; None if all terms are None."""
    present = [t for t in terms if t is not None]
    return None if not present else add(present)


declare(LinearCall, "linear_call", "linear", (),
        Traits(call="callee", calls="custom"),
        supported_params=("callee", "transpose_thunk", "num_callee_consts", "num_res"))  # fmt: skip
