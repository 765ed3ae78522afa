"""`barrier`: an identity on saved values that makes them wait for cotangents.

A recompute in the backward pass repeats operations of the forward pass. A compiler that sees both
may merge them. Then the value stays live from one pass to the other, and no memory is saved.
`barrier(saved, cotangents)` returns the values that the recompute reads, and makes them depend on
cotangents, which only the backward pass computes. So the recompute cannot run earlier.

On GPU and TPU the barrier is an XLA optimization barrier. XLA:CPU drops those before it merges
equal operations. There the barrier is a select by `(bits of a cotangent's first element | 1) != 0`,
which is always true, but XLA does not know that. A select prevents fusion, which costs time. So
each barrier has a parameter `where` with the backends on which it is active.

XLA:CPU drops barriers with JAX 0.10.2. With JAX 0.12.0.1 it keeps them: an optimization barrier
then saves as many bytes as a select, in shorter programs (`experiments/steering`, switch
`selects`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xform._jax import JaxprEqn, Primitive, ShapedArray, ad, batching, mlir
from xform._jax.contexts import no_mesh, wide_if_needed
from xform.program.arithmetic import Value, differentiable, is_key
from xform.program.dimensions import has_elements
from xform.program.ir import Mask, gather, spread
from xform.registry.dependence import ELEMENTWISE_DEPENDENCE
from xform.registry.table import declare
from xform.registry.traits import Traits
from xform.registry.words import Passthrough
from xform.steering.settings import steering

Where = Literal["everywhere", "cpu", "gpu", "cpu and tpu", "cpu and gpu", "accelerators"]
_BACKENDS: dict[Where, tuple[str, ...]] = {
    "everywhere": ("cpu", "gpu", "tpu"),
    "cpu": ("cpu",),
    "gpu": ("gpu",),
    "cpu and tpu": ("cpu", "tpu"),
    "cpu and gpu": ("cpu", "gpu"),
    "accelerators": ("gpu", "tpu"),
}

# The `where` of a barrier before the first operation of the backward part that XLA does not fuse.
# In a second derivative, tangents do not wait at such a barrier: they may be the basis of a
# Jacobian, and behind a barrier XLA would not recognize the basis as a mask.
EARLY: Where = "cpu and tpu"

barrier_p = Primitive("xform_barrier")
barrier_p.multiple_results = True
barrier_p.def_impl(lambda *args, n, where: list(args[:n]))
barrier_p.def_abstract_eval(lambda *avals, n, where: list(avals[:n]))


def is_active(where: Where, backend: str) -> bool:
    """Return whether a barrier with this `where` is active on "cpu", "gpu" or "tpu"."""
    return backend in _BACKENDS[where]


def can_wait(aval: Any) -> bool:
    """Whether a value of this type can wait at a barrier: numbers, masks and random keys can."""
    kinds = np.number, np.bool_
    numbers = hasattr(aval, "dtype") and any(jnp.issubdtype(aval.dtype, kind) for kind in kinds)
    return numbers or is_key(aval)


def barrier(saved: Sequence[Value], seeds: Sequence[Value], where: Where = "everywhere"
            ) -> list[Value]:  # fmt: skip
    """Return `saved`, as values that are available only after `seeds`.

    `seeds` are cotangents, or tangents for `linearize`. If none of them has elements, nothing
    waits. On CPU this costs a select for each value in `saved`.
    """
    arrays = [s for s in seeds if hasattr(s, "dtype")]
    usable = [s for s in arrays if has_elements(s.shape) and jnp.issubdtype(s.dtype, np.number)]
    if not saved or not usable:
        return list(saved)
    are_keys = list(map(is_key, saved))
    numbers = [jax.random.key_data(x) if key else x for x, key in zip(saved, are_keys, strict=True)]
    delayed = barrier_p.bind(*numbers, *usable, n=len(saved), where=where)
    return [
        jax.random.wrap_key_data(y, impl=jax.random.key_impl(x)) if key else y
        for x, y, key in zip(saved, delayed, are_keys, strict=True)
    ]


def opaque_true(x: Value) -> Value:
    """Return a scalar that is always true, and that depends on the first element of `x`."""
    first = lax.squeeze(lax.slice(x, (0,) * x.ndim, (1,) * x.ndim), tuple(range(x.ndim)))
    if first.dtype == np.bool_:
        first = lax.convert_element_type(first, np.uint8)
    if jnp.issubdtype(first.dtype, np.complexfloating):
        first = lax.real(first)
    bits = lax.bitcast_convert_type(first, np.dtype(f"uint{first.dtype.itemsize * 8}"))
    one = np.asarray(1, bits.dtype)
    return lax.ne(lax.bitwise_or(bits, one), np.asarray(0, bits.dtype))


def _select(*args: Value, n: int, where: Where) -> list[Value]:
    """Return the first `n` arguments, which wait for the others: the barrier on CPU."""
    if not is_active(where, "cpu"):
        return list(args[:n])
    if not steering().selects:
        return list(lax.optimization_barrier(args)[:n])
    true = functools.reduce(lax.bitwise_and, [opaque_true(x) for x in args[n:]])
    return [lax.select(lax.broadcast(true, x.shape), x, lax.full_like(x, 0)) for x in args[:n]]


def _barrier(backend: str, *args: Value, n: int, where: Where) -> Any:
    """Return the first `n` arguments, which wait for the others: the barrier on GPU and TPU."""
    return lax.optimization_barrier(args)[:n] if is_active(where, backend) else list(args[:n])


def _jvp(primals: Sequence[Value], tangents: Sequence[Value], *, n: int, where: Where):
    if where == EARLY:
        return barrier_p.bind(*primals, n=n, where=where), list(tangents[:n])
    on = [i for i in range(n) if differentiable(jax.typeof(primals[i]))]
    dxs = [ad.instantiate_zeros(tangents[i]) for i in on]
    dys = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in primals[:n]]
    for i, dy in zip(on, barrier_p.bind(*dxs, *primals[n:], n=len(on), where=where), strict=True):
        dys[i] = dy
    return barrier_p.bind(*primals, n=n, where=where), dys


def _batch(args: Sequence[Value], dims: Sequence[Any], **params: Any):
    return barrier_p.bind(*args, **params), dims[: params["n"]]


def plain(avals: Sequence[Any]) -> list[ShapedArray]:
    """Return array types without mesh and sharding."""
    return [ShapedArray(a.shape, a.dtype) for a in avals]


def lowered_plainly(f: Any, several: bool = True) -> Any:
    """Return a lowering of `f` on types without sharding, and without a mesh.

    `several` says whether `f` returns a sequence. `f` may read a single element of a value, which
    has no useful sharding. The mesh is dropped too: on a mesh with Explicit axes, a type without
    sharding means a replicated value, and XLA would gather the whole value on each device.
    """
    lower = mlir.lower_fun(f, multiple_results=several)

    def rule(ctx: Any, *args: Any, **params: Any) -> Any:
        ctx = ctx.replace(avals_in=plain(ctx.avals_in), avals_out=plain(ctx.avals_out))
        with no_mesh(), wide_if_needed(ctx.avals_in):
            return lower(ctx, *args, **params)

    return rule


mlir.register_lowering(barrier_p, lowered_plainly(_select), platform="cpu")
for _backend, _platform in (("gpu", None), ("tpu", "tpu")):
    _lowered = lowered_plainly(functools.partial(_barrier, _backend))
    mlir.register_lowering(barrier_p, _lowered, platform=_platform)
batching.primitive_batchers[barrier_p] = _batch
ad.primitive_jvps[barrier_p] = _jvp
ad.primitive_transposes[barrier_p] = lambda cts, *args, n, where: [
    *(ad.instantiate_zeros(ct) for ct in cts),
    *[None] * (len(args) - n),
]


class _Barrier(Passthrough):
    """The rule of a barrier. Tangents wait, except at an `EARLY` one. Cotangents do not wait."""

    def returned_operands(self, eqn: JaxprEqn) -> Mask:
        return tuple([i < eqn.params["n"] for i in range(len(eqn.invars))])

    def narrow_params(self, params: dict[str, Any], on: Mask) -> dict[str, Any]:
        return {**params, "n": sum(on)}

    def push(self, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value], dxs: Sequence[Value]):
        n = eqn.params["n"]
        if eqn.params["where"] == EARLY:
            return list(dxs[:n])
        on = tuple([dx is not None for dx in dxs[:n]])
        params = self.narrow_params(eqn.params, on)
        dys = barrier_p.bind(*gather(dxs[:n], on), *xs[n:], **params) if any(on) else ()
        return spread(dys, on)

    def pull(self, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value], cts: Sequence[Value],
             active: Mask):  # fmt: skip
        return [*cts, *[None] * (len(xs) - len(cts))]


declare(
    _Barrier,
    barrier_p,
    "linear",
    (),
    Traits("movement", pure=False, dependence=ELEMENTWISE_DEPENDENCE),
    supported_params=("n", "where"),
)
