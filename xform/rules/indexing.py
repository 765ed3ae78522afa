"""Reads and writes at computed places: dynamic slices, gather, scatters.

The conventions are those of JAX. scatter-min and scatter-max share a tie equally among the values
that attain it, the old value included. If several updates go to one place, the update that won the
forward scatter gets the derivative. `mode` is the same in both passes, so that elements that are
dropped or clamped in the forward pass are also dropped or clamped in the backward pass. A fill
value is a constant.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from xform._jax import JaxprEqn, zeros
from xform.errors import NotDifferentiable
from xform.interpret import cost
from xform.program.arithmetic import Value, constant_like
from xform.registry.table import declare
from xform.registry.traits import none
from xform.registry.words import Linear, composite, linear
from xform.rules import indices as where

Numbers = lax.ScatterDimensionNumbers


def zeros_like(x: Value) -> Value:
    return zeros(jax.typeof(x))


# Dynamic slices. The pullbacks bind the primitives, which clamp a start as in the forward pass. The
# functions of `lax` would first add the length of the axis to a negative start.


def _dynamic_slice(ct: Value, x: Value, *start: Value, slice_sizes: Any):
    return lax.dynamic_update_slice_p.bind(zeros_like(x), ct, *start)


def _dynamic_update_slice(ct: Value, x: Value, update: Value, *start: Value):
    rest = lax.dynamic_update_slice_p.bind(ct, zeros_like(update), *start)
    part = lax.dynamic_slice_p.bind(ct, *start, slice_sizes=np.shape(update))
    return [rest, part, *[None] * len(start)]


linear("dynamic_slice", _dynamic_slice, over=(0,), traits=where.DYNAMIC_SLICE)
linear("dynamic_update_slice", _dynamic_update_slice, over=(0, 1), traits=where.DYNAMIC_UPDATE)

# Gather.


@dataclasses.dataclass(frozen=True, eq=False)
class _Gather(Linear):
    """Affine: out of bounds, the output has `fill_value`, and the tangent has 0."""

    def push(self, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value], dxs: Sequence[Value]):
        params: dict[str, Any] = {**eqn.params, "fill_value": 0}
        return [lax.gather(dxs[0], xs[1], **params)]


def _gather(ct: Value, x: Value, indices: Value, *, dimension_numbers: Any, slice_sizes: Any,
            unique_indices: bool, indices_are_sorted: bool, mode: Any,
            fill_value: Any):  # fmt: skip
    d = dimension_numbers
    numbers = Numbers(
        update_window_dims=d.offset_dims,
        inserted_window_dims=d.collapsed_slice_dims,
        scatter_dims_to_operand_dims=d.start_index_map,
        operand_batching_dims=d.operand_batching_dims,
        scatter_indices_batching_dims=d.start_indices_batching_dims,
    )
    # As in JAX, the cotangent of a weakly typed operand is strongly typed.
    start = zeros(jax.typeof(x).update(weak_type=False))
    return lax.scatter_add(start, indices, ct, numbers, unique_indices=unique_indices,
                           indices_are_sorted=indices_are_sorted, mode=mode)  # fmt: skip


declare(_Gather, "gather", "linear", [_gather], where.GATHER, over=(0,))


# Scatters.


@dataclasses.dataclass(frozen=True)
class Places:
    """Where a scatter writes: its indices and its parameters, except the combining function."""

    indices: Value
    shape: tuple[int, ...]
    numbers: Any
    params: dict[str, Any]

    def apply(self, scatter: Callable[..., Value], x: Value, updates: Value) -> Value:
        return scatter(x, self.indices, updates, self.numbers, **self.params)

    def add(self, x: Value, updates: Value) -> Value:
        return self.apply(lax.scatter_add, x, updates)

    def read(self, x: Value) -> Value:
        """Return the elements of `x` at the places, in the updates' shape; 0 out of bounds."""
        d = self.numbers
        numbers = lax.GatherDimensionNumbers(
            offset_dims=d.update_window_dims,
            collapsed_slice_dims=d.inserted_window_dims,
            start_index_map=d.scatter_dims_to_operand_dims,
            operand_batching_dims=d.operand_batching_dims,
            start_indices_batching_dims=d.scatter_indices_batching_dims,
        )
        narrow = {*d.inserted_window_dims, *d.operand_batching_dims}
        window = iter(d.update_window_dims)
        sizes = [1 if i in narrow else self.shape[next(window)] for i in range(np.ndim(x))]
        return lax.gather(x, self.indices, numbers, sizes, fill_value=0, **self.params)


def places(indices: Value, updates: Value, dimension_numbers: Any, indices_are_sorted: bool,
           unique_indices: bool, mode: Any) -> Places:  # fmt: skip
    """Return the `Places` of a scatter, from its operands and parameters."""
    params = {
        "indices_are_sorted": indices_are_sorted,
        "unique_indices": unique_indices,
        "mode": mode,
    }
    return Places(indices, np.shape(updates), dimension_numbers, params)


def _updates(eqn: JaxprEqn) -> int:
    return cost.size(eqn.invars[2])


def linear_scatter(name: str, transpose: Callable[[Places, Value], tuple[Value, Value]]) -> None:
    """Declare a scatter that is linear; `transpose(at, ct)` returns cotangents of both inputs."""

    def formula(ct: Value, x: Value, indices: Value, updates: Value, *, dimension_numbers: Any,
                indices_are_sorted: bool, unique_indices: bool, mode: Any, update_jaxpr: Any = None,
                update_consts: Any = ()):  # fmt: skip
        at = places(indices, updates, dimension_numbers, indices_are_sorted, unique_indices, mode)
        ct_x, ct_updates = transpose(at, ct)
        return [ct_x, None, ct_updates]

    linear(name, formula, over=(0, 2), traits=where.scatter_traits(_updates))


def composite_scatter(name: str, jvp: Callable[..., tuple[Value, Any]], applies: bool) -> None:
    """Declare a scatter by `jvp(at, x, updates, dx, dupdates)`, which returns output and tangent.

    If the returned output is None, the primitive computes it.

    With `applies`, the primitive always carries a combining function, which its name tells. Any
    other scatter with such a function is `lax.scatter_apply`, whose function is unknown.
    """

    def formula(primals: Sequence[Value], tangents: Sequence[Any], *, dimension_numbers: Any,
                indices_are_sorted: bool, unique_indices: bool, mode: Any, update_jaxpr: Any = None,
                update_consts: Any = ()):  # fmt: skip
        if update_jaxpr is not None and not applies:
            raise NotDifferentiable(
                "derivative of scatter_apply",
                "it applies an arbitrary function at the places that the indices name",
                "",
                "gather the values, apply the function to them, and scatter the results",
            )
        (x, indices, updates), (dx, _, dupdates) = primals, tangents
        at = places(indices, updates, dimension_numbers, indices_are_sorted, unique_indices, mode)
        y, dy = jvp(at, x, updates, dx, dupdates)
        return None if y is None else [y], [dy]

    traits = where.scatter_traits(_updates if applies else none, replaces=not applies)
    composite(name, formula, traits)


def _scatter(at: Places, x: Value, updates: Value, dx: Any, dupdates: Any):
    dx = zeros_like(x) if dx is None else dx
    dupdates = zeros_like(updates) if dupdates is None else dupdates
    if at.params["unique_indices"]:
        ones = lax.full_like(updates, True, np.bool_)
        hit = at.apply(lax.scatter, lax.full_like(x, False, np.bool_), ones)
        return None, at.add(lax.select(hit, zeros_like(dx), dx), dupdates)
    size = math.prod(at.shape)
    if not size:
        return None, dx
    # It is undefined which of several updates to one place wins, so scatter their numbers to see.
    # The output also uses these winners, so that both results agree.
    numbers = lax.reshape(lax.iota(np.int32, size), at.shape)
    winners = at.apply(lax.scatter, lax.full_like(x, -1, np.int32), numbers)
    hit = lax.ge(winners, np.int32(0))
    places = lax.max(winners, np.int32(0))

    def overwrite(old: Value, new: Value) -> Value:
        new = lax.reshape(new, (size,))
        return lax.select(hit, new.at[places].get(mode="promise_in_bounds"), old)

    return overwrite(x, updates), overwrite(dx, dupdates)


def _scatter_mul(at: Places, x: Value, updates: Value, dx: Any, dupdates: Any):
    factor = at.apply(lax.scatter_mul, lax.full_like(x, 1), updates)
    terms: list[Value] = []
    if dx is not None:
        terms.append(lax.mul(dx, factor))
    if dupdates is not None:
        if not at.params["unique_indices"]:
            raise NotDifferentiable(
                "derivative of scatter_mul in its updates",
                "several updates may multiply one place, and the derivative of their product has "
                "no rule",
                "",
                "pass unique_indices=True if the indices are unique",
            )
        terms.append(lax.mul(x, at.add(zeros_like(x), dupdates)))
    return at.apply(lax.scatter_mul, x, updates), sum_of(terms)


def sum_of(terms: Sequence[Value]) -> Any:
    return functools.reduce(lax.add, terms) if terms else None


def extremal(scatter: Callable[..., Value]) -> Callable[..., tuple[Value, Any]]:
    """Return the jvp of scatter-min or scatter-max."""

    def jvp(at: Places, x: Value, updates: Value, dx: Any, dupdates: Any):
        y = at.apply(scatter, x, updates)
        won = lax.convert_element_type(lax.eq(updates, at.read(y)), x.dtype)
        winners = at.add(zeros_like(x), won)
        stays = lax.bitwise_or(lax.eq(x, y), lax.eq(winners, constant_like(x, 0)))
        stays = lax.convert_element_type(stays, x.dtype)
        share = lax.div(constant_like(x, 1), lax.add(winners, stays))
        terms: list[Value] = []
        if dx is not None:
            terms.append(lax.mul(dx, lax.mul(stays, share)))
        if dupdates is not None:
            coefficient = lax.mul(won, at.read(share))
            terms.append(at.add(zeros_like(x), lax.mul(dupdates, coefficient)))
        return y, sum_of(terms)

    return jvp


linear_scatter("scatter-add", lambda at, ct: (ct, at.read(ct)))
linear_scatter("scatter-sub", lambda at, ct: (ct, lax.neg(at.read(ct))))
composite_scatter("scatter", _scatter, applies=False)
composite_scatter("scatter-mul", _scatter_mul, applies=True)
composite_scatter("scatter-min", extremal(lax.scatter_min), applies=True)
composite_scatter("scatter-max", extremal(lax.scatter_max), applies=True)
