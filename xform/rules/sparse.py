"""Rules of `jax.experimental.sparse`. Only the data of a sparse array has a derivative.

The indices are constants. The rules of all formats compute with *positions*: `positions[..., k, :]`
has the indices of element k in the dense array (`xform.rules.sparse_positions`). No rule makes a
sparse array dense, except that of `todense`. In products of arrays, the axes are of three kinds:
batch axes, contracted axes, and all other axes, which are called free.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from xform._jax import JaxprEqn
from xform.errors import NotDifferentiable
from xform.program.arithmetic import Value, add, reduce_like, scale
from xform.program.ir import Mask, apply
from xform.registry.ends import remaining_axes
from xform.registry.table import Rule, declare
from xform.registry.words import composite
from xform.rules.reduce import jvp_of_definition
from xform.rules.sparse_positions import (
    axis_lengths,
    from_compressed_rows,
    from_rows_and_columns,
    positions_in_rows,
    put,
    select_axes,
    take,
    with_batch_axes,
)

Bind = Callable[..., Value]


@dataclasses.dataclass(frozen=True, eq=False)
class Multilinear(Rule):
    """The rule of a primitive whose first output is linear in each of some inputs.

    `argnums` has the positions of these inputs. For each, a formula `(bind, ct, ys, *xs)` returns
    the cotangent. It may call `bind(*inputs, **changed)`, which binds the primitive with the
    equation's parameters, some of them changed.
    """

    argnums: tuple[int, ...] = ()

    def push(self, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value], dxs: Sequence[Value]):
        terms = [apply(eqn, [*xs[:i], dxs[i], *xs[i + 1 :]])[0]
                 for i in self.argnums if dxs[i] is not None]  # fmt: skip
        return [add(terms), *[None] * (len(ys) - 1)]

    def pull(self, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value], cts: Sequence[Value],
             active: Mask):  # fmt: skip
        def bind(*args: Value, **changed: Any) -> Value:
            out = eqn.primitive.bind(*args, **{**eqn.params, **changed})
            return out[0] if eqn.primitive.multiple_results else out

        in_cts: list[Value] = [None] * len(xs)
        for i, formula in zip(self.argnums, self.formulas, strict=True):
            if active[i]:
                in_cts[i] = reduce_like(self.call(formula, eqn, bind, cts[0], ys, *xs), xs[i])
        return in_cts


@dataclasses.dataclass(frozen=True, eq=False)
class FromDense(Rule):
    """The rule of a conversion from dense to sparse.

    The outputs are the data and the index arrays. The formula computes positions from the shape of
    the input and the index arrays.
    """

    def push(self, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value], dxs: Sequence[Value]):
        return [take(dxs[0], self._positions(eqn, xs, ys)), *[None] * (len(ys) - 1)]

    def pull(self, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value], cts: Sequence[Value],
             active: Mask):  # fmt: skip
        return [put(cts[0], self._positions(eqn, xs, ys), xs[0].shape)]

    def _positions(self, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value]) -> Value:
        return self.call(self.formulas[0], eqn, xs[0].shape, *ys[1:])


# BCOO: an index for each element and axis. Each of these functions is a formula of a rule: it
# returns the cotangent of one input.


def _todense(bind: Bind, ct: Value, ys: Any, data: Value, indices: Value, *, spinfo: Any):
    return take(ct, with_batch_axes(indices, spinfo.shape))


def _extract(bind: Bind, ct: Value, ys: Any, indices: Value, x: Value, *, assume_unique: bool):
    if not assume_unique:  # of elements at one position, the first has the value, others 0
        order, is_first = _sort_by_position(indices, x.shape)
        mask = lax.convert_element_type(lax.sort_key_val(order, is_first)[1], ct.dtype)
        ct = lax.mul(ct, lax.broadcast_in_dim(mask, ct.shape, tuple(range(mask.ndim))))
    return put(ct, with_batch_axes(indices, x.shape), x.shape)


def _transpose(bind: Bind, ct: Value, ys: Any, data: Value, indices: Value, *,
               permutation: Sequence[int], spinfo: Any):  # fmt: skip
    k, n = indices.ndim - 2, indices.shape[-1]
    dense = [p - n + 1 for p in permutation[k + n :]]
    return lax.transpose(ct, np.argsort([*permutation[:k], k, *dense]))


def _sort(bind: Bind, ct: Value, ys: Any, data: Value, indices: Value, *, spinfo: Any):
    axis = indices.ndim - 2
    order = lax.broadcasted_iota(np.int32, ct.shape, axis)
    return lax.sort_key_val(bind(order, indices), ct, axis)[1]


def _sort_by_position(indices: Value, shape: Sequence[int]) -> tuple[Value, Value]:
    """Return the numbers of the elements, sorted by position, and 1 for the first at each position.

    All elements outside the array have the same position, after all others.
    """
    *batch, n, k = indices.shape
    axis, ends = len(batch), axis_lengths(indices, shape)
    outside = lax.reduce_or(lax.ge(indices, ends), (axis + 1,))
    outside = lax.broadcast_in_dim(outside, indices.shape, tuple(range(axis + 1)))
    indices = lax.select(outside, ends, indices)
    columns = [lax.squeeze(select_axes(indices, [i]), (axis + 1,)) for i in range(k)]
    order = lax.broadcasted_iota(np.int32, (*batch, n), axis)
    is_first = lax.convert_element_type(lax.eq(order, np.int32(0)), np.int32)
    *columns, order = lax.sort((*columns, order), dimension=axis, num_keys=max(k, 1))
    first = min(n, 1)  # 0 for an array of no elements
    for column in columns:
        previous = lax.concatenate([lax.slice_in_dim(column, 0, j, axis=axis)
                                    for j in (first, n - first)], axis)  # fmt: skip
        differs = lax.convert_element_type(lax.ne(column, previous), np.int32)
        is_first = lax.max(is_first, differs)
    return order, is_first


def _sum_duplicates(bind: Bind, ct: Value, ys: Any, data: Value, indices: Value, *, spinfo: Any,
                    nse: int | None):  # fmt: skip
    """Give each element the cotangent of its merged element, the one of the same position."""
    order, is_first = _sort_by_position(indices, spinfo.shape)
    rank = lax.sort_key_val(order, lax.cumsum(is_first, order.ndim - 1))[1]
    rank = lax.sub(rank, np.int32(1))
    return take(ct, with_batch_axes(lax.expand_dims(rank, (rank.ndim,)), ct.shape))


# Products. `dimension_numbers` are ((contracted axes of a, of b), (batch axes of a, of b)). In
# names, l or a stands for the left operand, r or b for the right one.


def _dot_data(ct: Value, positions: Value, rhs: Value, n: int, dimension_numbers: Any) -> Value:
    """Return the cotangent of the data of a sparse left operand, which has `n` axes.

    For each element it is the product of a row of `ct` and a row of `rhs`, summed over the free
    axes of `rhs`.
    """
    (lc, rc), (lb, rb) = dimension_numbers
    ct_rows = take(ct, select_axes(positions, [*lb, *remaining_axes(n, lc, lb)]))
    free = remaining_axes(rhs.ndim, rc, rb)
    rhs_rows = take(lax.transpose(rhs, (*rb, *rc, *free)), select_axes(positions, [*lb, *lc]))
    return lax.reduce_sum(scale(ct_rows, rhs_rows), tuple(range(positions.ndim - 1, ct_rows.ndim)))


def _dot_rhs(bind: Bind, ct: Value, matrix: Sequence[Value], rhs: Value, n: int,
             dimension_numbers: Any) -> Value:  # fmt: skip
    """Return the cotangent of the right operand: the sparse array, contracted with `ct`.

    `matrix` has the data and index arrays of the left operand, which has `n` axes.
    """
    (lc, rc), (lb, rb) = dimension_numbers
    free, b = tuple(remaining_axes(n, lc, lb)), len(lb)
    numbers = (free, tuple(range(b, b + len(free)))), (tuple(lb), tuple(range(b)))
    out = bind(*matrix, ct, dimension_numbers=numbers)
    contracted = [rc[i] for i in np.argsort(lc)]  # in the order of the left operand
    order = np.argsort([*rb, *contracted, *remaining_axes(rhs.ndim, rc, rb)])
    return lax.convert_element_type(lax.transpose(out, order), rhs.dtype)


def _dot(bind: Bind, ct: Value, ys: Any, data: Value, indices: Value, rhs: Value, *,
         dimension_numbers: Any, preferred_element_type: Any, lhs_spinfo: Any):  # fmt: skip
    shape = lhs_spinfo.shape
    out = _dot_data(ct, with_batch_axes(indices, shape), rhs, len(shape), dimension_numbers)
    return lax.convert_element_type(out, data.dtype)


def _dot_right(bind: Bind, ct: Value, ys: Any, data: Value, indices: Value, rhs: Value, *,
               dimension_numbers: Any, preferred_element_type: Any, lhs_spinfo: Any):  # fmt: skip
    n = len(lhs_spinfo.shape)
    return _dot_rhs(bind, ct, (data, indices), rhs, n, dimension_numbers)


# `bcoo_dot_general_sampled` multiplies two dense arrays, and computes the result at positions only.


def _sampled(bind: Bind, ct: Value, ys: Any, a: Value, b: Value, indices: Value, *,
             dimension_numbers: Any):  # fmt: skip
    positions, _ = _product_positions(a, b, indices, dimension_numbers)
    return _sampled_factor(ct, positions, a, b, dimension_numbers)


def _sampled_right(bind: Bind, ct: Value, ys: Any, a: Value, b: Value, indices: Value, *,
                   dimension_numbers: Any):  # fmt: skip
    (ac, bc), (ab, bb) = dimension_numbers
    positions, n = _product_positions(a, b, indices, dimension_numbers)
    b_first = [*range(len(ab)), *range(n, positions.shape[-1]), *range(len(ab), n)]
    return _sampled_factor(ct, select_axes(positions, b_first), b, a, ((bc, ac), (bb, ab)))


def _product_positions(
    a: Value, b: Value, indices: Value, dimension_numbers: Any
) -> tuple[Value, int]:
    """Return positions in the product of two dense arrays, and how many of its axes `a` has."""
    (ac, bc), (ab, bb) = dimension_numbers
    of_a = [a.shape[i] for i in (*ab, *remaining_axes(a.ndim, ac, ab))]
    shape = [*of_a, *(b.shape[i] for i in remaining_axes(b.ndim, bc, bb))]
    return positions_in_rows(with_batch_axes(indices, shape), shape), len(of_a)


def _sampled_factor(ct: Value, positions: Value, a: Value, b: Value, dimension_numbers: Any
                    ) -> Value:  # fmt: skip
    """Return the cotangent of `a`. Each position adds a multiple of a row of `b` to one row."""
    (ac, bc), (ab, bb) = dimension_numbers
    order = (*ab, *remaining_axes(a.ndim, ac, ab), *ac)
    k, n = len(ab), a.ndim - len(ac)
    in_b = select_axes(positions, [*range(k), *range(n, positions.shape[-1])])
    b_rows = take(lax.transpose(b, (*bb, *remaining_axes(b.ndim, bc, bb), *bc)), in_b)
    rows = scale(lax.broadcast_in_dim(ct, b_rows.shape, tuple(range(ct.ndim))), b_rows)
    out = put(rows, select_axes(positions, range(n)), [a.shape[i] for i in order])
    return lax.transpose(out, np.argsort(order))


def _no_transpose(bind: Bind, ct: Value, ys: Any, *xs: Value, lhs_spinfo: Any, rhs_spinfo: Any,
                  dimension_numbers: Any, preferred_element_type: Any = None):  # fmt: skip
    raise NotDifferentiable(
        "reverse-mode derivative of a product of two sparse arrays",
        "it has no transpose, because the result has elements at other positions than the inputs",
        "",
        "make one of the two dense with todense(), or use forward mode",
    )


declare(Multilinear, "bcoo_todense", "linear", [_todense], argnums=(0,))
declare(Multilinear, "bcoo_extract", "linear", [_extract], argnums=(1,))
declare(Multilinear, "bcoo_transpose", "linear", [_transpose], argnums=(0,))
declare(Multilinear, "bcoo_sort_indices", "linear", [_sort], argnums=(0,))
declare(Multilinear, "bcoo_sum_duplicates", "linear", [_sum_duplicates], argnums=(0,))
declare(Multilinear, "bcoo_dot_general", "bilinear", [_dot, _dot_right], argnums=(0, 2))
declare(Multilinear, "bcoo_dot_general_sampled", "bilinear", [_sampled, _sampled_right],
        argnums=(0, 1))  # fmt: skip
declare(Multilinear, "bcoo_spdot_general", "bilinear", [_no_transpose] * 2, argnums=(0, 2))
declare(FromDense, "bcoo_fromdense", "linear", [
    lambda shape, indices, *, nse, n_batch, n_dense, index_dtype: with_batch_axes(indices, shape)
])  # fmt: skip

# BCSR: rows are compressed. Instead of an index for each element, `indptr` says where each begins.


def _bcsr_dot(bind: Bind, ct: Value, ys: Any, data: Value, indices: Value, indptr: Value,
              rhs: Value, *, dimension_numbers: Any, preferred_element_type: Any,
              lhs_spinfo: Any):  # fmt: skip
    shape = lhs_spinfo.shape
    positions = with_batch_axes(from_compressed_rows(indices, indptr), shape)
    out = _dot_data(ct, positions, rhs, len(shape), dimension_numbers)
    return lax.convert_element_type(out, data.dtype)


def _bcsr_dot_right(bind: Bind, ct: Value, ys: Any, data: Value, indices: Value, indptr: Value,
                    rhs: Value, *, dimension_numbers: Any, preferred_element_type: Any,
                    lhs_spinfo: Any):  # fmt: skip
    n = len(lhs_spinfo.shape)
    return _dot_rhs(bind, ct, (data, indices, indptr), rhs, n, dimension_numbers)


declare(Multilinear, "bcsr_todense", "linear", [
    lambda bind, ct, ys, data, indices, indptr, *, spinfo: take(
        ct, with_batch_axes(from_compressed_rows(indices, indptr), spinfo.shape))
], argnums=(0,))  # fmt: skip
declare(Multilinear, "bcsr_extract", "linear", [
    lambda bind, ct, ys, indices, indptr, x: put(
        ct, with_batch_axes(from_compressed_rows(indices, indptr), x.shape), x.shape)
], argnums=(2,))  # fmt: skip
declare(Multilinear, "bcsr_dot_general", "bilinear", [_bcsr_dot, _bcsr_dot_right], argnums=(0, 3))
declare(FromDense, "bcsr_fromdense", "linear", [
    lambda shape, indices, indptr, *, nse, n_batch, n_dense, index_dtype: with_batch_axes(
        from_compressed_rows(indices, indptr), shape)
])  # fmt: skip

# COO and CSR: matrices.


def _product_transposes(to_positions: Callable[[Value, Value], Value]
                        ) -> list[Callable[..., Value]]:  # fmt: skip
    """Return the two transposes of the product of a sparse matrix with a dense vector or matrix.

    The first returns the cotangent of the data, the second that of the dense operand.
    `to_positions` converts the two index arrays `i` and `j` of the format.
    """

    def data_ct(bind: Bind, ct: Value, ys: Any, data: Value, i: Value, j: Value, x: Value, *,
                transpose: bool, spinfo: Any = None, shape: Any = None):  # fmt: skip
        output_axis, contracted_axis = (1, 0) if transpose else (0, 1)
        positions = with_batch_axes(to_positions(i, j), shape or spinfo.shape)
        ct_rows = take(ct, select_axes(positions, [output_axis]))
        terms = scale(ct_rows, take(x, select_axes(positions, [contracted_axis])))
        return lax.reduce_sum(terms, tuple(range(1, terms.ndim)))

    def dense_ct(bind: Bind, ct: Value, ys: Any, data: Value, i: Value, j: Value, x: Value, *,
                 transpose: bool, spinfo: Any = None, shape: Any = None):  # fmt: skip
        return bind(data, i, j, ct, transpose=not transpose)

    return [data_ct, dense_ct]


for _name, _convert in (("coo", from_rows_and_columns), ("csr", from_compressed_rows)):
    declare(Multilinear, f"{_name}_todense", "linear", [
        lambda bind, ct, ys, data, i, j, *, spinfo=None, shape=None, to_positions=_convert: take(
            ct, with_batch_axes(to_positions(i, j), ct.shape))
    ], argnums=(0,))  # fmt: skip
    declare(FromDense, f"{_name}_fromdense", "linear", [
        lambda shape, i, j, *, nse, index_dtype, to_positions=_convert: to_positions(i, j)
    ])  # fmt: skip
    for _product in ("matvec", "matmat"):
        declare(Multilinear, f"{_name}_{_product}", "bilinear", _product_transposes(_convert),
                argnums=(0, 3))  # fmt: skip


class SparseSolve(Rule):
    """The rule of `spsolve`: A x = b for a matrix A in compressed rows. dx = A⁻¹ (db - dA x)."""

    def push(self, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value], dxs: Sequence[Value]):
        _, indices, indptr, _ = xs
        ddata, _, _, db = dxs
        if ddata is not None:
            positions = from_compressed_rows(indices, indptr)
            terms = lax.mul(ddata, take(ys[0], select_axes(positions, [1])))
            da_x = put(terms, select_axes(positions, [0]), ys[0].shape)
            db = lax.neg(da_x) if db is None else lax.sub(db, da_x)
        return apply(eqn, [*xs[:3], db])

    def pull(self, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value], cts: Sequence[Value],
             active: Mask):  # fmt: skip
        data, indices, indptr, _ = xs
        positions = from_compressed_rows(indices, indptr)
        in_row, in_column = select_axes(positions, [0]), select_axes(positions, [1])
        # The transpose of A in compressed rows: its elements are sorted by column.
        rows = lax.squeeze(in_row, (1,))
        columns, rows, data = lax.sort((indices, rows, data), num_keys=2)
        counts = put(lax.full(columns.shape, 1, indptr.dtype),
                     lax.expand_dims(lax.add(columns, np.asarray(1, columns.dtype)), (1,)),
                     indptr.shape)  # fmt: skip
        ct_b = apply(eqn, [data, rows, lax.cumsum(counts), cts[0]])[0]
        terms = lax.mul(take(ct_b, in_row), take(ys[0], in_column))
        return [lax.neg(terms) if active[0] else None, None, None, ct_b if active[3] else None]


declare(SparseSolve, "spsolve", "solve", (), supported_params=("tol", "reorder"))


def _todense_any(*buffers: Value, tree: Any) -> list[Value]:
    """Return a sparse array of any format as a dense array, from its buffers."""
    array = jax.tree.unflatten(tree, buffers)
    return [array.todense() if hasattr(array, "todense") else array]


composite("todense", jvp_of_definition(_todense_any))
