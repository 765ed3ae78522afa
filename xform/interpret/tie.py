"""`tie`: an identity on saved values that cannot run before the cotangents have arrived.

A recompute is the same computation as the forward part, and a compiler that sees both merges them:
then the value stays live and nothing is saved. `tie(saved..., cotangents...) -> saved` makes the
recompute depend on the cotangents. Where the backend keeps optimization barriers (GPU, TPU) it
is one; XLA:CPU drops barriers before merging, so there it is a select on a predicate that is always
true and that the compiler cannot know: `(bits of a cotangent's first element | 1) != 0`. A select
costs time, where it keeps XLA from fusing: a `light` tie, of which the recompute makes little, is
nothing on CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xform._jax import JaxprEqn, Primitive, ShapedArray, ad, batching, mlir
from xform.arithmetic import Value, differentiable
from xform.ir import Mask
from xform.table import declare
from xform.traits import Traits
from xform.words import Linear

tie_p = Primitive("tie")
tie_p.multiple_results = True
tie_p.def_impl(lambda *args, n, light: list(args[:n]))
tie_p.def_abstract_eval(lambda *avals, n, light: list(avals[:n]))


def tie(saved: Sequence[Value], seconds: Sequence[Value], light: bool = False) -> list[Value]:
    """`saved`, available only once `seconds` are. Costs nothing but the order on GPU and TPU."""
    usable = [s for s in seconds if s.size and jnp.issubdtype(s.dtype, np.number)]
    if not saved or not usable:
        return list(saved)
    return tie_p.bind(*saved, *usable, n=len(saved), light=light)


def _opaque_true(x: Value) -> Value:
    """A true scalar that depends on one element of `x`."""
    corner = lax.squeeze(lax.slice(x, (0,) * x.ndim, (1,) * x.ndim), tuple(range(x.ndim)))
    if jnp.issubdtype(corner.dtype, np.complexfloating):
        corner = lax.real(corner)
    bits = lax.bitcast_convert_type(corner, np.dtype(f"uint{corner.dtype.itemsize * 8}"))
    one = np.asarray(1, bits.dtype)
    return lax.ne(lax.bitwise_or(bits, one), np.asarray(0, bits.dtype))


def _select(*args: Value, n: int, light: bool) -> list[Value]:
    if light:
        return list(args[:n])
    true = functools.reduce(lax.bitwise_and, [_opaque_true(x) for x in args[n:]])
    return [lax.select(lax.broadcast(true, x.shape), x, lax.full_like(x, 0)) for x in args[:n]]


def _barrier(*args: Value, n: int, light: bool) -> Any:
    return lax.optimization_barrier(args)[:n]


def _jvp(primals: Sequence[Value], tangents: Sequence[Value], *, n: int, light: bool):
    on = [i for i in range(n) if differentiable(jax.typeof(primals[i]))]
    dxs = [ad.instantiate_zeros(tangents[i]) for i in on]
    dys = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in primals[:n]]
    for i, dy in zip(on, tie_p.bind(*dxs, *primals[n:], n=len(on), light=light), strict=True):
        dys[i] = dy
    return tie_p.bind(*primals, n=n, light=light), dys


def _batch(args: Sequence[Value], dims: Sequence[Any], **how: Any):
    return tie_p.bind(*args, **how), dims[: how["n"]]


def _lowering(f: Any) -> Any:
    """Lower `f` on plain types: what it does to a corner element has no sharding to speak of.

    And with no mesh: on one with Explicit axes plain types would be replicated, values gathered.
    """
    lower = mlir.lower_fun(f, multiple_results=True)

    def plain(avals: Sequence[Any]) -> list[ShapedArray]:
        return [ShapedArray(a.shape, a.dtype) for a in avals]

    def rule(ctx: Any, *args: Any, **params: Any) -> Any:
        ctx = ctx.replace(avals_in=plain(ctx.avals_in), avals_out=plain(ctx.avals_out))
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            return lower(ctx, *args, **params)

    return rule


mlir.register_lowering(tie_p, _lowering(_select), platform="cpu")
mlir.register_lowering(tie_p, _lowering(_barrier))
batching.primitive_batchers[tie_p] = _batch
ad.primitive_jvps[tie_p] = _jvp
ad.primitive_transposes[tie_p] = lambda cts, *args, n, light: [
    *(ad.instantiate_zeros(ct) for ct in cts),
    *[None] * (len(args) - n),
]


class _Tie(Linear):
    """Linear in the saved values, each by itself; the cotangents are only waited for."""

    def active(self, eqn: JaxprEqn, active: Mask) -> Mask:
        pairs = zip(active, eqn.outvars, strict=False)
        return tuple(on and differentiable(v.aval) for on, v in pairs)

    def push(self, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value], dxs: Sequence[Value]):
        n, light = eqn.params["n"], eqn.params["light"]
        on = [dx is not None for dx in dxs[:n]]
        given = [dx for dx in dxs[:n] if dx is not None]
        tied = iter(tie_p.bind(*given, *xs[n:], n=len(given), light=light) if given else ())
        return [next(tied) if o else None for o in on]

    def pull(self, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value], cts: Sequence[Value],
             active: Mask):  # fmt: skip
        return [*cts, *[None] * (len(xs) - len(cts))]


declare(_Tie, tie_p, "linear", (), Traits("movement", pure=False), known=("n", "light"))
