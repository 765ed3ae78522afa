"""Rules of collectives: communication between the devices of a mesh, or along a named `vmap` axis.

All are linear, except the maximum and minimum. A function such as `_all_gather(ct, x, ...)` returns
the cotangent of the input `x` from the cotangent `ct` of the output; its keyword-only arguments are
the primitive's parameters. Which transpose is right depends on the option `check_vma` of
`shard_map`:

- True: a type says over which mesh axes a value *varies*, that is, differs between devices. Each
  collective has one exact transpose. `psum_invariant` sums a varying value into a replicated one,
  and `pvary` makes a replicated value varying, without communication. Each is the transpose of the
  other.
- False: types do not distinguish replicated and varying values. There `psum` is its own transpose.
  `shard_map` divides the cotangents of replicated outputs, so the result is right (`rules.shard`).

Formulas call the public functions of `lax`, which bind the primitive that fits the types.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from xform.program.arithmetic import Value
from xform.program.arrays import zeros
from xform.registry.traits import COLLECTIVE, EXCHANGE, UNFUSED, VIEW
from xform.registry.words import composite, constant, linear

Axes = Any  # names of mesh axes
Groups = Any  # `axis_index_groups`: groups of devices that communicate among themselves

# Sums.


def _psum(ct: Value, x: Value, *, axes: Sequence[Any], axis_index_groups: Groups):
    """Transpose a psum.

    A named `vmap` replaces the name of its axis by a position. Over such an axis the psum is a
    plain sum, and its transpose a broadcast.
    """
    named = tuple(a for a in axes if not isinstance(a, int))
    kept = tuple(i for i in range(np.ndim(x)) if i not in axes)
    ct = lax.broadcast_in_dim(ct, np.shape(x), kept)
    return lax.psum(ct, named, axis_index_groups=axis_index_groups)


linear("psum", _psum, traits=COLLECTIVE)
linear(
    "psum_invariant", lambda ct, x, *, axes: lax.pcast(ct, axes, to="varying"), traits=COLLECTIVE
)
linear("pvary", lambda ct, x, *, axes: lax.psum(ct, axes), traits=VIEW)

# Maximum and minimum, which JAX does not differentiate. The devices that hold the extreme value
# share the derivative equally, as equal elements do in `reduce_max`.


def _extreme(collective: Callable[..., Value]) -> Callable[..., Any]:
    """Return the jvp of a maximum or minimum over devices."""

    def jvp(xs: Sequence[Value], dxs: Sequence[Value], *, axes: Axes, axis_index_groups: Groups):
        (x,), (dx,) = xs, dxs
        y = collective(x, axes, axis_index_groups=axis_index_groups)
        hits = lax.convert_element_type(lax.eq(x, y), x.dtype)
        sums = lax.psum((lax.mul(hits, dx), hits), axes, axis_index_groups=axis_index_groups)
        return [y], [lax.div(*sums)]

    return jvp


composite("pmax", _extreme(lax.pmax), traits=COLLECTIVE)
composite("pmin", _extreme(lax.pmin), traits=COLLECTIVE)

# Gathering and scattering. An `all_to_all` always has the shapes of `tiled=True`. For
# `tiled=False`, JAX adds reshapes around it.


def _all_gather(ct: Value, x: Value, *, all_gather_dimension: int, axis_name: Axes,
                axis_index_groups: Groups, axis_size: int, tiled: bool):  # fmt: skip
    return lax.psum_scatter(
        ct,
        axis_name,
        scatter_dimension=all_gather_dimension,
        axis_index_groups=axis_index_groups,
        tiled=tiled,
    )


def _reduce_scatter(ct: Value, x: Value, *, scatter_dimension: int, axis_name: Axes,
                    axis_index_groups: Groups, axis_size: int, tiled: bool):  # fmt: skip
    return lax.all_gather(
        ct, axis_name, axis=scatter_dimension, axis_index_groups=axis_index_groups, tiled=tiled
    )


def _all_to_all(ct: Value, x: Value, *, split_axis: int, concat_axis: int, axis_name: Axes,
                axis_index_groups: Groups, tiled: bool):  # fmt: skip
    return lax.all_to_all(
        ct, axis_name, concat_axis, split_axis, axis_index_groups=axis_index_groups, tiled=True
    )


def _all_gather_invariant(ct: Value, x: Value, *, all_gather_dimension: int, axis_name: Axes,
                          axis_size: int, tiled: bool):  # fmt: skip
    n = ct.shape[all_gather_dimension] // axis_size
    start = lax.mul(lax.axis_index(axis_name), np.int32(n))
    own_part = lax.dynamic_slice_in_dim(ct, start, n, all_gather_dimension)
    return own_part if tiled else lax.squeeze(own_part, [all_gather_dimension])


def _ragged_all_to_all(ct: Value, x: Value, output: Value, input_offsets: Value, send_sizes: Value,
                       output_offsets: Value, recv_sizes: Value, *, axis_name: Axes,
                       axis_index_groups: Groups):  # fmt: skip
    """Send the cotangents of rows back to their source.

    The forward operation replaces rows of `output`; these rows get no cotangent. A device knows
    where its own rows start in `x`, and where they are put on other devices. To send rows back, it
    asks the other devices for both.
    """
    exchange = lambda i: lax.all_to_all(
        i, axis_name, 0, 0, axis_index_groups=axis_index_groups, tiled=True
    )
    first_rows = exchange(output_offsets)  # where rows from each device begin in our output
    ct_x = lax.ragged_all_to_all(
        ct, zeros(jax.typeof(x)), first_rows, recv_sizes, exchange(input_offsets), send_sizes,
        axis_name=axis_name, axis_index_groups=axis_index_groups,
    )  # fmt: skip
    row = lax.broadcasted_iota(first_rows.dtype, (ct.shape[0], first_rows.shape[0]), 0)
    begin = lax.broadcast_in_dim(first_rows, row.shape, (1,))
    end = lax.broadcast_in_dim(lax.add(first_rows, recv_sizes), row.shape, (1,))
    inside = lax.bitwise_and(lax.ge(row, begin), lax.lt(row, end))
    replaced = lax.broadcast_in_dim(lax.reduce_or(inside, (1,)), ct.shape, (0,))
    return [ct_x, lax.select(replaced, zeros(jax.typeof(ct)), ct), *[None] * 4]


linear("all_gather", _all_gather, traits=EXCHANGE)
linear("ragged_all_to_all", _ragged_all_to_all, argnums=(0, 1), traits=EXCHANGE)
linear("reduce_scatter", _reduce_scatter, traits=COLLECTIVE)
linear("all_to_all", _all_to_all, traits=EXCHANGE)
linear("all_gather_invariant", _all_gather_invariant, traits=COLLECTIVE)

# From one device to others.


def _sum_at_source(ct: Value, axis_name: Axes, source: Value):
    """Transpose a broadcast from the device `source`: it gets the sum, all other devices zero."""
    is_source = lax.eq(lax.axis_index(axis_name), lax.convert_element_type(source, np.int32))
    return lax.mul(lax.psum(ct, axis_name), lax.convert_element_type(is_source, ct.dtype))


linear(
    "ppermute",
    lambda ct, x, *, axis_name, perm: lax.ppermute(ct, axis_name, [(b, a) for a, b in perm]),
    traits=EXCHANGE,
)
linear(
    "pbroadcast",
    lambda ct, x, *, axis_name, source: _sum_at_source(ct, axis_name, source),
    traits=EXCHANGE,
)
linear(
    "pbroadcast_dynamic",
    lambda ct, x, source, *, axis_name: _sum_at_source(ct, axis_name, source),
    argnums=(0,),
    traits=EXCHANGE,
)
constant("axis_index", supported_params=("axis_name", "axis_index"), traits=UNFUSED)

# Partial sums, on meshes of explicit axes. An *unreduced* value is, on each device, one term of a
# sum over the devices that is still to be computed. A *reduced* value is the same on each device,
# and its cotangent is unreduced.


def _all_gather_reduced(ct: Value, x: Value, *, all_gather_dimension: int, axis_name: Axes,
                        axis_size: int, tiled: bool):  # fmt: skip
    return lax.psum_scatter(ct, axis_name, scatter_dimension=all_gather_dimension, tiled=tiled)


def _unreduced_reduce_scatter(ct: Value, x: Value, *, scatter_dimension: int, axis_name: Axes,
                              axis_size: int, tiled: bool):  # fmt: skip
    return lax.all_gather(ct, axis_name, axis=scatter_dimension, tiled=tiled, to="reduced")


linear("all_gather_reduced", _all_gather_reduced, traits=COLLECTIVE)
linear("unreduced_reduce_scatter", _unreduced_reduce_scatter, traits=COLLECTIVE)
linear(
    "unreduced_psum", lambda ct, x, *, axes: lax.pcast(ct, axes, to="reduced"), traits=COLLECTIVE
)
linear("preduced", lambda ct, x, *, axes: lax.psum(ct, axes), traits=VIEW)
for _name in ("vary_unreduced_cast_p", "vary_unreduced_cast"):  # JAX 0.10 names it with a suffix
    linear(_name, lambda ct, x, *, axes: lax.pcast(ct, axes, to="varying"), traits=UNFUSED)
for _name in ("reduced_vary_cast_p", "reduced_vary_cast"):
    linear(_name, lambda ct, x, *, axes: lax.pcast(ct, axes, to="unreduced"), traits=UNFUSED)
