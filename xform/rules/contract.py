"""Rules of contractions: dot_general, ragged_dot_general and convolution, linear in two operands.

The cotangent of an operand contracts `ct`, the cotangent of the result `y`, with the other operand.
It is computed in the `preferred_element_type` of the forward contraction, and returned in the
operand's dtype. `_..._lhs` computes it for the left operand (`a`, or the input `x` of a
convolution), and `_..._rhs` for the right operand (`b`, or the kernel `w`).

The axes of `a` and `b` are of three kinds. *Batch* axes are in both operands and in `y`.
*Contracted* (summed) axes are in both operands only. *Own* axes are in one operand and in `y`.

The *dependence* of a primitive says which elements of the operands each element of `y` depends on.
Its `Links` (`xform.registry.dependence`) say it axis by axis: one link for each axis of `y`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from xform._jax import JaxprEqn
from xform._jax.symbolic import conv_general_dilated, larger
from xform.errors import UnsupportedParam
from xform.interpret import cost
from xform.program.arithmetic import Value, add, cotangent_sharding
from xform.program.dimensions import shape
from xform.program.ir import Mask, apply
from xform.registry import dependence
from xform.registry.dependence import AxisByAxis, AxisLink, Links, Values
from xform.registry.ends import Ends, remaining_axes
from xform.registry.table import declare
from xform.registry.traits import Traits
from xform.registry.words import Bilinear, bilinear

Axes = Sequence[int]


def cast_cotangent(ct: Any, x: Any) -> Any:
    """Return `ct` in the dtype of `x`. If `x` is real, the imaginary part of `ct` is dropped."""
    ct = lax.real(ct) if np.iscomplexobj(ct) and not np.iscomplexobj(x) else ct
    return ct if ct.dtype == x.dtype else lax.convert_element_type(ct, x.dtype)


def sharding(x: Any, axes: Axes) -> Any:
    """Return the `out_sharding` of a cotangent of `x` with its axes in the order `axes`."""
    own = cotangent_sharding(x)
    if not own.mesh.empty:
        spec = own.spec
        return own.update(spec=spec.update(partitions=[spec.partitions[i] for i in axes]))
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else NamedSharding(mesh, PartitionSpec(*(None for _ in axes)))


# dot_general: y[n, i, j] = sum over k of a[n, i, k] b[n, j, k]. Here n stands for all batch axes, i
# and j for the own axes of a and of b, and k for the contracted axes. Therefore
#     cotangent of a[n, i, k] = sum over j of ct[n, i, j] b[n, j, k]
#     cotangent of b[n, j, k] = sum over i of ct[n, i, j] a[n, i, k]


def _dot_lhs(ct: Any, a: Any, b: Any, *, dimension_numbers: Any, precision: Any,
             preferred_element_type: Any, out_sharding: Any):  # fmt: skip
    (a_sum, b_sum), (a_batch, b_batch) = dimension_numbers
    own = remaining_axes(np.ndim(a), a_sum, a_batch)
    other = len(a_batch) + len(own)
    return _dot(ct, b, a, b_sum, b_batch, range(other, ct.ndim), a_sum, a_batch, own, precision,
                preferred_element_type)  # fmt: skip


def _dot_rhs(ct: Any, a: Any, b: Any, *, dimension_numbers: Any, precision: Any,
             preferred_element_type: Any, out_sharding: Any):  # fmt: skip
    (a_sum, b_sum), (a_batch, b_batch) = dimension_numbers
    own = remaining_axes(np.ndim(b), b_sum, b_batch)
    other = ct.ndim - len(own)
    return _dot(ct, a, b, a_sum, a_batch, range(len(b_batch), other), b_sum, b_batch, own,
                precision, preferred_element_type)  # fmt: skip


def _dot(ct: Any, known: Any, x: Any, known_sum: Axes, known_batch: Axes, ct_known: Axes,
         x_sum: Axes, x_batch: Axes, x_own: Axes, precision: Any, preferred: Any):  # fmt: skip
    """Return the cotangent of the operand `x`, given the other operand `known`.

    This contracts the own axes of `known` with the axes `ct_known` of `ct`. The other arguments are
    axes of each kind; `sum` axes are those contracted in the forward product.
    """
    own = remaining_axes(np.ndim(known), known_sum, known_batch)
    dims = (ct_known, own), (range(len(x_batch)), known_batch)
    # The axes of the product, as axes of `x`. The last ones are the contracted axes, in the order
    # of `known`.
    order = [*x_batch, *x_own, *(x_sum[i] for i in np.argsort(known_sum))]
    out = lax.dot_general(ct, known, dims, precision, preferred, out_sharding=sharding(x, order))
    return cast_cotangent(lax.transpose(out, np.argsort(order)), x)


def _dot_flops(eqn: JaxprEqn) -> int:
    """Return 2 FLOPs for each element of the result and each index of the contracted axes."""
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return 2 * cost.size(eqn.outvars[0]) * _product(eqn.invars[0], contracted)


def _product(v: Any, axes: Axes) -> int:
    """Return the product of the lengths of some axes of a value."""
    return math.prod(cost.sizes(v)[i] for i in axes)


def _dot_ends(eqn: JaxprEqn) -> list[Ends]:
    """The contracted axes are summed, the batch axes and the own axes stay."""
    contracted, batch = eqn.params["dimension_numbers"]
    ndim, first_own = len(shape(eqn.outvars[0])), len(batch[0])
    out: list[Ends] = []
    for v, summed_axes, batch_axes in zip(eqn.invars, contracted, batch, strict=True):
        own_axes = remaining_axes(len(shape(v)), summed_axes, batch_axes)
        end = {axis: k for k, axis in enumerate(batch_axes)}
        end |= {axis: k for k, axis in enumerate(own_axes, first_own)}
        end |= {axis: k for k, axis in enumerate(summed_axes, ndim)}
        first_own += len(own_axes)
        out.append(tuple(end[i] for i in range(len(shape(v)))))
    return out


def _dot_dependence(eqn: JaxprEqn, values: Values) -> list[list[Links]]:
    """Link batch axes and own axes of the result to the same axes of the operands.

    Along a contracted axis a result depends on all elements, or, if the other operand is a known
    matrix, on those multiplied by a nonzero. `values` has each known operand, else None.
    """
    (a_sum, b_sum), (batch, _) = eqn.params["dimension_numbers"]
    links = dependence.links_of(eqn, _dot_ends)
    for i, summed in enumerate((a_sum, b_sum)):
        known = values[1 - i]
        if known is not None and known.ndim == 2 and not batch and len(summed) == 1:
            across = known if (a_sum, b_sum)[1 - i][0] == 1 else known.T
            link = AxisLink(summed[0], dependence.nonzero_rows(across))
            links[i] = (*links[i][:-1], link) if i == 0 else (link, *links[i][1:])
    return [[of_operand] for of_operand in links]


bilinear("dot_general", _dot_lhs, _dot_rhs, traits=Traits(
    product="matrix", flops=_dot_flops,
    dependence=AxisByAxis(_dot_dependence, reads=(0, 2)), ends=_dot_ends,
))  # fmt: skip


# ragged_dot_general. One axis of a, the *ragged* axis r, consists of consecutive groups. The third
# input has their sizes; g(r) is the group of r. Each cotangent is a ragged product over the groups:
# - r is an own axis: y[r, j] = sum over k of a[r, k] b[g(r), k, j]
#       cotangent of a[r, k] = sum over j of ct[r, j] b[g(r), k, j]
#       cotangent of b[g, k, j] = sum over r in group g of a[r, k] ct[r, j]
# - r is contracted: y[g, i, j] = sum over r in group g of a[i, r] b[r, j]
#       cotangent of a[i, r] = sum over j of b[r, j] ct[g(r), i, j]
#       cotangent of b[r, j] = sum over i of a[i, r] ct[g(r), i, j]


class RaggedProduct(Bilinear):
    """The rule of a primitive linear in each of its first two inputs; the others are integers."""

    def push(self, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value], dxs: Sequence[Value]):
        (a, b, *sizes), (da, db, *_) = xs, dxs
        terms = [] if da is None else apply(eqn, [da, b, *sizes])
        return [add([*terms, *([] if db is None else apply(eqn, [a, db, *sizes]))])]

    def pull(self, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value], cts: Sequence[Value],
             active: Mask):  # fmt: skip
        formulas = zip(self.formulas, active, strict=False)
        out = [self.call(f, eqn, cts[0], *xs) if on else None for f, on in formulas]
        return [*out, *[None] * (len(xs) - len(out))]


def _ragged_lhs(ct: Any, a: Any, b: Any, sizes: Any, *, ragged_dot_dimension_numbers: Any,
                precision: Any, preferred_element_type: Any, out_sharding: Any):  # fmt: skip
    numbers = ragged_dot_dimension_numbers
    (a_sum, b_sum), (a_batch, b_batch) = numbers.dot_dimension_numbers
    (ragged,), group = numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions
    own = remaining_axes(np.ndim(a), a_sum, a_batch)
    b_own = remaining_axes(np.ndim(b), b_sum, b_batch, group)
    last = range(ct.ndim - len(b_own), ct.ndim)
    summed = [a_sum[i] for i in np.argsort(b_sum)]
    kind = (sizes, precision, preferred_element_type)
    if ragged in own:  # ct[batch, a's own, b's own] and b[group, batch, sum, b's own]
        dims = (last, b_own), (range(len(a_batch)), b_batch)
        rows = len(a_batch) + own.index(ragged)
        return _ragged(ct, b, a, dims, rows, group, [*a_batch, *own, *summed], *kind)
    if ragged in a_sum:  # b[batch, sum, b's own] and ct[group, batch, a's own, b's own]
        dims = (b_own, last), (b_batch, range(1, 1 + len(a_batch)))
        rows = b_sum[list(a_sum).index(ragged)]
        return _ragged(b, ct, a, dims, rows, (0,), [*a_batch, *summed, *own], *kind)
    raise _ragged_batch()


def _ragged_rhs(ct: Any, a: Any, b: Any, sizes: Any, *, ragged_dot_dimension_numbers: Any,
                precision: Any, preferred_element_type: Any, out_sharding: Any):  # fmt: skip
    numbers = ragged_dot_dimension_numbers
    (a_sum, b_sum), (a_batch, b_batch) = numbers.dot_dimension_numbers
    (ragged,), group = numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions
    own = remaining_axes(np.ndim(a), a_sum, a_batch)
    b_own = remaining_axes(np.ndim(b), b_sum, b_batch, group)
    order = [*group, *b_batch, *(b_sum[i] for i in np.argsort(a_sum)), *b_own]
    first = 0 if ragged in own else 1  # ct has a group axis first if the ragged axis is contracted
    if ragged in a_batch:
        raise _ragged_batch()
    batch = range(first, first + len(a_batch))
    dims = (own, range(batch.stop, batch.stop + len(own))), (a_batch, batch)
    kind = (sizes, precision, preferred_element_type)
    return _ragged(a, ct, b, dims, ragged, (0,) if first else (), order, *kind)


def _ragged_batch() -> UnsupportedParam:
    """Return the error for a ragged axis that is a batch axis."""
    return UnsupportedParam(
        "derivative of ragged_dot_general",
        "its rule does not support a ragged axis among the batch axes",
        "",
        "make the ragged axis a row or a contracted axis, or wrap the call in jax.custom_vjp",
    )


def _ragged(a: Any, b: Any, x: Any, dims: Any, ragged: int, group: Axes, order: Axes, sizes: Any,
            precision: Any, preferred: Any):  # fmt: skip
    """Return the cotangent of `x`: the ragged product of `a` and `b`, with the axes of `x`.

    `dims`, `ragged` and `group` describe the axes of `a` and `b` for `ragged_dot_general`. `order`
    has the axes of the product, as axes of `x`.
    """
    numbers = lax.RaggedDotDimensionNumbers(dims, (ragged,), group)
    out = lax.ragged_dot_general(a, b, sizes, numbers, precision, preferred)
    return cast_cotangent(lax.transpose(out, np.argsort(order)), x)


def _ragged_flops(eqn: JaxprEqn) -> int:
    """Return the FLOPs. Each index of the ragged axis is multiplied with one group only."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    outputs = cost.size(eqn.outvars[0])
    if numbers.lhs_ragged_dimensions[0] in contracted:  # y has a matrix for each group
        outputs //= cost.sizes(eqn.outvars[0])[0]
    return 2 * outputs * _product(eqn.invars[0], contracted)


declare(RaggedProduct, "ragged_dot_general", "bilinear", [_ragged_lhs, _ragged_rhs],
        Traits(flops=_ragged_flops))  # fmt: skip


# Convolution, for one spatial axis (all are alike) and one group:
#     y[n, o, p] = sum over i and k of x'[n, i, p * stride + k * dilation - low] w[o, i, k]
# n is the example, o and i the output and the input feature, p and k the positions of output and
# kernel. x' is x with `lhs_dilation - 1` zeros (holes) between elements and zeros (padding)
# outside, `low` of them before. `stride` is `window_strides`, `dilation` is `rhs_dilation`.
#
# Both cotangents are convolutions again. Below are their input, their kernel and the padding before
# the input. The padding after the input follows from the length of the output: with stride 1, that
# is `input + both paddings - kernel + 1`.
# - Cotangent of x (a transposed convolution): y[p] has the term x'[q] w[k] if
#   p * stride = q + low - k * dilation. So the input is ct with holes for the stride, the kernel is
#   w reversed, with o and i swapped, and the padding before is `window - 1 - low`, where `window`
#   is the length of w with holes. The stride `lhs_dilation` skips the holes of x'.
# - Cotangent of w: the input is x with padding `low`, the kernel is ct with holes for the stride,
#   and the sum runs over n, which takes the place of i. So feature groups become batch groups. The
#   stride `rhs_dilation` skips the holes of w.
# Source: Dumoulin and Visin, "A guide to convolution arithmetic for deep learning",
# arXiv:1603.07285, chapter 4. `_conv_general_vjp_lhs_padding` and `_conv_general_vjp_rhs_padding`
# in `jax/_src/lax/convolution.py` compute the same paddings.


def _extent(size: int, dilation: int) -> int:
    """Return the length of an axis of `size` elements with `dilation - 1` holes between them."""
    return larger(0, (size - 1) * dilation + 1)


def regroup(x: Any, groups: int, source: int, target: int) -> Any:
    """Split the axis `source` into `groups` parts, and append the parts along the axis `target`."""
    if groups == 1:
        return x
    shape = list(x.shape)
    shape[source] //= groups
    x = lax.reshape(x, [*shape[:source], groups, *shape[source:]])
    axes = [i for i in range(x.ndim) if i != source]
    x = lax.transpose(x, [*axes[:target], source, *axes[target:]])
    shape[target] *= groups
    return lax.reshape(x, shape)


def _conv_lhs(ct: Any, x: Any, w: Any, *, window_strides: Any, padding: Any, lhs_dilation: Any,
              rhs_dilation: Any, dimension_numbers: Any, feature_group_count: int,
              batch_group_count: int, precision: Any, preferred_element_type: Any,
              out_sharding: Any):  # fmt: skip
    x_spec, w_spec, y_spec = dimension_numbers
    groups = max(feature_group_count, batch_group_count)
    pads = []
    axes = zip(x_spec[2:], w_spec[2:], y_spec[2:], strict=True)
    for i, (x_axis, w_axis, y_axis) in enumerate(axes):
        low = padding[i][0]
        window = _extent(w.shape[w_axis], rhs_dilation[i])
        length = _extent(x.shape[x_axis], lhs_dilation[i])
        pads.append((window - 1 - low, length - _extent(ct.shape[y_axis], window_strides[i]) + low))
    kernel = lax.rev(regroup(w, groups, w_spec[0], w_spec[1]), w_spec[2:])
    swapped = w_spec[1], w_spec[0], *w_spec[2:]
    out = conv_general_dilated(
        ct, lax.convert_element_type(kernel, ct.dtype), window_strides=lhs_dilation, padding=pads,
        lhs_dilation=window_strides, rhs_dilation=rhs_dilation,
        dimension_numbers=lax.ConvDimensionNumbers(y_spec, swapped, x_spec),
        feature_group_count=groups, precision=precision,
        preferred_element_type=preferred_element_type, out_sharding=sharding(x, range(x.ndim)),
    )  # fmt: skip
    return cast_cotangent(regroup(out, batch_group_count, x_spec[1], x_spec[0]), x)


def _conv_rhs(ct: Any, x: Any, w: Any, *, window_strides: Any, padding: Any, lhs_dilation: Any,
              rhs_dilation: Any, dimension_numbers: Any, feature_group_count: int,
              batch_group_count: int, precision: Any, preferred_element_type: Any,
              out_sharding: Any):  # fmt: skip
    if not math.prod(ct.shape):
        return lax.full_like(w, 0)  # `ct` would be a kernel of size 0
    specs = [(spec[1], spec[0], *spec[2:]) for spec in dimension_numbers]
    pads = []
    axes = zip(*(spec[2:] for spec in specs), strict=True)
    for i, (x_axis, w_axis, y_axis) in enumerate(axes):
        low = padding[i][0]
        length = _extent(x.shape[x_axis], lhs_dilation[i])
        window = _extent(ct.shape[y_axis], window_strides[i])
        high = _extent(w.shape[w_axis], rhs_dilation[i]) + window - 1 - length - low
        pads.append((low, high))
    out = conv_general_dilated(
        lax.convert_element_type(x, ct.dtype), ct, window_strides=rhs_dilation, padding=pads,
        lhs_dilation=lhs_dilation, rhs_dilation=window_strides,
        dimension_numbers=lax.ConvDimensionNumbers(specs[0], specs[2], specs[1]),
        feature_group_count=batch_group_count, batch_group_count=feature_group_count,
        precision=precision, preferred_element_type=preferred_element_type,
        out_sharding=sharding(w, range(w.ndim)),
    )  # fmt: skip
    return cast_cotangent(out, w)


def _conv_flops(eqn: JaxprEqn) -> int:
    """Return 2 FLOPs for each kernel element times an element of `x`, not padding or a hole."""
    p, numbers = eqn.params, eqn.params["dimension_numbers"]
    x, w, y = map(cost.sizes, (*eqn.invars, *eqn.outvars))
    taps = math.prod(
        _taps(x[i], w[j], y[k], *options)
        for i, j, k, *options in zip(
            numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:],
            p["window_strides"], p["lhs_dilation"], p["rhs_dilation"], p["padding"], strict=True)
    )  # fmt: skip
    batch, channels = (y[i] for i in numbers.out_spec[:2])
    return 2 * batch * channels * w[numbers.rhs_spec[1]] * taps


def _taps(n_in: int, n_window: int, n_out: int, stride: int, dilation: int, spread: int,
          padding: tuple[int, int]) -> int:  # fmt: skip
    """Count the pairs of positions of output and kernel that read no padding and no hole.

    For one spatial axis with the lengths `n_in`, `n_window` (the kernel) and `n_out`. `dilation` is
    the dilation of the input, `spread` that of the kernel.
    """
    i = np.arange(n_out)[:, None] * stride + np.arange(n_window) * spread - cost.number(padding[0])
    return int(np.sum((i >= 0) & (i <= (n_in - 1) * dilation) & (i % dilation == 0)))


def _conv_ends(eqn: JaxprEqn) -> list[Ends]:
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


def _conv_dependence(eqn: JaxprEqn, values: Values) -> list[list[Links]]:
    """Return on which elements an output depends: input elements in its window, and its kernel.

    If the value of the kernel is known, each position of the kernel (a tap) has links of its own,
    and zeros of the kernel remove links.
    """
    p = eqn.params
    x_spec, w_spec, y_spec = p["dimension_numbers"]
    x, w, y = map(shape, (*eqn.invars, *eqn.outvars))
    groups, batches = p["feature_group_count"], p["batch_group_count"]
    windows = [
        dependence.window_indices(x[i], y[k], w[j], stride, low, base, spread)
        for i, j, k, stride, (low, _), base, spread in zip(
            x_spec[2:], w_spec[2:], y_spec[2:], p["window_strides"], p["padding"],
            p["lhs_dilation"], p["rhs_dilation"], strict=True)
    ]  # fmt: skip
    kernel = values[1]
    if kernel is None:
        kernel = np.ones([n if axis in w_spec[:2] else 1 for axis, n in enumerate(w)])
        taps = [(windows, kernel.transpose(w_spec).reshape(w[w_spec[0]], w[w_spec[1]]))]
    else:
        kernel = kernel.transpose(w_spec)
        taps = [([indices[:, t : t + 1] for indices, t in zip(windows, tap, strict=True)],
                 kernel[(..., *tap)])
                for tap in np.ndindex(kernel.shape[2:])]  # fmt: skip
    of_input: list[Links] = []
    for indices, features in taps:
        if not np.any(features != 0):
            continue
        rows = map(dependence.index_rows, indices)
        links = dict(zip(y_spec[2:], map(AxisLink, x_spec[2:], rows), strict=True))
        # The output feature o is in the feature group g and reads the input features of that group.
        group_of = np.arange(y[y_spec[1]]) * groups // max(y[y_spec[1]], 1)
        across = np.zeros((y[y_spec[1]], x[x_spec[1]]), bool)
        n = w[w_spec[1]]
        for o, g in enumerate(group_of):
            across[o, g * n : (g + 1) * n] = features[o] != 0
        links[y_spec[1]] = AxisLink(x_spec[1], dependence.nonzero_rows(across))
        if batches == 1:
            links[y_spec[0]] = AxisLink(x_spec[0])
        of_input.append(tuple(links.get(axis) for axis in range(len(y))))
    of_kernel = tuple(AxisLink(w_spec[0]) if axis == y_spec[1] else None for axis in range(len(y)))
    return [of_input, [of_kernel]]


bilinear("conv_general_dilated", _conv_lhs, _conv_rhs, traits=Traits(
    product="convolution", flops=_conv_flops,
    dependence=AxisByAxis(_conv_dependence, reads=(1, 2)), ends=_conv_ends,
))  # fmt: skip
