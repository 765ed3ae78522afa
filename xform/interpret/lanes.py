"""Loops over a batch whose elements, the lanes, take different numbers of steps.

A lane is alive while its condition holds. A loop runs while any lane is alive, and a lane that has
ended keeps its state. Under `vmap`, JAX's `while_loop` would batch the predicate and the step
counter. So xform writes such loops with four primitives of its own, and gives each a rule for
`vmap`. The result of `any_alive` is the same for all lanes, so the loop has one predicate and one
counter. `select_alive` selects by lane, and `store_slice` writes one slice of memory for all lanes.
Outside `vmap`, `any_alive` is an identity and `select_alive` returns the new values.

If JAX has batched a loop before xform sees it, its predicate has batch axes, which are the leading
axes of each part of its state. The loop that xform makes of it may be under another `vmap`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from xform._jax import Primitive, ad, batching, mlir
from xform.errors import NotDifferentiable
from xform.interpret.keys import unused_keys
from xform.program.arithmetic import Value
from xform.program.arrays import zeros
from xform.registry.traits import UNFUSED
from xform.registry.words import constant, linear

some_p, keep_p = Primitive("some_lane"), Primitive("keep_lane")
store_p, final_p = Primitive("store_lanes"), Primitive("loop_result")


def predicate(alive: Any) -> Value:
    """Return `alive`, the result of a loop's condition, as a bool array."""
    return lax.convert_element_type(alive, np.bool_)


def any_alive(alive: Value) -> Value:
    """Return whether any lane is alive: one bool, which `vmap` does not batch."""
    return some_p.bind(lax.reduce_or(alive, range(alive.ndim)) if alive.ndim else alive)


def select_alive(alive: Value, new: Sequence[Value], old: Sequence[Value]) -> list[Value]:
    """Return `new` in the lanes that are alive, and `old` in the others.

    Call it only if some lane is alive. Without a batch there is one lane, so the result is `new`.
    """
    choose = _select if alive.ndim else keep_p.bind
    pairs = zip(unused_keys(new), unused_keys(old), strict=True)
    return unused_keys([choose(alive, a, b) for a, b in pairs])


def store_slice(slots: Value, x: Value, i: Value, axis: int = 0) -> Value:
    """Return `slots` with `x` at index `i` of an axis; writes one slice if all lanes share `i`.

    JAX's own update becomes a scatter under `vmap`.
    """
    slots, x = unused_keys([slots, x])
    return unused_keys([store_p.bind(slots, x, i, axis=axis)])[0]


def _update(slots: Value, x: Value, i: Value, *, axis: int) -> Value:
    return lax.dynamic_update_index_in_dim(slots, x, i, axis, allow_negative_indices=False)


def forward_only(x: Value, where: str) -> Value:
    """Return `x`, the result of a loop; if JAX differentiates it in reverse mode, raise an error.

    The error names `where`, the user's line with the loop.
    """
    return unused_keys([final_p.bind(*unused_keys([x]), where=where)])[0]


def while_loop(cond: Callable[[Any], Value], step: Callable[[Any], Any], state: Any) -> Any:
    """Run `lax.while_loop` on a state that is a flat list; the predicate may have batch axes.

    `step` takes and returns the state. A lane whose predicate is false keeps its state.
    """
    alive = predicate(cond(state))
    if not alive.ndim:
        return lax.while_loop(cond, step, state)

    def masked_step(alive_and_state: Any) -> Any:
        alive, old = alive_and_state
        new = select_alive(alive, step(old), old)
        return cond(new), new

    return lax.while_loop(lambda s: any_alive(s[0]), masked_step, (alive, state))[1]


def _select(alive: Value, new: Value, old: Value) -> Value:
    return lax.select(lax.broadcast_in_dim(alive, new.shape, range(alive.ndim)), new, old)


def _some_batched(args: Sequence[Value], dims: Sequence[Any]):
    return any_alive(lax.reduce_or(args[0], (dims[0],))), None


def _keep_batched(args: Sequence[Value], dims: Sequence[Any]):
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    alive = args[0]
    pairs = list(zip(args, dims, strict=True))[1:]
    new, old = (batching.bdim_at_front(x, d, size) for x, d in pairs)
    return select_alive(alive, [new], [old])[0], 0


def _store_batched(args: Sequence[Value], dims: Sequence[Any], *, axis: int):
    if dims[2] is not None:
        update = functools.partial(_update, axis=axis)
        return jax.vmap(update, in_axes=tuple(dims))(*args), 0
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    pairs = list(zip(args, dims, strict=True))[:2]
    slots, x = (batching.bdim_at_front(x, d, size) for x, d in pairs)
    return store_slice(slots, x, args[2], axis + 1), 0


def _final_batched(args: Sequence[Value], dims: Sequence[Any], *, where: str):
    return forward_only(args[0], where), dims[0]


def _some_jvp(primals: Sequence[Value], tangents: Sequence[Any]):
    alive = any_alive(*primals)
    return alive, ad.Zero(alive.aval.to_tangent_aval())


def _keep_jvp(primals: Sequence[Value], tangents: Sequence[Any]):
    alive, new, old = primals
    y = keep_p.bind(alive, new, old)
    _, dnew, dold = tangents
    if isinstance(dnew, ad.Zero) and isinstance(dold, ad.Zero):
        return y, dnew
    return y, keep_p.bind(alive, ad.instantiate_zeros(dnew), ad.instantiate_zeros(dold))


def _store_jvp(primals: Sequence[Value], tangents: Sequence[Any], *, axis: int):
    y = store_slice(*primals, axis=axis)
    dslots, dx, _ = tangents
    if isinstance(dslots, ad.Zero) and isinstance(dx, ad.Zero):
        return y, dslots
    dslots, dx = ad.instantiate_zeros(dslots), ad.instantiate_zeros(dx)
    return y, store_slice(dslots, dx, primals[2], axis)


def _final_jvp(primals: Sequence[Value], tangents: Sequence[Any], *, where: str):
    (x,), (dx,) = primals, tangents
    return forward_only(x, where), dx if isinstance(dx, ad.Zero) else forward_only(dx, where)


def _refuse(*_: Any, where: str) -> Any:
    """Raise NotDifferentiable: JAX asked for reverse mode through the result of such a loop."""
    raise NotDifferentiable(
        "reverse-mode derivative, by JAX, of a while_loop that xform has differentiated",
        "JAX has no reverse mode for loops of unknown length",
        where,
        "let xform.grad or xform.vjp be the outer transform too; jax.jvp and jax.jacfwd work",
    )


def _keep_transpose(ct: Value, alive: Value, new: Value, old: Value) -> list[Value]:
    zero = zeros(ct.aval)
    return [None, keep_p.bind(alive, ct, zero), keep_p.bind(alive, zero, ct)]


def _store_transpose(ct: Value, slots: Value, x: Value, i: Value, *, axis: int) -> list[Value]:
    part = lax.dynamic_index_in_dim(ct, i, axis, False, allow_negative_indices=False)
    return [store_slice(ct, zeros(part.aval), i, axis), part, None]


def _declare(prim: Primitive, f: Callable[..., Value], like: int, batched: Any, jvp: Any) -> None:
    """Declare a primitive that computes `f`, with JAX's rules for batching and forward mode.

    Its result has the type of the input with index `like`.
    """
    prim.def_impl(f)
    prim.def_abstract_eval(lambda *avals, **_: avals[like])
    mlir.register_lowering(prim, mlir.lower_fun(f, multiple_results=False))
    batching.primitive_batchers[prim] = batched
    ad.primitive_jvps[prim] = jvp


_declare(some_p, lambda alive: alive, 0, _some_batched, _some_jvp)
_declare(keep_p, lambda alive, new, old: new, 1, _keep_batched, _keep_jvp)
_declare(store_p, _update, 0, _store_batched, _store_jvp)
_declare(final_p, lambda x, *, where: x, 0, _final_batched, _final_jvp)
ad.primitive_transposes[final_p] = _refuse
constant(some_p, supported_params=(), traits=UNFUSED)
linear(keep_p, _keep_transpose, argnums=(1, 2), traits=UNFUSED)
linear(store_p, _store_transpose, argnums=(0, 1), traits=UNFUSED)
linear(final_p, lambda ct, x, *, where: ct, traits=UNFUSED)
