"""The rules of custom_jvp, custom_vjp and custom_linear_solve.

For reverse mode xform transposes the tangent part of a custom_jvp rule. The forward function of a
custom_vjp is traced into the forward pass, so its residuals are ordinary values there, and the
planner decides which of them are saved. `rules/call_time.py` says when the users' rules run. The
base class `Structured` describes the methods of a rule (`xform.interpret.node`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any, ClassVar

import jax

from xform._jax import JaxprEqn, cotangent_aval
from xform._jax.custom_functions import trace_forward_rule, traced_jvp_rule, wrap_like
from xform.errors import NotDifferentiable
from xform.interpret.cost import flops
from xform.interpret.jvp import jvp
from xform.interpret.node import Structured, present_mask
from xform.interpret.pullback import pull_of_jvp, pullback
from xform.program.arithmetic import Value, as_jax_values, instantiate
from xform.program.ir import Mask, apply, context, program
from xform.program.source import frame, name_stack, source
from xform.registry.table import declare
from xform.registry.traits import Traits
from xform.rules.refused import push_custom_vjp, split_by_rule
from xform.rules.staged_rules import StagedForward, StagedJvp, staged_rule
from xform.rules.user_rules import (
    closes_over_active,
    pull_by_rule,
    push_by_rule,
    running_rule,
)


@contextlib.contextmanager
def _at_call(eqn: JaxprEqn) -> Generator[None]:
    """Return a context in which JAX traces a rule, and keeps the trace: with the call's lines."""
    with source(eqn, name_stack()), context(eqn):
        yield


class CustomJvp(Structured):
    """The rule of `jax.custom_jvp`."""

    def active(self, eqn: JaxprEqn, active: Mask) -> Mask:
        outs = super().active(eqn, active)
        if not any(outs):
            return outs
        staged = self._staged(eqn, active)
        try:
            with running_rule(), _at_call(eqn):
                has_tangent = staged.has_tangent if staged else traced_jvp_rule(eqn.params, active)
        except Exception:  # a rule that fails raises again where its derivative is needed
            return outs
        return tuple(a and b for a, b in zip(outs, has_tangent, strict=True))

    def jvp(self, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value]):
        staged, n = self._staged(eqn, present_mask(dxs)), eqn.params["num_consts"]
        if staged:
            ys, dys = staged.push(xs[n:], dxs[n:])
        else:
            _, rule = eqn.primitive.get_bind_params(eqn.params)["subfuns"]
            ys, dys = push_by_rule(rule.call_wrapped, eqn.params["symbolic_zeros"], xs, dxs)
        return as_jax_values(ys), as_jax_values(dys)

    def _staged(self, eqn: JaxprEqn, active: Mask) -> StagedJvp | None:
        """Return the rule that was traced at the call, if it serves the `active` inputs."""
        staged = staged_rule(eqn, "jvp_jaxpr_fun", StagedJvp)
        return staged if staged and staged.serves(active[eqn.params["num_consts"] :]) else None

    def split(self, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value], wanted: Mask):
        return self.jvp(eqn, xs, dxs)

    def vjp(self, eqn: JaxprEqn, xs: Sequence[Value], active: Mask, wanted: Mask):
        return pull_of_jvp(lambda xs, dxs: self.jvp(eqn, xs, dxs), xs, active, wanted)


class CustomVjp(Structured):
    """The rule of `jax.custom_vjp`."""

    calls_user_function: ClassVar[bool] = True

    def active(self, eqn: JaxprEqn, active: Mask) -> Mask:
        outs = super().active(eqn, active)
        if any(outs) and not staged_rule(eqn, "fwd_jaxpr_thunk", StagedForward):
            # A rule that fails raises again where its derivative is needed.
            with contextlib.suppress(Exception), _at_call(eqn):
                trace_forward_rule(eqn.params, active)
        return outs

    def jvp(self, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value]):
        return self._tangents(push_custom_vjp, eqn, xs, dxs)

    def split(self, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value], wanted: Mask):
        return self._tangents(split_by_rule, eqn, xs, dxs)

    def _tangents(self, by: Callable[..., Any], eqn: JaxprEqn, xs: Sequence[Value],
                  dxs: Sequence[Value]) -> tuple[list[Value], list[Value]]:  # fmt: skip
        rules = self._rules(eqn, tuple(dx is not None for dx in dxs))
        ys, dys = by(*rules, xs, dxs, frame(eqn))
        return as_jax_values(ys), dys

    def vjp(self, eqn: JaxprEqn, xs: Sequence[Value], active: Mask, wanted: Mask):
        ys, residuals, pull = pull_by_rule(*self._rules(eqn, active), xs, active)
        return as_jax_values(ys), lambda cts: pull(residuals, cts)

    def _rules(self, eqn: JaxprEqn, active: Mask) -> tuple[Any, Any, Any, bool]:
        """Return forward rule, backward rule, their output trees, and whether zeros are symbolic.

        Raises NotDifferentiable if the function closes over an active value.
        """
        if any(active[: eqn.params["num_consts"]]):
            raise closes_over_active(frame(eqn))
        _, fwd, bwd = eqn.primitive.get_bind_params(eqn.params)["subfuns"]
        if staged := staged_rule(eqn, "fwd_jaxpr_thunk", StagedForward):
            n = eqn.params["num_consts"]
            fwd = wrap_like(fwd, lambda *values_and_flags: staged(*values_and_flags[2 * n :]))
        return fwd, bwd, eqn.params["out_trees"], eqn.params["symbolic_zeros"]


class LinearSolve(Structured):
    """The rule of `custom_linear_solve`: solve A x = b for x, with a function A and given solvers.

    The tangent is dx = A^-1 (db - dA x). With x' for the cotangent of x, the cotangents are b' =
    A^-T x' and A' = -b' x^T. The pullback of A at x computes A'. Source: Giles, "Collected matrix
    derivative results for forward and reverse mode", 2008, section 2.3.1.
    """

    def _parts(self, eqn: JaxprEqn, values: Sequence[Any]):
        """Split values of the inputs into constants of four functions, and right-hand sides.

        The functions are matvec, vecmat, solve and transpose_solve.
        """
        parts, start = [], 0
        for n in eqn.params["const_lengths"]:
            parts.append(list(values[start : start + n]))
            start += n
        return parts, list(values[start:])

    def jvp(self, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value]):
        ys = apply(eqn, xs)
        (consts, *_), _ = self._parts(eqn, xs)
        (dconsts, *_), dbs = self._parts(eqn, dxs)
        matvec = program(eqn.params["jaxprs"].matvec)
        _, da_ys = jvp(matvec, [*consts, *ys], [*dconsts, *[None] * len(ys)])  # dA x
        rhs = [_minus(db, da_y, v) for db, da_y, v in zip(dbs, da_ys, eqn.outvars, strict=True)]
        return ys, apply(eqn, [*xs[: len(xs) - len(dbs)], *rhs])

    def split(self, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value], wanted: Mask):
        return self.jvp(eqn, xs, dxs)

    def vjp(self, eqn: JaxprEqn, xs: Sequence[Value], active: Mask, wanted: Mask):
        jaxprs = eqn.params["jaxprs"]
        if jaxprs.transpose_solve is None:
            raise NotDifferentiable(
                "reverse-mode derivative of custom_linear_solve",
                "it was called without transpose_solve",
                frame(eqn),
                "pass transpose_solve=, or symmetric=True if the operator is symmetric",
            )
        ys = apply(eqn, xs)
        parts, bs = self._parts(eqn, xs)
        on, _ = self._parts(eqn, active)
        no_outputs = (False,) * len(ys)
        matvec, mask = program(jaxprs.matvec), (*on[0], *no_outputs)
        _, pull_matvec = pullback(matvec, mask, (True,) * len(ys), [*parts[0], *ys])

        def pull(cts: Sequence[Value]) -> list[Value]:
            lengths = eqn.params["const_lengths"].transpose()
            transposed_eqn = eqn.replace(
                params={**eqn.params, "const_lengths": lengths, "jaxprs": jaxprs.transpose()}
            )
            full = instantiate(cts, eqn.outvars, kind=cotangent_aval)
            of_matvec, of_vecmat, of_solve, of_transpose_solve = parts
            swapped = [*of_vecmat, *of_matvec, *of_transpose_solve, *of_solve]
            ct_bs = apply(transposed_eqn, [*swapped, *full])
            ct_consts = pull_matvec(ct_bs)[: len(of_matvec)]
            negated = [None if ct is None else jax.lax.neg(ct) for ct in ct_consts]
            others = len(xs) - len(negated) - len(bs)
            return [*negated, *[None] * others, *ct_bs]

        return ys, pull


def _minus(a: Value, b: Value, v: Any) -> Value:
    """Return a - b, where None is zero. `v` is a variable of the same type."""
    if b is None:
        return instantiate([a], [v])[0]
    return jax.lax.neg(b) if a is None else jax.lax.sub(a, b)


_CUSTOM = Traits(call="call_jaxpr", calls="custom")

declare(CustomJvp, "custom_jvp_call", "structured", (), _CUSTOM, supported_params=(
    "call_jaxpr", "jvp_jaxpr_fun", "num_consts", "symbolic_zeros",
))  # fmt: skip
declare(CustomVjp, "custom_vjp_call", "structured", (), _CUSTOM, supported_params=(
    "call_jaxpr", "fwd_jaxpr_thunk", "bwd", "num_consts", "out_trees", "symbolic_zeros",
))  # fmt: skip
declare(LinearSolve, "custom_linear_solve", "structured", (),
        Traits(foldable=False, flops=lambda e: flops(program(e.params["jaxprs"].solve))),
        supported_params=("jaxprs", "const_lengths"))  # fmt: skip
