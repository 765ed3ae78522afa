"""Derivatives that the user wrote: custom_jvp, custom_vjp, and custom_linear_solve.

A custom_jvp rule is called once, and computes outputs and tangents together. For reverse mode xform
transposes its tangent part. The forward function of a custom_vjp is traced into the forward pass,
so its residuals are ordinary values there, and the planner decides which of them are saved. Its
backward function is called in the backward pass.

The rule of a custom_vjp cannot push tangents. So in `linearize` its tangents are the outputs of the
primitive `xform_refused`: evaluating this primitive is an error, as in JAX, but its transpose is
the user's rule. The base class `Structured` describes the methods of a rule
(`xform.interpret.node`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from xform._jax import (
    JaxprEqn,
    Primitive,
    SymbolicZero,
    ad,
    batching,
    cotangent_aval,
    is_zero,
    mlir,
    pull_custom_vjp,
    tangent_aval,
    zeros,
)
from xform.errors import NotDifferentiable
from xform.interpret.absent import group_cotangents
from xform.interpret.cost import flops
from xform.interpret.jvp import jvp
from xform.interpret.logs import log
from xform.interpret.node import Structured, gather, spread
from xform.interpret.pullback import RULE_RETURNED_NONE, pull_of_jvp, pullback
from xform.passes.structured import called_body
from xform.program.arithmetic import Value, as_jax_value, as_jax_values, differentiable, instantiate
from xform.program.ir import Mask, apply, program, trace
from xform.program.source import frame
from xform.registry.table import declare
from xform.registry.traits import FOREIGN, Traits


def _fill_zeros(values: Sequence[Value], avals: Sequence[Any], symbolic: bool) -> list[Value]:
    """Replace None by zeros, or by JAX's symbolic zeros if the custom rule takes these."""
    if not symbolic:
        return instantiate(values, avals)
    pairs = zip(values, avals, strict=True)
    return [SymbolicZero(tangent_aval(a)) if x is None else x for x, a in pairs]


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


def push_by_rule(
    rule: Callable[..., Any], symbolic: bool, xs: Sequence[Value], dxs: Sequence[Value]
):
    """Call the rule of a `custom_jvp`; return the outputs and their tangents."""
    out = rule(*indexable(xs), *_fill_zeros(dxs, list(map(jax.typeof, xs)), symbolic))
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
    avals = [cotangent_aval(jax.typeof(y)) for y in ys]

    def pull(residuals: Sequence[Value], cts: Sequence[Value]) -> list[Value]:
        out, entries = pull_custom_vjp(
            bwd, residuals, _fill_zeros(group_cotangents(cts), avals, symbolic)
        )
        log(entries, "custom_vjp", frame())
        cotangent = lambda ct: RULE_RETURNED_NONE if none_if_zero(ct) is None else ct
        return [cotangent(ct) if on else None for ct, on in zip(out, active, strict=True)]

    return ys, residuals, pull


def no_forward_mode(where: str) -> NotDifferentiable:
    """Return the error for forward mode through a `custom_vjp`."""
    return NotDifferentiable(
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


# The tangents of a `custom_vjp` in the linear map that `linearize` returns. The inputs are its
# residuals and the tangents of its inputs. As in JAX, calling the map is an error. The transpose of
# the primitive is the user's rule, `pull`. `held` is the number of residuals.
refused_p = Primitive("xform_refused")
refused_p.multiple_results = True
refused_p.def_abstract_eval(lambda *_, where, avals, pull, held: list(avals))


def _refuse(*_: Any, where: str, **__: Any) -> NoReturn:
    """Raise the error for forward mode."""
    raise no_forward_mode(where)


refused_p.def_impl(_refuse)
mlir.register_lowering(refused_p, lambda ctx, *_, where, **params: _refuse(where=where))
batching.primitive_batchers[refused_p] = lambda xs, axes, *, where, **params: _refuse(where=where)


def split_by_rule(fwd: Any, bwd: Any, out_trees: Any, symbolic: bool, xs: Sequence[Value],
                  dxs: Sequence[Value], where: str) -> tuple[list[Value], list[Value]]:  # fmt: skip
    """Return outputs of a `custom_vjp`, and tangents that may only be transposed."""
    active = tuple(dx is not None for dx in dxs)
    return refuse_push(*pull_by_rule(fwd, bwd, out_trees, symbolic, xs, active), dxs, where)


def refuse_push(ys: Sequence[Value], residuals: Sequence[Value], pull: Callable[..., list[Value]],
                dxs: Sequence[Value], where: str) -> tuple[list[Value], list[Value]]:  # fmt: skip
    """Return outputs, and tangents for a rule that can only pull cotangents.

    `pull` is a function of residuals and cotangents. Evaluating the tangents is an error, but they
    can be transposed.
    """
    active = tuple(dx is not None for dx in dxs)
    on = tuple(differentiable(jax.typeof(y)) for y in ys)
    avals = tuple(tangent_aval(jax.typeof(y)) for y in gather(ys, on))

    def pull_active(residuals: Sequence[Value], cts: Sequence[Value]) -> list[Value]:
        return gather(pull(residuals, spread(cts, on)), active)

    dys = refused_p.bind(*residuals, *gather(dxs, active), where=where, avals=avals,
                         pull=pull_active, held=len(residuals))  # fmt: skip
    return list(ys), spread(dys, on)


class Refused(Structured):
    """The rule of `xform_refused`, which has a transpose but no derivative."""

    calls_user_function: ClassVar[bool] = True

    def jvp(self, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value]):
        _refuse(where=eqn.params["where"])

    def split(self, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value], wanted: Mask):
        _refuse(where=eqn.params["where"])

    def vjp(self, eqn: JaxprEqn, xs: Sequence[Value], active: Mask, wanted: Mask):
        n_residuals = eqn.params["held"]
        residuals = xs[:n_residuals]
        if any(active[:n_residuals]):
            _refuse(where=eqn.params["where"])
        pull = lambda cts: [*[None] * n_residuals, *eqn.params["pull"](residuals, cts)]
        return apply(eqn, xs), pull

    def transposed(self, eqn: JaxprEqn, xs: Sequence[Value], active: Mask, wanted: Mask):
        _, pull = self.vjp(eqn, xs, active, wanted)
        return [zeros(v.aval) for v in eqn.outvars], pull


def outputs_with_tangent(jvp: Callable[..., Any], eqn: JaxprEqn, active: Mask, outs: Mask,
                         cache: dict[Any, Any]) -> Mask:  # fmt: skip
    """Which of the outputs `outs` get a tangent from a user's jvp rule.

    A rule that takes symbolic zeros may also return them. To find out, the rule is traced once, and
    the answer is kept in `cache`.
    """
    if any(outs) and ("tangents", active) not in cache:
        cache["tangents", active] = _trace_tangents(jvp, eqn, active, outs)
    return cache["tangents", active] if any(outs) else outs


def _trace_tangents(jvp: Callable[..., Any], eqn: JaxprEqn, active: Mask, outs: Mask) -> Mask:
    """Trace a jvp rule with tangents for `active` inputs; return which `outs` get a tangent."""
    has_tangent: list[bool] = []

    def push(*values: Value) -> list[Value]:
        n = len(active)
        _, dys = jvp(eqn, values[:n], spread(values[n:], active))
        has_tangent[:] = [dy is not None for dy in dys]
        return gather(dys, has_tangent)

    avals = [v.aval for v in eqn.invars]
    try:
        trace(push, *avals, *map(tangent_aval, gather(avals, active)))
    except Exception:  # a rule that fails raises again where its derivative is needed
        return outs
    return tuple(a and b for a, b in zip(outs, has_tangent, strict=True))


class CustomJvp(Structured):
    """The rule of `jax.custom_jvp`."""

    def active(self, eqn: JaxprEqn, active: Mask) -> Mask:
        outs = super().active(eqn, active)
        if not eqn.params["symbolic_zeros"]:
            return outs
        return outputs_with_tangent(self.jvp, eqn, active, outs, called_body(eqn).cache)

    def jvp(self, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value]):
        _, rule = eqn.primitive.get_bind_params(eqn.params)["subfuns"]
        ys, dys = push_by_rule(rule.call_wrapped, eqn.params["symbolic_zeros"], xs, dxs)
        return as_jax_values(ys), as_jax_values(dys)

    def split(self, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value], wanted: Mask):
        return self.jvp(eqn, xs, dxs)

    def vjp(self, eqn: JaxprEqn, xs: Sequence[Value], active: Mask, wanted: Mask):
        return pull_of_jvp(lambda xs, dxs: self.jvp(eqn, xs, dxs), xs, active, wanted)


class CustomVjp(Structured):
    """The rule of `jax.custom_vjp`."""

    calls_user_function: ClassVar[bool] = True

    def jvp(self, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value]):
        raise no_forward_mode(frame(eqn))

    def split(self, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value], wanted: Mask):
        rules = self._rules(eqn, tuple(dx is not None for dx in dxs))
        ys, dys = split_by_rule(*rules, xs, dxs, frame(eqn))
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
declare(Refused, refused_p, "structured", (), FOREIGN, supported_params=None)
declare(CustomVjp, "custom_vjp_call", "structured", (), _CUSTOM, supported_params=(
    "call_jaxpr", "fwd_jaxpr_thunk", "bwd", "num_consts", "out_trees", "symbolic_zeros",
))  # fmt: skip
declare(LinearSolve, "custom_linear_solve", "structured", (),
        Traits(foldable=False, flops=lambda e: flops(program(e.params["jaxprs"].solve))),
        supported_params=("jaxprs", "const_lengths"))  # fmt: skip
