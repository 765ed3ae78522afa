"""Mark the batch axes of gathers and scatters whose indices count along a batch.

`x[jnp.arange(n), i]` takes element `i[k]` of row `k` of `x`. Its indices are pairs: the first
numbers are 0, 1, ... along an axis of the indices. So that axis is a batch, and the gather runs in
slices along it, if its dimension numbers say so. Scatters such as `x.at[jnp.arange(n), i].set(y)`
are the same in reverse. Results are the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jax import lax

from xform._jax import JaxprEqn, Literal
from xform.passes.builder import Builder
from xform.program.dimensions import shape
from xform.program.ir import Atom, Program, trace
from xform.registry.table import traits

Producer = Mapping[Any, JaxprEqn]


def with_batched_indices(prog: Program) -> Program:
    """Return a program whose gathers and scatters name their batch axes, if their indices tell.

    An index counts along a batch if it is an iota, up to reshapes. At least one index of each tuple
    is left.

    >>> from xform.program.ir import trace
    >>> from xform.slices.batched_indices import with_batched_indices
    >>> f = lambda x, i: [x.at[jnp.arange(4), i].get(mode="clip")]
    >>> prog = with_batched_indices(trace(f, jnp.ones((4, 8)), jnp.zeros(4, int)))
    >>> (gather,) = [e for e in prog.equations if e.primitive is jax.lax.gather_p]
    >>> gather.params["dimension_numbers"].operand_batching_dims
    (0,)
    """
    if not any(map(_has_indices, prog.equations)):
        return prog
    build = Builder(prog)
    for eqn in prog.equations:
        eqn = build.renamed(eqn)
        if _has_indices(eqn) and (columns := _columns(eqn, build.producer)):
            batched = _batched(eqn, columns, build.producer)
            if batched:
                eqn = _with_batches(eqn, columns, batched, build)
        build.add(eqn)
    return build.program()


def _gathers(eqn: JaxprEqn) -> bool:
    """Return whether an equation is a gather."""
    return isinstance(eqn.params.get("dimension_numbers"), lax.GatherDimensionNumbers)


def _has_indices(eqn: JaxprEqn) -> bool:
    """Return whether an equation is a gather or a scatter."""
    scatter = lax.ScatterDimensionNumbers
    return _gathers(eqn) or isinstance(eqn.params.get("dimension_numbers"), scatter)


def _columns(eqn: JaxprEqn, producer: Producer) -> list[Any]:
    """Return the arrays whose concatenation along the last axis are the indices, one per column."""
    made = _made(eqn.invars[1], producer)
    if made is None or made.primitive is not lax.concatenate_p:
        return []
    last = len(shape(eqn.invars[1])) - 1
    if made.params["dimension"] != last or any(shape(v)[last] != 1 for v in made.invars):
        return []
    return list(made.invars)


def _made(v: Atom, producer: Producer) -> JaxprEqn | None:
    """Return the equation that makes a value; None if it is not known."""
    return None if isinstance(v, Literal) else producer.get(v)


def _batched(eqn: JaxprEqn, columns: list[Any], producer: Producer) -> dict[int, int]:
    """Return the columns that count along an axis of the indices, each with that axis.

    The operand has the same length along the axis that the column indexes, and windows have size 1.
    """
    d, x = eqn.params["dimension_numbers"], shape(eqn.invars[0])
    gathers = _gathers(eqn)
    indexed = d.start_index_map if gathers else d.scatter_dims_to_operand_dims
    dropped = d.collapsed_slice_dims if gathers else d.inserted_window_dims
    used = set(d.start_indices_batching_dims if gathers else d.scatter_indices_batching_dims)
    found: dict[int, int] = {}
    for k, column in enumerate(columns):
        axis = _counts_along(column, producer)
        last = len(shape(column)) - 1
        if axis is None or axis == last or axis in used or len(found) == len(columns) - 1:
            continue
        if indexed[k] in dropped and x[indexed[k]] == shape(column)[axis]:
            found[k] = axis
            used.add(axis)
    return found


def _counts_along(v: Atom, producer: Producer) -> int | None:
    """Return the axis along which an array of integers counts 0, 1, ...; None if it does not."""
    eqn = _made(v, producer)
    if eqn is None:
        return None
    if eqn.primitive is lax.iota_p:
        axis = eqn.params["dimension"]
        return axis if _holds(v, shape(v)[axis]) else None
    copies = traits(eqn.primitive).identity or eqn.primitive is lax.convert_element_type_p
    if copies and len(eqn.invars) == 1:
        axis = _counts_along(eqn.invars[0], producer)
        return axis if axis is not None and _holds(v, shape(v)[axis]) else None
    if eqn.primitive is lax.broadcast_in_dim_p:
        axis = _counts_along(eqn.invars[0], producer)
        if axis is None:
            return None
        end = eqn.params["broadcast_dimensions"][axis]
        return end if shape(v)[end] == shape(eqn.invars[0])[axis] else None
    if eqn.primitive is lax.reshape_p:
        axis = _counts_along(eqn.invars[0], producer)
        long_axes = lambda v: [i for i, n in enumerate(shape(v)) if n > 1]
        ends = long_axes(v)
        return ends[0] if long_axes(eqn.invars[0]) == [axis] and len(ends) == 1 else None
    if eqn.primitive is lax.select_n_p and len(eqn.invars) == 3:
        return _of_normalized(eqn, producer)
    return None


def _holds(v: Any, n: int) -> bool:
    """Return whether the type of a value has the integers below `n`."""
    dtype = v.aval.dtype
    return np.issubdtype(dtype, np.integer) and n - 1 <= np.iinfo(dtype).max


def _of_normalized(eqn: JaxprEqn, producer: Producer) -> int | None:
    """Return the axis of an index whose negative numbers count from the end: it has none."""
    test, kept, _ = eqn.invars
    compared = _made(test, producer)
    if compared is None or compared.primitive is not lax.lt_p or compared.invars[0] is not kept:
        return None
    zero = compared.invars[1]
    if not isinstance(zero, Literal) or zero.val != 0:
        return None
    return _counts_along(kept, producer)


def _with_batches(eqn: JaxprEqn, columns: list[Any], batched: dict[int, int], build: Builder
                  ) -> JaxprEqn:  # fmt: skip
    """Return a gather or scatter with batch axes in place of some columns of its indices."""
    d, gathers = eqn.params["dimension_numbers"], _gathers(eqn)
    kept = [v for k, v in enumerate(columns) if k not in batched]
    (indices,) = kept if len(kept) == 1 else build.splice(_joined(kept), kept)
    indexed = d.start_index_map if gathers else d.scatter_dims_to_operand_dims
    dropped = d.collapsed_slice_dims if gathers else d.inserted_window_dims
    of_indices = d.start_indices_batching_dims if gathers else d.scatter_indices_batching_dims
    pairs = [*zip(d.operand_batching_dims, of_indices, strict=True)]
    pairs = sorted([*pairs, *((indexed[k], axis) for k, axis in batched.items())])
    operand_axes, index_axes = zip(*pairs, strict=True)
    left = tuple(axis for k, axis in enumerate(indexed) if k not in batched)
    window = tuple(axis for axis in dropped if axis not in operand_axes)
    numbers = (
        d._replace(start_index_map=left, collapsed_slice_dims=window,
                   operand_batching_dims=operand_axes, start_indices_batching_dims=index_axes)
        if gathers else
        d._replace(scatter_dims_to_operand_dims=left, inserted_window_dims=window,
                   operand_batching_dims=operand_axes, scatter_indices_batching_dims=index_axes)
    )  # fmt: skip
    build.changed = True
    inputs = [eqn.invars[0], indices, *eqn.invars[2:]]
    return eqn.replace(invars=inputs, params=eqn.params | {"dimension_numbers": numbers})


def _joined(columns: list[Any]) -> Program:
    """Return the program that joins columns along the last axis."""
    avals = [v.aval for v in columns]
    return trace(lambda *xs: [lax.concatenate(xs, len(avals[0].shape) - 1)], *avals)
