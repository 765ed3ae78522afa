"""How each primitive maps the axes of its operands, for the proof that an axis is a batch.

An axis of an operand ends in one of three ways. It becomes an axis of the result with the same
indices, it is summed over, or the primitive mixes its indices ("needs the axis whole"). Elementwise
primitives need no entry in the table. An unknown primitive needs all axes of its operands whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from xform._jax import JaxprEqn
from xform.interpret.cost import shape
from xform.registry.dependence import Elementwise
from xform.registry.table import traits
from xform.rules.contract import remaining_axes

# For each axis of an operand: its axis in the result; or a number >= the result's number of axes if
# it is summed, equal for axes that are summed together; or None if it is needed whole.
Ends = tuple[int | None, ...]
EndsRule = Callable[[JaxprEqn], list[Ends]]


def ends(eqn: JaxprEqn) -> list[Ends]:
    """How an equation maps the axes of each of its operands."""
    if row := _TABLE.get(eqn.primitive.name):
        return row(eqn)
    known = traits(eqn.primitive)
    if known.identity or isinstance(known.dependence, Elementwise) or known.fusion == "elementwise":
        return _each(eqn)
    return [(None,) * len(shape(v)) for v in eqn.invars]


def _each(eqn: JaxprEqn) -> list[Ends]:
    ndim = len(shape(eqn.outvars[0]))
    return [tuple(range(ndim)) if len(s) == ndim else (None,) * len(s)
            for s in map(shape, eqn.invars)]  # fmt: skip


def _sum(eqn: JaxprEqn) -> list[Ends]:
    return _without(eqn, eqn.params["axes"], summed=True)


def _reduction(eqn: JaxprEqn) -> list[Ends]:
    return _without(eqn, eqn.params["axes"])


def _without(eqn: JaxprEqn, axes: Sequence[int], summed: bool = False) -> list[Ends]:
    """The result has all axes except `axes`, in order; these are summed, or needed whole."""
    out: list[Ends] = []
    for s in map(shape, eqn.invars):
        keeps = remaining_axes(len(s), axes)
        place = {axis: j for j, axis in enumerate(keeps)}
        gone = {axis: len(keeps) + k if summed else None for k, axis in enumerate(axes)}
        out.append(tuple(place.get(i, gone.get(i)) for i in range(len(s))))
    return out


def _along(*names: str) -> EndsRule:
    """For primitives that work along some axes, which these parameters name: the others stay."""

    def row(eqn: JaxprEqn) -> list[Ends]:
        mixed = set[int]()
        for axes in (eqn.params[name] for name in names if name in eqn.params):
            mixed |= set(axes) if isinstance(axes, Sequence) else {axes}
        ndims = [len(shape(v)) for v in eqn.invars]
        return [tuple(None if i in mixed else i for i in range(n)) for n in ndims]

    return row


def _matrices(eqn: JaxprEqn) -> list[Ends]:
    """All axes stay except the last two."""
    ndims = [len(shape(v)) for v in eqn.invars]
    return [tuple(i if i < n - 2 else None for i in range(n)) for n in ndims]


def _fft(eqn: JaxprEqn) -> list[Ends]:
    n = len(shape(eqn.invars[0]))
    return [tuple(i if i < n - len(eqn.params["fft_lengths"]) else None for i in range(n))]


def _windows(eqn: JaxprEqn) -> list[Ends]:
    """An axis stays if its window has size 1, and no stride, dilation or padding."""
    p, ndim = eqn.params, len(eqn.params["window_dimensions"])
    names = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    sizes = [p.get(name) or (1,) * ndim for name in names]
    pads = [(low, high) for low, high in p["padding"]]
    still = [n == (1, 1, 1, 1) and pad == (0, 0)
             for n, pad in zip(zip(*sizes, strict=True), pads, strict=True)]  # fmt: skip
    return [tuple(i if still[i] else None for i in range(ndim)) if len(s) == ndim else ()
            for s in map(shape, eqn.invars)]  # fmt: skip


def _same_length(eqn: JaxprEqn) -> list[Ends]:
    """An axis stays if it has the same length in the result: the slice is then the whole axis."""
    ys = shape(eqn.outvars[0])
    return [tuple(i if len(s) == len(ys) and s[i] == ys[i] else None for i in range(len(s)))
            for s in map(shape, eqn.invars)]  # fmt: skip


def _pad(eqn: JaxprEqn) -> list[Ends]:
    padding = eqn.params["padding_config"]
    return [tuple(i if tuple(p) == (0, 0, 0) else None for i, p in enumerate(padding)), ()]


def _update(eqn: JaxprEqn) -> list[Ends]:
    """An axis stays unless the update is shorter: its indices would then differ in treatment."""
    x, part = map(shape, eqn.invars[:2])
    of = tuple(i if n == m else None for i, (n, m) in enumerate(zip(x, part, strict=True)))
    return [of, of, *[()] * (len(eqn.invars) - 2)]


def _transpose(eqn: JaxprEqn) -> list[Ends]:
    return [tuple(int(j) for j in np.argsort(eqn.params["permutation"]))]


def _broadcast(eqn: JaxprEqn) -> list[Ends]:
    return [tuple(eqn.params["broadcast_dimensions"]), *[()] * (len(eqn.invars) - 1)]


def _dot(eqn: JaxprEqn) -> list[Ends]:
    summed, batch = eqn.params["dimension_numbers"]
    ndim, first = len(shape(eqn.outvars[0])), len(batch[0])
    out: list[Ends] = []
    for v, over, together in zip(eqn.invars, summed, batch, strict=True):
        owns = remaining_axes(len(shape(v)), over, together)
        place = {axis: k for k, axis in enumerate(together)}
        place |= {axis: k for k, axis in enumerate(owns, first)}
        place |= {axis: k for k, axis in enumerate(over, ndim)}
        first += len(owns)
        out.append(tuple(place[i] for i in range(len(shape(v)))))
    return out


def _conv(eqn: JaxprEqn) -> list[Ends]:
    """The batch and feature axes stay, and the spatial axes along which the window does not slide.

    The input features are summed.
    """
    p = eqn.params
    of_x, of_w, of_y = p["dimension_numbers"]
    ndim, grouped = len(of_y), p["feature_group_count"] > 1 or p["batch_group_count"] > 1
    x: dict[int, int | None] = {of_x[0]: of_y[0] if p["batch_group_count"] == 1 else None}
    w: dict[int, int | None] = {of_w[0]: None if grouped else of_y[1]}
    x[of_x[1]] = w[of_w[1]] = None if grouped else ndim
    sizes = shape(eqn.invars[1])
    plain = zip(of_x[2:], of_w[2:], of_y[2:], p["window_strides"], p["padding"],
                p["lhs_dilation"], strict=True)  # fmt: skip
    for i, j, k, stride, padding, dilation in plain:
        still = (sizes[j], stride, tuple(padding), dilation) == (1, 1, (0, 0), 1)
        x[i], w[j] = (k if still else None), None
    return [tuple(x[i] for i in range(ndim)), tuple(w[i] for i in range(ndim))]


def _gather(eqn: JaxprEqn) -> list[Ends]:
    """Three kinds of axes stay: full in every window, batching axes, and axes of the indices."""
    d, (x, indices, y) = eqn.params["dimension_numbers"], map(shape, (*eqn.invars, *eqn.outvars))
    outside = remaining_axes(len(y), d.offset_dims)
    place = _fixed(x, eqn.params["slice_sizes"], d.offset_dims, d.collapsed_slice_dims,
                   d.operand_batching_dims, d.start_index_map)  # fmt: skip
    pairs = zip(d.operand_batching_dims, d.start_indices_batching_dims, strict=True)
    place |= {i: outside[j] for i, j in pairs}
    return [tuple(place.get(i) for i in range(len(x))), (*outside[: len(indices) - 1], None)]


def _scatter(adds: bool) -> EndsRule:
    """The reverse of `_gather`. If `adds`, the other axes of the updates are summed."""

    def row(eqn: JaxprEqn) -> list[Ends]:
        d, (x, indices, updates) = eqn.params["dimension_numbers"], map(shape, eqn.invars)
        outside = remaining_axes(len(updates), d.update_window_dims)
        inserted, batched = d.inserted_window_dims, d.operand_batching_dims
        inside = remaining_axes(len(x), inserted, batched)
        sizes = [1] * len(x)
        for i, j in zip(inside, d.update_window_dims, strict=True):
            sizes[i] = updates[j]
        place = _fixed(x, sizes, d.update_window_dims, inserted, batched,
                       d.scatter_dims_to_operand_dims)  # fmt: skip
        pairs = [*zip(batched, d.scatter_indices_batching_dims, strict=True)]
        place |= {i: outside[j] for i, j in pairs}
        back: dict[int, int | None] = {j: i for i, j in place.items()}
        summed = {j: len(x) + k if adds else None for k, j in enumerate(outside) if j not in back}
        of = tuple((back | summed).get(j) for j in range(len(updates)))
        at = tuple(of[j] for j in outside[: len(indices) - 1])
        return [tuple(i if i in place else None for i in range(len(x))), (*at, None), of]

    return row


def _fixed(x: Sequence[int], sizes: Sequence[int], axes: Sequence[int], narrow: Sequence[int],
             batch: Sequence[int], named: Sequence[int]) -> dict[int, int]:  # fmt: skip
    """The axes that every window covers fully, each with its axis in the array of the windows."""
    inside = zip(remaining_axes(len(x), narrow, batch), axes, strict=True)
    return {i: j for i, j in inside if i not in named and sizes[i] == x[i]}


_ROWS: dict[EndsRule, str] = {
    _sum: "reduce_sum",
    _reduction: "reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin",
    _along("dimension", "dimensions", "axis"): "sort rev concatenate split top_k cumsum cumprod "
    "cummax cummin cumlogsumexp",
    _along("reduction_dimension"): "approx_top_k",
    _matrices: "cholesky eigh lu qr svd schur householder_product triangular_solve",
    _fft: "fft",
    _windows: "reduce_window reduce_window_sum reduce_window_max reduce_window_min "
    "select_and_scatter_add select_and_gather_add xform_unpool",
    _same_length: "slice dynamic_slice tile",
    _pad: "pad",
    _update: "dynamic_update_slice",
    _transpose: "transpose",
    _broadcast: "broadcast_in_dim",
    _dot: "dot_general",
    _conv: "conv_general_dilated",
    _gather: "gather",
    _scatter(adds=True): "scatter_add scatter-add scatter_sub scatter-sub",
    _scatter(adds=False): "scatter scatter_mul scatter-mul scatter_min scatter-min scatter_max "
    "scatter-max",
}
_TABLE = {name: row for row, names in _ROWS.items() for name in names.split()}
