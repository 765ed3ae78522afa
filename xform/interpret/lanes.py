"""Loops whose number of steps differs from lane to lane of a batch.

A loop ends when no lane is alive, and a lane that has ended keeps its state. Written with `some`
and `keep`, a loop counts its steps for all lanes together: under `vmap` neither its predicate nor
its counter is batched, and what is selected over is what `keep` names and nothing else. Outside
`vmap` both are identities and cost nothing.

A loop that JAX has batched already has a predicate with the axes of the batch, which lead in every
part of its state; there both act at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import lax

from xform._jax import Primitive, ad, batching, mlir, zeros
from xform.errors import NotDifferentiable
from xform.table import Value, constant, linear

some_p, keep_p, final_p = Primitive("some_lane"), Primitive("keep_lane"), Primitive("loop_result")


def predicate(alive: Any) -> Value:
    """What a condition returned, as an array: a constant may be a plain bool."""
    return lax.convert_element_type(alive, np.bool_)


def some(alive: Value) -> Value:
    """Whether any lane is alive: the same for all lanes."""
    return some_p.bind(lax.reduce_or(alive, range(alive.ndim)) if alive.ndim else alive)


def keep(alive: Value, new: Sequence[Value], old: Sequence[Value]) -> list[Value]:
    """`new` in the lanes that are alive, `old` in the others.

    To be called where some lane is alive: outside a batch that is the only one, and this is `new`.
    """
    choose = _select if alive.ndim else keep_p.bind
    return [choose(alive, a, b) for a, b in zip(new, old, strict=True)]


def final(x: Value, where: str) -> Value:
    """`x`, the result of a loop that `jax.grad` cannot go back through; `where` it was written."""
    return final_p.bind(x, where=where)


def while_loop(cond: Callable[[Any], Value], step: Callable[[Any], Any], state: Any) -> Any:
    """`lax.while_loop` over a flat list; the predicate may have the axes of a batch."""
    alive = predicate(cond(state))
    if not alive.ndim:
        return lax.while_loop(cond, step, state)

    def one(s: Any) -> Any:
        alive, old = s
        new = keep(alive, step(old), old)
        return cond(new), new

    return lax.while_loop(lambda s: some(s[0]), one, (alive, state))[1]


def _select(alive: Value, new: Value, old: Value) -> Value:
    return lax.select(lax.broadcast_in_dim(alive, new.shape, range(alive.ndim)), new, old)


def _some_batched(args: Sequence[Value], dims: Sequence[Any]):
    return some(lax.reduce_or(args[0], (dims[0],))), None


def _keep_batched(args: Sequence[Value], dims: Sequence[Any]):
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    alive = args[0]
    pairs = list(zip(args, dims, strict=True))[1:]
    new, old = (batching.bdim_at_front(x, d, size) for x, d in pairs)
    return keep(alive, [new], [old])[0], 0


def _final_batched(args: Sequence[Value], dims: Sequence[Any], *, where: str):
    return final(args[0], where), dims[0]


def _some_jvp(primals: Sequence[Value], tangents: Sequence[Any]):
    alive = some(*primals)
    return alive, ad.Zero(alive.aval.to_tangent_aval())


def _keep_jvp(primals: Sequence[Value], tangents: Sequence[Any]):
    alive, new, old = primals
    y = keep_p.bind(alive, new, old)
    _, dnew, dold = tangents
    if isinstance(dnew, ad.Zero) and isinstance(dold, ad.Zero):
        return y, dnew
    return y, keep_p.bind(alive, ad.instantiate_zeros(dnew), ad.instantiate_zeros(dold))


def _final_jvp(primals: Sequence[Value], tangents: Sequence[Any], *, where: str):
    (x,), (dx,) = primals, tangents
    return final(x, where), dx if isinstance(dx, ad.Zero) else final(dx, where)


def _refuse(*_: Any, where: str) -> Any:
    raise NotDifferentiable(
        "reverse-mode derivative, by JAX, of a while_loop that xform has differentiated",
        "JAX has no reverse mode for loops of unknown length",
        where,
        "let xform.grad or xform.vjp be the outer transform too; jax.jvp and jax.jacfwd work",
    )


def _keep_transpose(ct: Value, alive: Value, new: Value, old: Value) -> list[Value]:
    zero = zeros(ct.aval)
    return [None, keep_p.bind(alive, ct, zero), keep_p.bind(alive, zero, ct)]


def _declare(prim: Primitive, identity: Callable[..., Value], batched: Any, jvp: Any) -> None:
    """A primitive that is an `identity` until it is batched."""
    prim.def_impl(identity)
    prim.def_abstract_eval(identity)
    mlir.register_lowering(prim, mlir.lower_fun(identity, multiple_results=False))
    batching.primitive_batchers[prim] = batched
    ad.primitive_jvps[prim] = jvp


_declare(some_p, lambda alive: alive, _some_batched, _some_jvp)
_declare(keep_p, lambda alive, new, old: new, _keep_batched, _keep_jvp)
_declare(final_p, lambda x, *, where: x, _final_batched, _final_jvp)
ad.primitive_transposes[final_p] = _refuse
constant(some_p)
linear(keep_p, _keep_transpose, over=(1, 2))
linear(final_p, lambda ct, x, *, where: ct)
