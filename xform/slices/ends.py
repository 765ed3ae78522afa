"""How each primitive maps the axes of its operands to axes of its result.

The search for regions that can run in slices needs this (`slicing.py`), and so does the proof that
an axis is a batch (`xform.memory.batch_axes`). An axis of an operand ends in one of three ways:

- it *stays*: it becomes an axis of the result with the same indices;
- it is *summed*: the primitive sums over it;
- it is *mixed*: elements of the result depend on several of its indices, or on their order.

In `x @ w` the rows of `x` stay and its columns are summed. In `cumsum(x, 0)` axis 0 is mixed.
Elementwise primitives need no entry in the table at the end of this file. An unknown primitive
counts as mixing all axes of its operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from xform._jax import JaxprEqn
from xform.program.dimensions import shape
from xform.registry.dependence import Elementwise
from xform.registry.table import traits
from xform.rules.contract import remaining_axes

# One entry for each axis of an operand:
# - the axis of the result, if the operand's axis stays;
# - a number greater than every axis of the result, if it is summed. Axes that are summed together
#   have the same number, such as the two contracted axes of a matrix product;
# - None, if it is mixed.
Ends = tuple[int | None, ...]
# Returns the `Ends` of each operand of an equation.
EndsRule = Callable[[JaxprEqn], list[Ends]]


def ends(eqn: JaxprEqn) -> list[Ends]:
    """Return for each operand of an equation how each of its axes ends.

    >>> from xform.slices.ends import ends
    >>> (product,) = jax.make_jaxpr(jax.lax.dot)(jnp.ones((2, 3)), jnp.ones((3, 4))).eqns
    >>> ends(product)  # axes 0 and 1 of the result; 2 is summed
    [(0, 2), (2, 1)]
    """
    if rule := _TABLE.get(eqn.primitive.name):
        return rule(eqn)
    known = traits(eqn.primitive)
    if known.identity or isinstance(known.dependence, Elementwise) or known.fusion == "elementwise":
        return _elementwise(eqn)
    return [(None,) * len(shape(v)) for v in eqn.invars]


# The functions below are the rules of primitives. Their docstrings say which axes stay.


def _elementwise(eqn: JaxprEqn) -> list[Ends]:
    """All axes stay. All axes of an operand with another rank than the result are mixed."""
    ndim = len(shape(eqn.outvars[0]))
    return [tuple(range(ndim)) if len(s) == ndim else (None,) * len(s)
            for s in map(shape, eqn.invars)]  # fmt: skip


def _sum(eqn: JaxprEqn) -> list[Ends]:
    """The axes of a sum are summed, and all other axes stay."""
    return _reduce(eqn, eqn.params["axes"], summed=True)


def _reduction(eqn: JaxprEqn) -> list[Ends]:
    """The axes of a reduction that is not a sum are mixed, and all other axes stay."""
    return _reduce(eqn, eqn.params["axes"])


def _reduce(eqn: JaxprEqn, axes: Sequence[int], summed: bool = False) -> list[Ends]:
    """All axes except `axes` stay, in order. `axes` are summed, or else mixed."""
    out: list[Ends] = []
    for s in map(shape, eqn.invars):
        kept = remaining_axes(len(s), axes)
        result_axis = {axis: j for j, axis in enumerate(kept)}
        reduced = {axis: len(kept) + k if summed else None for k, axis in enumerate(axes)}
        out.append(tuple(result_axis.get(i, reduced.get(i)) for i in range(len(s))))
    return out


def _mixes(*names: str) -> EndsRule:
    """Return the rule of primitives that mix the axes in these parameters; other axes stay.

    An axis in a parameter may count from the end.
    """

    def rule(eqn: JaxprEqn) -> list[Ends]:
        mixed = set[int]()
        for axes in (eqn.params[name] for name in names if name in eqn.params):
            mixed |= set(axes) if isinstance(axes, Sequence) else {axes}
        ndims = [len(shape(v)) for v in eqn.invars]
        return [tuple(None if mixed & {i, i - n} else i for i in range(n)) for n in ndims]

    return rule


def _matrices(eqn: JaxprEqn) -> list[Ends]:
    """All axes stay except the last two of matrices, and the last of vectors that go with them."""
    ndims = [len(shape(v)) for v in eqn.invars]
    batch = max(ndims) - 2
    return [tuple(i if i < batch else None for i in range(n)) for n in ndims]


def _fft(eqn: JaxprEqn) -> list[Ends]:
    """All axes stay except the transformed ones, which are the last."""
    n = len(shape(eqn.invars[0]))
    return [tuple(i if i < n - len(eqn.params["fft_lengths"]) else None for i in range(n))]


def _windows(eqn: JaxprEqn) -> list[Ends]:
    """An axis stays if its window has size 1, and no stride, dilation or padding."""
    p, ndim = eqn.params, len(eqn.params["window_dimensions"])
    names = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    sizes = [p.get(name) or (1,) * ndim for name in names]
    pads = [(low, high) for low, high in p["padding"]]
    stays = [n == (1, 1, 1, 1) and pad == (0, 0)
             for n, pad in zip(zip(*sizes, strict=True), pads, strict=True)]  # fmt: skip
    return [tuple(i if stays[i] else None for i in range(ndim)) if len(s) == ndim else ()
            for s in map(shape, eqn.invars)]  # fmt: skip


def _same_length(eqn: JaxprEqn) -> list[Ends]:
    """An axis stays if it has the same length in the result: the slice is then the whole axis."""
    ys = shape(eqn.outvars[0])
    return [tuple(i if len(s) == len(ys) and s[i] == ys[i] else None for i in range(len(s)))
            for s in map(shape, eqn.invars)]  # fmt: skip


def _pad(eqn: JaxprEqn) -> list[Ends]:
    """The axes that are not padded stay."""
    padding = eqn.params["padding_config"]
    return [tuple(i if tuple(p) == (0, 0, 0) else None for i, p in enumerate(padding)), ()]


def _update(eqn: JaxprEqn) -> list[Ends]:
    """An axis stays unless the update is shorter: then only some indices are updated."""
    x, update = map(shape, eqn.invars[:2])
    axes = tuple(i if n == m else None for i, (n, m) in enumerate(zip(x, update, strict=True)))
    return [axes, axes, *[()] * (len(eqn.invars) - 2)]


def _transpose(eqn: JaxprEqn) -> list[Ends]:
    """All axes stay, in another order."""
    return [tuple(int(j) for j in np.argsort(eqn.params["permutation"]))]


def _broadcast(eqn: JaxprEqn) -> list[Ends]:
    """All axes stay, among new ones."""
    return [tuple(eqn.params["broadcast_dimensions"]), *[()] * (len(eqn.invars) - 1)]


def _dot(eqn: JaxprEqn) -> list[Ends]:
    """The contracted axes are summed, the batch axes and the free axes stay."""
    contracted, batch = eqn.params["dimension_numbers"]
    ndim, first_free = len(shape(eqn.outvars[0])), len(batch[0])
    out: list[Ends] = []
    for v, summed_axes, batch_axes in zip(eqn.invars, contracted, batch, strict=True):
        free_axes = remaining_axes(len(shape(v)), summed_axes, batch_axes)
        end = {axis: k for k, axis in enumerate(batch_axes)}
        end |= {axis: k for k, axis in enumerate(free_axes, first_free)}
        end |= {axis: k for k, axis in enumerate(summed_axes, ndim)}
        first_free += len(free_axes)
        out.append(tuple(end[i] for i in range(len(shape(v)))))
    return out


def _conv(eqn: JaxprEqn) -> list[Ends]:
    """The batch and output features stay; the input features are summed.

    A spatial axis of the input stays if the window has size 1 and stride 1 along it, and the input
    has no padding and no dilation. Other spatial axes of the input are mixed, and all spatial axes
    of the window. With groups, the axes that the groups split are mixed.
    """
    p = eqn.params
    axes_x, axes_w, axes_y = p["dimension_numbers"]
    ndim, grouped = len(axes_y), p["feature_group_count"] > 1 or p["batch_group_count"] > 1
    x: dict[int, int | None] = {axes_x[0]: axes_y[0] if p["batch_group_count"] == 1 else None}
    w: dict[int, int | None] = {axes_w[0]: None if grouped else axes_y[1]}
    x[axes_x[1]] = w[axes_w[1]] = None if grouped else ndim
    window = shape(eqn.invars[1])
    spatial = zip(axes_x[2:], axes_w[2:], axes_y[2:], p["window_strides"], p["padding"],
                  p["lhs_dilation"], strict=True)  # fmt: skip
    for i, j, k, stride, padding, dilation in spatial:
        stays = (window[j], stride, tuple(padding), dilation) == (1, 1, (0, 0), 1)
        x[i], w[j] = (k if stays else None), None
    return [tuple(x[i] for i in range(ndim)), tuple(w[i] for i in range(ndim))]


def _gather(eqn: JaxprEqn) -> list[Ends]:
    """Axes that every window covers in full stay, and batching axes and axes of the indices."""
    d, (x, indices, y) = eqn.params["dimension_numbers"], map(shape, (*eqn.invars, *eqn.outvars))
    index_axes = remaining_axes(len(y), d.offset_dims)  # in the result
    end = _whole_axes(x, eqn.params["slice_sizes"], d.offset_dims, d.collapsed_slice_dims,
                      d.operand_batching_dims, d.start_index_map)  # fmt: skip
    pairs = zip(d.operand_batching_dims, d.start_indices_batching_dims, strict=True)
    end |= {i: index_axes[j] for i, j in pairs}
    return [tuple(end.get(i) for i in range(len(x))), (*index_axes[: len(indices) - 1], None)]


def _scatter(adds: bool) -> EndsRule:
    """Return the rule of a scatter, the reverse of a gather.

    If `adds`, the axes of the updates that do not stay are summed.
    """

    def rule(eqn: JaxprEqn) -> list[Ends]:
        d, (x, indices, updates) = eqn.params["dimension_numbers"], map(shape, eqn.invars)
        index_axes = remaining_axes(len(updates), d.update_window_dims)  # in the updates
        inserted, batched = d.inserted_window_dims, d.operand_batching_dims
        window_axes = remaining_axes(len(x), inserted, batched)
        sizes = [1] * len(x)
        for i, j in zip(window_axes, d.update_window_dims, strict=True):
            sizes[i] = updates[j]
        update_axis = _whole_axes(x, sizes, d.update_window_dims, inserted, batched,
                                  d.scatter_dims_to_operand_dims)  # fmt: skip
        pairs = [*zip(batched, d.scatter_indices_batching_dims, strict=True)]
        update_axis |= {i: index_axes[j] for i, j in pairs}
        stays: dict[int, int | None] = {j: i for i, j in update_axis.items()}
        summed = {
            j: len(x) + k if adds else None for k, j in enumerate(index_axes) if j not in stays
        }
        of_updates = tuple((stays | summed).get(j) for j in range(len(updates)))
        of_indices = tuple(of_updates[j] for j in index_axes[: len(indices) - 1])
        of_x = tuple(i if i in update_axis else None for i in range(len(x)))
        return [of_x, (*of_indices, None), of_updates]

    return rule


def _whole_axes(
    x: Sequence[int],
    sizes: Sequence[int],
    axes: Sequence[int],
    collapsed: Sequence[int],
    batch: Sequence[int],
    indexed: Sequence[int],
) -> dict[int, int]:
    """Map each axis of `x` that every window covers in full to its axis in the array of windows.

    A window is the part of `x` that one index selects. The array of windows holds all of them: it
    is the result of a gather, or the updates of a scatter.

    Args:
      x: the shape of the array that the windows are part of.
      sizes: the shape of one window, with a size for each axis of `x`.
      axes: the axes of the array of windows that are axes of one window, in order. There is one for
        each axis of `x` that is neither `collapsed` nor `batch`.
      collapsed: axes of `x` that the array of windows lacks: the window has size 1 there.
      batch: batching axes of `x`, also called operand batching dimensions.
      indexed: axes of `x` along which indices give the start of the window. They are not returned.
    """
    window_axes = zip(remaining_axes(len(x), collapsed, batch), axes, strict=True)
    return {i: j for i, j in window_axes if i not in indexed and sizes[i] == x[i]}


# The rules, each with the names of its primitives.
_PRIMITIVES: dict[EndsRule, str] = {
    _elementwise: "bitcast_convert_type",
    _sum: "reduce_sum",
    _reduction: "reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin",
    _mixes("dimension", "dimensions", "axis"): "sort rev concatenate split top_k cumsum cumprod "
    "cummax cummin cumlogsumexp",
    _mixes("reduction_dimension"): "approx_top_k",
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
_TABLE = {name: rule for rule, names in _PRIMITIVES.items() for name in names.split()}
