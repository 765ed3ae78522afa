"""`linear_call`: a linear function that comes with its own transpose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.custom_derivatives import linear_call

from xform._jax import JaxprEqn, cotangent_aval
from xform.arithmetic import Value, add, instantiate
from xform.interpret.jvp import jvp
from xform.interpret.pullback import pullback
from xform.ir import Mask, evaluate, program
from xform.table import Rule, declare
from xform.traits import Traits


class LinearCall(Rule):
    """Linear in the last inputs; what stands before them is held by the call.

    The two functions serve the linear inputs, in either order; a derivative in what is held goes
    through the function itself.
    """

    def push(self, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value], dxs: Sequence[Value]):
        forth, back, n = _functions(eqn)
        terms: list[list[Value]] = []
        if any(dx is not None for dx in dxs[n:]):
            moved = instantiate(dxs, eqn.invars)
            terms.append(linear_call(forth, back, list(xs[:n]), moved[n:]))
        if any(dx is not None for dx in dxs[:n]):
            held = [*dxs[:n], *[None] * (len(xs) - n)]
            terms.append(jvp(program(eqn.params["callee"]), xs, held)[1])
        return [_sum(parts) for parts in zip(*terms, strict=True)]

    def pull(self, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value], cts: Sequence[Value],
             active: Mask):  # fmt: skip
        forth, back, n = _functions(eqn)
        full = instantiate(cts, eqn.outvars, kind=cotangent_aval)
        result: list[Value] = [None] * len(xs)
        if any(active[n:]):
            result[n:] = linear_call(back, forth, list(xs[:n]), full)
        if any(active[:n]):
            held = (*active[:n], *[False] * (len(xs) - n))
            wanted = (True,) * len(ys)
            result[:n] = pullback(program(eqn.params["callee"]), held, wanted, xs)[1](full)[:n]
        return [ct if on else None for ct, on in zip(result, active, strict=True)]


def _functions(eqn: JaxprEqn) -> tuple[Callable[..., Any], Callable[..., Any], int]:
    """The function and its transpose, both of (held, linear), and how many inputs are held.

    The held inputs are the function's constants, then what the caller named; each of the two has
    constants of its own.
    """
    params = eqn.params
    n_consts = params["num_callee_consts"]

    def forth(held: list[Value], linear: list[Value]) -> list[Value]:
        return evaluate(program(params["callee"]), [*held, *linear])

    def back(held: list[Value], linear: list[Value]) -> list[Value]:
        transpose, consts = params["transpose_thunk"]()
        return evaluate(program(transpose), [*consts, *held[n_consts:], *linear])

    return forth, back, n_consts + params["num_res"]


def _sum(terms: Sequence[Value]) -> Value:
    there = [t for t in terms if t is not None]
    return None if not there else add(there)


declare(LinearCall, "linear_call", "linear", (),
        Traits(call="callee", calls="custom"),
        known=("callee", "transpose_thunk", "num_callee_consts", "num_res"))  # fmt: skip
