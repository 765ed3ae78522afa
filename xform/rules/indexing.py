"""Rules of reads and writes at computed positions: dynamic slices, gather, scatters.

A linear operation is declared by its transpose: `_gather(ct, x, indices, ...)` returns the
cotangent of `x` from `ct`, the cotangent of the output. A scatter writes its *updates* into an
operand `x` at positions that the indices name. The conventions are those of JAX:

- If several updates of a plain scatter go to one position, the update that remains in the forward
  pass gets the derivative.
- scatter-min and scatter-max share the derivative equally among all values that equal the result:
  updates, and perhaps the old value.
- `mode` says what happens out of bounds. It is the same in both passes, so elements that are
  dropped or clamped in the forward pass are also dropped or clamped in the backward pass. A fill
  value has no derivative.
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

from xform._jax import JaxprEqn
from xform.errors import NotDifferentiable
from xform.interpret import cost
from xform.interpret.node import Structured
from xform.program.arithmetic import Value, constant_like
from xform.program.arrays import zeros
from xform.program.equation import apply
from xform.program.ir import Mask
from xform.program.source import frame
from xform.registry.table import declare
from xform.registry.traits import none
from xform.registry.words import Linear, composite, linear
from xform.rules import indices as where

Numbers = lax.ScatterDimensionNumbers


def zeros_like(x: Value) -> Value:
    """Return zeros of the type of `x`."""
    return zeros(jax.typeof(x))


def zero_cotangent(x: Value, ct: Value) -> Value:
    """Return zeros of the shape of `x`, in the dtype of `ct`, which a custom rule may have chosen.

    As in JAX, the cotangent of a weakly typed operand is strongly typed.
    """
    return zeros(jax.typeof(x).update(dtype=ct.dtype, weak_type=False))


# Dynamic slices. The pullbacks bind the primitives, which clamp a start as in the forward pass. The
# functions of `lax` would first add the length of the axis to a negative start.


def _dynamic_slice(ct: Value, x: Value, *start: Value, slice_sizes: Any):
    return lax.dynamic_update_slice_p.bind(zero_cotangent(x, ct), ct, *start)


def _dynamic_update_slice(ct: Value, x: Value, update: Value, *start: Value):
    ct_x = lax.dynamic_update_slice_p.bind(ct, zero_cotangent(update, ct), *start)
    ct_update = lax.dynamic_slice_p.bind(ct, *start, slice_sizes=np.shape(update))
    return [ct_x, ct_update, *[None] * len(start)]


linear("dynamic_slice", _dynamic_slice, argnums=(0,), traits=where.DYNAMIC_SLICE)
linear("dynamic_update_slice", _dynamic_update_slice, argnums=(0, 1), traits=where.DYNAMIC_UPDATE)

# Gather.


@dataclasses.dataclass(frozen=True, eq=False)
class _Gather(Linear):
    """The rule of gather. Out of bounds the output has `fill_value`, and the tangent has 0."""

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
    start = zero_cotangent(x, ct)
    return lax.scatter_add(start, indices, ct, numbers, unique_indices=unique_indices,
                           indices_are_sorted=indices_are_sorted, mode=mode)  # fmt: skip


declare(_Gather, "gather", "linear", [_gather], where.GATHER, argnums=(0,))


# Scatters.


@dataclasses.dataclass(frozen=True)
class Places:
    """Where a scatter writes.

    Attributes:
      indices: the indices.
      shape: the shape of the updates.
      numbers: the dimension numbers.
      params: the options of a scatter, such as `mode`.
    """

    indices: Value
    shape: tuple[int, ...]
    numbers: Any
    params: dict[str, Any]

    def apply(self, scatter: Callable[..., Value], x: Value, updates: Value) -> Value:
        """Return `scatter` of `updates` into `x` at these places."""
        return scatter(x, self.indices, updates, self.numbers, **self.params)

    @property
    def are_unique(self) -> bool:
        """Whether the caller promised that no two updates go to one position."""
        return self.params["unique_indices"]

    def numbered_updates(self) -> Value:
        """Return the number of each update, in the updates' shape."""
        return lax.reshape(lax.iota(np.int32, math.prod(self.shape)), self.shape)

    def remaining(self, x: Value) -> Value:
        """Return for each element of `x` the number of the update that remains there; -1: none."""
        return self.apply(lax.scatter, lax.full_like(x, -1, np.int32), self.numbered_updates())

    def add(self, x: Value, updates: Value) -> Value:
        """Return `x` with `updates` added at these places."""
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


def places_of(indices: Value, updates: Value, dimension_numbers: Any, indices_are_sorted: bool,
              unique_indices: bool, mode: Any) -> Places:  # fmt: skip
    """Return the `Places` of a scatter, from its operands and parameters."""
    params = {
        "indices_are_sorted": indices_are_sorted,
        "unique_indices": unique_indices,
        "mode": mode,
    }
    return Places(indices, np.shape(updates), dimension_numbers, params)


def _update_count(eqn: JaxprEqn) -> int:
    """Return the FLOPs of a scatter that combines values: one for each element of the updates."""
    return cost.size(eqn.invars[2])


def linear_scatter(name: str, transpose: Callable[[Places, Value], tuple[Value, Value]]) -> None:
    """Declare a scatter that is linear in the operand and the updates.

    `transpose(places, ct)` returns the cotangents of both.
    """

    def formula(ct: Value, x: Value, indices: Value, updates: Value, *, dimension_numbers: Any,
                indices_are_sorted: bool, unique_indices: bool, mode: Any, update_jaxpr: Any = None,
                update_consts: Any = ()):  # fmt: skip
        places = places_of(
            indices, updates, dimension_numbers, indices_are_sorted, unique_indices, mode
        )
        ct_x, ct_updates = transpose(places, ct)
        return [ct_x, None, ct_updates]

    linear(name, formula, argnums=(0, 2), traits=where.scatter_traits(_update_count, adds=True))


@dataclasses.dataclass(frozen=True, eq=False)
class _Scatter(Structured):
    """The rule of a plain scatter, which replaces elements by updates.

    If several updates go to one position, it is undefined which one remains. So the numbers of the
    updates are scattered to find out, and the output has the same updates as the derivative.
    """

    def jvp(self, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value]):
        x, _, updates = xs
        places, (dx, _, dupdates) = self._places(eqn, xs), dxs
        dx = zeros_like(x) if dx is None else dx
        dupdates = zeros_like(updates) if dupdates is None else dupdates
        if places.are_unique:
            return apply(eqn, xs), [places.apply(lax.scatter, dx, dupdates)]
        remaining = places.remaining(x)
        return [overwrite(x, updates, remaining)], [overwrite(dx, dupdates, remaining)]

    def split(self, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value], wanted: Mask):
        return self.jvp(eqn, xs, dxs)

    def vjp(self, eqn: JaxprEqn, xs: Sequence[Value], active: Mask, wanted: Mask):
        x, _, updates = xs
        places = self._places(eqn, xs)
        if places.are_unique:
            ys, remains = apply(eqn, xs), None
        else:
            remaining = places.remaining(x)
            ys = [overwrite(x, updates, remaining)]
            remains = lax.eq(places.read(remaining), places.numbered_updates())

        def pull(cts: Sequence[Value]) -> list[Any]:
            (ct,) = cts
            ct_x = ct_updates = None
            if active[0]:
                ct_x = places.apply(lax.scatter, ct, zero_cotangent(updates, ct))
            if active[2]:
                ct_updates = places.read(ct)
                if remains is not None:
                    ct_updates = lax.select(remains, ct_updates, zeros_like(ct_updates))
            return [ct_x, None, ct_updates]

        return ys, pull

    def _places(self, eqn: JaxprEqn, xs: Sequence[Value]) -> Places:
        """Return where the scatter writes. A function that it applies has no derivative."""
        if eqn.params["update_jaxpr"] is not None:  # made by `lax.scatter_apply`
            raise NotDifferentiable(
                "derivative of scatter_apply",
                "it applies an arbitrary function to the indexed elements",
                frame(eqn),
                "gather the values, apply the function to them, and scatter the results",
            )
        options = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
        return places_of(xs[1], xs[2], **{name: eqn.params[name] for name in options})


def overwrite(old: Value, new: Value, remaining: Value) -> Value:
    """Return `old` with the elements of `new` at the places where an update remains.

    `remaining` has the number of that update for each element of `old`; -1: none.
    """
    if not np.size(new):
        return old
    number = lax.max(remaining, np.int32(0))
    elements = lax.reshape(new, (np.size(new),)).at[number].get(mode="promise_in_bounds")
    return lax.select(lax.ge(remaining, np.int32(0)), elements, old)


def composite_scatter(name: str, jvp: Callable[..., tuple[Value, Any]]) -> None:
    """Declare a scatter that combines updates with old values.

    `jvp(places, x, updates, dx, dupdates)` returns the output and its tangent.
    """

    def formula(primals: Sequence[Value], tangents: Sequence[Any], *, dimension_numbers: Any,
                indices_are_sorted: bool, unique_indices: bool, mode: Any, update_jaxpr: Any = None,
                update_consts: Any = ()):  # fmt: skip
        (x, indices, updates), (dx, _, dupdates) = primals, tangents
        places = places_of(
            indices, updates, dimension_numbers, indices_are_sorted, unique_indices, mode
        )
        y, dy = jvp(places, x, updates, dx, dupdates)
        return [y], [dy]

    composite(name, formula, traits=where.scatter_traits(_update_count))


def _scatter_mul(places: Places, x: Value, updates: Value, dx: Any, dupdates: Any):
    """Return the output and its tangent. Tangents of updates need unique indices."""
    factor = places.apply(lax.scatter_mul, lax.full_like(x, 1), updates)
    terms: list[Value] = []
    if dx is not None:
        terms.append(lax.mul(dx, factor))
    if dupdates is not None:
        if not places.params["unique_indices"]:
            raise NotDifferentiable(
                "derivative of scatter_mul in its updates",
                "several updates may multiply one element, and the derivative of their product has "
                "no rule",
                "",
                "pass unique_indices=True if the indices are unique",
            )
        terms.append(lax.mul(x, places.add(zeros_like(x), dupdates)))
    return places.apply(lax.scatter_mul, x, updates), sum_of(terms)


def sum_of(terms: Sequence[Value]) -> Any:
    """Return the sum of the terms; None for an empty list."""
    return functools.reduce(lax.add, terms) if terms else None


def extremal(scatter: Callable[..., Value]) -> Callable[..., tuple[Value, Any]]:
    """Return the jvp of scatter-min or scatter-max."""

    def jvp(places: Places, x: Value, updates: Value, dx: Any, dupdates: Any):
        y = places.apply(scatter, x, updates)
        attains = lax.convert_element_type(lax.eq(updates, places.read(y)), x.dtype)
        n_attaining = places.add(zeros_like(x), attains)
        old_attains = lax.bitwise_or(lax.eq(x, y), lax.eq(n_attaining, constant_like(x, 0)))
        old_attains = lax.convert_element_type(old_attains, x.dtype)
        share = lax.div(constant_like(x, 1), lax.add(n_attaining, old_attains))
        terms: list[Value] = []
        if dx is not None:
            terms.append(lax.mul(dx, lax.mul(old_attains, share)))
        if dupdates is not None:
            coefficient = lax.mul(attains, places.read(share))
            terms.append(places.add(zeros_like(x), lax.mul(dupdates, coefficient)))
        return y, sum_of(terms)

    return jvp


linear_scatter("scatter-add", lambda places, ct: (ct, places.read(ct)))
linear_scatter("scatter-sub", lambda places, ct: (ct, lax.neg(places.read(ct))))
declare(_Scatter, "scatter", "structured", (), where.scatter_traits(none, replaces=True), None)
composite_scatter("scatter-mul", _scatter_mul)
composite_scatter("scatter-min", extremal(lax.scatter_min))
composite_scatter("scatter-max", extremal(lax.scatter_max))
