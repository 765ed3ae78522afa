"""Tangents of a `custom_vjp`, which may only be transposed.

The rule of a custom_vjp cannot push tangents. So in `linearize` its tangents are the outputs of the
primitive `xform_refused`: evaluating this primitive is an error, as in JAX, but its transpose is
the user's rule. JAX has the primitive `custom_lin` for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn

import jax

from xform._jax import (
    JaxprEqn,
    Primitive,
    batching,
    cotangent_aval,
    mlir,
    tangent_aval,
)
from xform.interpret.node import Structured, gather, spread
from xform.program.arithmetic import Value, differentiable
from xform.program.arrays import zeros
from xform.program.ir import Mask, apply
from xform.program.source import frame
from xform.registry.table import declare
from xform.registry.traits import FOREIGN
from xform.rules.user_rules import (
    IN_RULE,
    call_backward,
    cotangents_for_rule,
    no_forward_mode,
    pull_by_rule,
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


def push_custom_vjp(fwd: Any, bwd: Any, out_trees: Any, symbolic: bool, xs: Sequence[Value],
                    dxs: Sequence[Value], where: str):  # fmt: skip
    """Return outputs and tangents of a `custom_vjp` in forward mode, which is an error.

    Only in the rule of a `custom_jvp` it is not: reverse mode transposes the tangents of the rule.
    """
    if not IN_RULE.get():
        raise no_forward_mode(where)
    return split_by_rule(fwd, bwd, out_trees, symbolic, xs, dxs, where)


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
        raise no_forward_mode(self._where(eqn))

    def split(self, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value], wanted: Mask):
        return self.jvp(eqn, xs, dxs)

    def vjp(self, eqn: JaxprEqn, xs: Sequence[Value], active: Mask, wanted: Mask):
        return apply(eqn, xs), self.transposed(eqn, xs, active, wanted)[1]

    def transposed(self, eqn: JaxprEqn, xs: Sequence[Value], active: Mask, wanted: Mask):
        n = self._n_residuals(eqn)
        if any(active[:n]):
            raise no_forward_mode(self._where(eqn))
        pull = lambda cts: [*[None] * n, *self._pull(eqn, xs[:n], cts)]
        return [zeros(v.aval) for v in eqn.outvars], pull

    def _where(self, eqn: JaxprEqn) -> str:
        return eqn.params["where"]

    def _n_residuals(self, eqn: JaxprEqn) -> int:
        return eqn.params["held"]

    def _pull(self, eqn: JaxprEqn, residuals: Sequence[Value], cts: Sequence[Value]) -> list[Value]:
        return eqn.params["pull"](residuals, cts)


class RefusedByJax(Refused):
    """The rule of `custom_lin`, by which JAX's own `jvp` does the same in a user's rule."""

    def _where(self, eqn: JaxprEqn) -> str:
        return frame(eqn)

    def _n_residuals(self, eqn: JaxprEqn) -> int:
        return eqn.params["num_res"]

    def _pull(self, eqn: JaxprEqn, residuals: Sequence[Value], cts: Sequence[Value]) -> list[Value]:
        params, n = eqn.params, self._n_residuals(eqn)
        ct_avals = [cotangent_aval(v.aval) for v in eqn.outvars]
        given = cotangents_for_rule(cts, ct_avals, params["symbolic_zeros"])
        active = [not zero for zero in params["in_zeros"]]
        in_avals = [cotangent_aval(v.aval) for v in eqn.invars[n:]]
        return call_backward(params["bwd"], residuals, given, active, in_avals)


declare(Refused, refused_p, "structured", (), FOREIGN, supported_params=None)
declare(RefusedByJax, "custom_lin", "structured", (), FOREIGN, supported_params=None)
