"""`jax.experimental.sparse`: linear in the data of a sparse array; its indices are constants.

All formats are read in the same way: `at[..., k, :]` is the place of the k-th element in the dense
array, batch axes included. A negative index counts from the end of its axis, as in JAX's
operations. A place outside the array is padding. No sparse array is made dense.
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
from xform.program.arithmetic import Value, add, reduce_like
from xform.program.ir import Mask, apply
from xform.registry.table import Rule, declare
from xform.registry.words import composite
from xform.rules.reduce import jvp_of_definition

Bind = Callable[..., Value]


@dataclasses.dataclass(frozen=True, eq=False)
class Multilinear(Rule):
    """A rule for a primitive whose first output is linear in each input at `over`.

    A formula `(bind, ct, ys, *xs)` is a transpose. It may `bind` the primitive with new parameters.
    """

    over: tuple[int, ...] = ()

    def push(self, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value], dxs: Sequence[Value]):
        terms = [apply(eqn, [*xs[:i], dxs[i], *xs[i + 1 :]])[0]
                 for i in self.over if dxs[i] is not None]  # fmt: skip
        return [add(terms), *[None] * (len(ys) - 1)]

    def pull(self, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value], cts: Sequence[Value],
             active: Mask):  # fmt: skip
        def bind(*args: Value, **changed: Any) -> Value:
            out = eqn.primitive.bind(*args, **{**eqn.params, **changed})
            return out[0] if eqn.primitive.multiple_results else out

        result: list[Value] = [None] * len(xs)
        for i, formula in zip(self.over, self.formulas, strict=True):
            if active[i]:
                result[i] = reduce_like(self.call(formula, eqn, bind, cts[0], ys, *xs), xs[i])
        return result


@dataclasses.dataclass(frozen=True, eq=False)
class FromDense(Rule):
    """A rule for the elements of a dense array at places that the formula computes from outputs."""

    def push(self, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value], dxs: Sequence[Value]):
        return [take(dxs[0], self._places(eqn, xs, ys)), *[None] * (len(ys) - 1)]

    def pull(self, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value], cts: Sequence[Value],
             active: Mask):  # fmt: skip
        return [put(cts[0], self._places(eqn, xs, ys), xs[0].shape)]

    def _places(self, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value]) -> Value:
        return self.call(self.formulas[0], eqn, xs[0].shape, *ys[1:])


# Places.


def take(dense: Value, at: Value) -> Value:
    """Return the elements of an array at places of its first axes; zero outside."""
    n, k = at.shape[-1], at.ndim - 1
    window = tuple(range(k, k + dense.ndim - n))
    axes = tuple(range(n))
    numbers = lax.GatherDimensionNumbers(window, axes, axes)
    return lax.gather(dense, at, numbers, (*(1,) * n, *dense.shape[n:]), mode="fill", fill_value=0)


def put(values: Value, at: Value, shape: Sequence[int]) -> Value:
    """Return zeros with values added at places of the first axes."""
    n, k = at.shape[-1], at.ndim - 1
    window = tuple(range(k, k + len(shape) - n))
    axes = tuple(range(n))
    numbers = lax.ScatterDimensionNumbers(window, axes, axes)
    dense = lax.full(shape, 0, values.dtype)
    values = lax.broadcast_in_dim(values, (*at.shape[:-1], *shape[n:]), tuple(range(values.ndim)))
    return lax.scatter_add(dense, at, values, numbers, mode="drop")


def _batched(indices: Value, whole: Sequence[int]) -> Value:
    """Return indices after batch axes as places in an array of the shape `whole`."""
    k = indices.ndim - 2
    shape = (*whole[:k], *indices.shape[k:])
    from_end = lax.lt(indices, lax.full_like(indices, 0))
    indices = lax.select(from_end, lax.add(indices, _lengths(indices, whole)), indices)
    indices = lax.broadcast_in_dim(indices, shape, tuple(range(k + 2)))
    own = [lax.broadcasted_iota(indices.dtype, (*shape[:-1], 1), i) for i in range(k)]
    return lax.concatenate([*own, indices], k + 1)


def _lengths(indices: Value, whole: Sequence[int]) -> Value:
    """Return the length of its axis for each index."""
    k = indices.ndim - 2
    sizes = np.asarray(whole[k : k + indices.shape[-1]], indices.dtype)
    return lax.broadcast_in_dim(sizes, indices.shape, (k + 1,))


def _pairs(row: Value, col: Value) -> Value:
    return lax.concatenate([lax.expand_dims(i, (i.ndim,)) for i in (row, col)], row.ndim)


def _rows(indices: Value, indptr: Value) -> Value:
    """Return the row of each element, from the ends of the rows."""
    *batch, n = indices.shape
    ends = lax.slice_in_dim(indptr, 1, indptr.shape[-1], axis=-1)
    places = _batched(lax.expand_dims(ends, (ends.ndim,)), (*batch, n + 1))
    counts = put(lax.full(ends.shape, 1, indices.dtype), places, (*batch, n + 1))
    return lax.slice_in_dim(lax.cumsum(counts, len(batch)), 0, n, axis=-1)


def _compressed(indices: Value, indptr: Value) -> Value:
    """Return compressed rows as indices of rows and columns on the last axis."""
    return _pairs(_rows(indices, indptr), indices)


def _columns(at: Value, axes: Sequence[int]) -> Value:
    """Return some of the axes of places."""
    pick = [lax.slice_in_dim(at, i, i + 1, axis=-1) for i in axes]
    empty = lax.slice_in_dim(at, 0, 0, axis=-1)
    return lax.concatenate([empty, *pick], at.ndim - 1)


def _rest(n: int, *used: Sequence[int]) -> list[int]:
    return [i for i in range(n) if not any(i in u for u in used)]


# BCOO.


def _todense(bind: Bind, ct: Value, ys: Any, data: Value, indices: Value, *, spinfo: Any):
    return take(ct, _batched(indices, spinfo.shape))


def _extract(bind: Bind, ct: Value, ys: Any, indices: Value, x: Value, *, assume_unique: bool):
    if not assume_unique:  # of elements with equal indices, the first has the value, others 0
        order, first = _sorted(indices, x.shape)
        mask = lax.convert_element_type(lax.sort_key_val(order, first)[1], ct.dtype)
        ct = lax.mul(ct, lax.broadcast_in_dim(mask, ct.shape, tuple(range(mask.ndim))))
    return put(ct, _batched(indices, x.shape), x.shape)


def _transpose(bind: Bind, ct: Value, ys: Any, data: Value, indices: Value, *,
               permutation: Sequence[int], spinfo: Any):  # fmt: skip
    k, n = indices.ndim - 2, indices.shape[-1]
    dense = [p - n + 1 for p in permutation[k + n :]]
    return lax.transpose(ct, np.argsort([*permutation[:k], k, *dense]))


def _sort(bind: Bind, ct: Value, ys: Any, data: Value, indices: Value, *, spinfo: Any):
    axis = indices.ndim - 2
    order = lax.broadcasted_iota(np.int32, ct.shape, axis)
    return lax.sort_key_val(bind(order, indices), ct, axis)[1]


def _sorted(indices: Value, whole: Sequence[int]) -> tuple[Value, Value]:
    """Return the elements in the order of their indices, and 1 for the first of each place.

    Elements outside the array share one place, the last.
    """
    *batch, n, k = indices.shape
    axis, ends = len(batch), _lengths(indices, whole)
    outside = lax.reduce_or(lax.ge(indices, ends), (axis + 1,))
    outside = lax.broadcast_in_dim(outside, indices.shape, tuple(range(axis + 1)))
    indices = lax.select(outside, ends, indices)
    columns = [lax.squeeze(_columns(indices, [i]), (axis + 1,)) for i in range(k)]
    order = lax.broadcasted_iota(np.int32, (*batch, n), axis)
    first = lax.convert_element_type(lax.eq(order, np.int32(0)), np.int32)
    *columns, order = lax.sort((*columns, order), dimension=axis, num_keys=max(k, 1))
    for column in columns:
        before = lax.concatenate([lax.slice_in_dim(column, i, j, axis=axis)
                                  for i, j in ((0, 1), (0, n - 1))], axis)  # fmt: skip
        first = lax.max(first, lax.convert_element_type(lax.ne(column, before), np.int32))
    return order, first


def _sum_duplicates(bind: Bind, ct: Value, ys: Any, data: Value, indices: Value, *, spinfo: Any,
                    nse: int | None):  # fmt: skip
    """Return the cotangent: an element's output position is the rank of its place."""
    order, first = _sorted(indices, spinfo.shape)
    rank = lax.sort_key_val(order, lax.cumsum(first, order.ndim - 1))[1]
    rank = lax.sub(rank, np.int32(1))
    return take(ct, _batched(lax.expand_dims(rank, (rank.ndim,)), ct.shape))


def _dot_data(ct: Value, at: Value, rhs: Value, n: int, dimension_numbers: Any) -> Value:
    """Return for each element the sum over free axes of its row of `ct` times its row of `rhs`."""
    (lc, rc), (lb, rb) = dimension_numbers
    rows = take(ct, _columns(at, [*lb, *_rest(n, lc, lb)]))
    free = _rest(rhs.ndim, rc, rb)
    others = take(lax.transpose(rhs, (*rb, *rc, *free)), _columns(at, [*lb, *lc]))
    return lax.reduce_sum(lax.mul(rows, others), tuple(range(at.ndim - 1, rows.ndim)))


def _dot_rhs(bind: Bind, ct: Value, matrix: Sequence[Value], rhs: Value, n: int,
             dimension_numbers: Any) -> Value:  # fmt: skip
    (lc, rc), (lb, rb) = dimension_numbers
    kept, b = tuple(_rest(n, lc, lb)), len(lb)
    numbers = (kept, tuple(range(b, b + len(kept)))), (tuple(lb), tuple(range(b)))
    out = bind(*matrix, ct, dimension_numbers=numbers)
    by_left = [rc[i] for i in np.argsort(lc)]
    back = np.argsort([*rb, *by_left, *_rest(rhs.ndim, rc, rb)])
    return lax.convert_element_type(lax.transpose(out, back), rhs.dtype)


def _dot(bind: Bind, ct: Value, ys: Any, data: Value, indices: Value, rhs: Value, *,
         dimension_numbers: Any, preferred_element_type: Any, lhs_spinfo: Any):  # fmt: skip
    shape = lhs_spinfo.shape
    out = _dot_data(ct, _batched(indices, shape), rhs, len(shape), dimension_numbers)
    return lax.convert_element_type(out, data.dtype)


def _dot_right(bind: Bind, ct: Value, ys: Any, data: Value, indices: Value, rhs: Value, *,
               dimension_numbers: Any, preferred_element_type: Any, lhs_spinfo: Any):  # fmt: skip
    n = len(lhs_spinfo.shape)
    return _dot_rhs(bind, ct, (data, indices), rhs, n, dimension_numbers)


def _sampled(bind: Bind, ct: Value, ys: Any, a: Value, b: Value, indices: Value, *,
             dimension_numbers: Any):  # fmt: skip
    at, _ = _sampled_at(a, b, indices, dimension_numbers)
    return _spread(ct, at, a, b, dimension_numbers)


def _sampled_right(bind: Bind, ct: Value, ys: Any, a: Value, b: Value, indices: Value, *,
                   dimension_numbers: Any):  # fmt: skip
    (ac, bc), (ab, bb) = dimension_numbers
    at, n = _sampled_at(a, b, indices, dimension_numbers)
    turned = [*range(len(ab)), *range(n, at.shape[-1]), *range(len(ab), n)]
    return _spread(ct, _columns(at, turned), b, a, ((bc, ac), (bb, ab)))


def _sampled_at(a: Value, b: Value, indices: Value, dimension_numbers: Any) -> tuple[Value, int]:
    """Return places in the product of two dense arrays, and how many of its axes `a` has."""
    (ac, bc), (ab, bb) = dimension_numbers
    sizes = [a.shape[i] for i in (*ab, *_rest(a.ndim, ac, ab))]
    others = [b.shape[i] for i in _rest(b.ndim, bc, bb)]
    return _whole(_batched(indices, [*sizes, *others]), [*sizes, *others]), len(sizes)


def _whole(at: Value, shape: Sequence[int]) -> Value:
    """Expand places of rows of an array to the places of all elements of these rows."""
    k, n = at.ndim - 1, at.shape[-1]
    all_of = (*at.shape[:-1], *shape[n:])
    at = lax.broadcast_in_dim(at, (*all_of, n), (*range(k), len(all_of)))
    own = [lax.broadcasted_iota(at.dtype, (*all_of, 1), i) for i in range(k, len(all_of))]
    return lax.concatenate([at, *own], len(all_of))


def _spread(ct: Value, at: Value, a: Value, b: Value, dimension_numbers: Any) -> Value:
    """Return the cotangent of `a`: for each place, its row gets a multiple of a row of `b`."""
    (ac, bc), (ab, bb) = dimension_numbers
    order = (*ab, *_rest(a.ndim, ac, ab), *ac)
    k, n = len(ab), a.ndim - len(ac)
    right = _columns(at, [*range(k), *range(n, at.shape[-1])])
    others = take(lax.transpose(b, (*bb, *_rest(b.ndim, bc, bb), *bc)), right)
    rows = lax.mul(lax.broadcast_in_dim(ct, others.shape, tuple(range(ct.ndim))), others)
    out = put(rows, _columns(at, range(n)), [a.shape[i] for i in order])
    return lax.transpose(out, np.argsort(order))


def _no_transpose(bind: Bind, ct: Value, ys: Any, *xs: Value, lhs_spinfo: Any, rhs_spinfo: Any,
                  dimension_numbers: Any, preferred_element_type: Any = None):  # fmt: skip
    raise NotDifferentiable(
        "reverse-mode derivative of a product of two sparse arrays",
        "it has no transpose, because the result has other places than the inputs",
        "",
        "make one of the two dense with todense(), or use forward mode",
    )


declare(Multilinear, "bcoo_todense", "linear", [_todense], over=(0,))
declare(Multilinear, "bcoo_extract", "linear", [_extract], over=(1,))
declare(Multilinear, "bcoo_transpose", "linear", [_transpose], over=(0,))
declare(Multilinear, "bcoo_sort_indices", "linear", [_sort], over=(0,))
declare(Multilinear, "bcoo_sum_duplicates", "linear", [_sum_duplicates], over=(0,))
declare(Multilinear, "bcoo_dot_general", "bilinear", [_dot, _dot_right], over=(0, 2))
declare(Multilinear, "bcoo_dot_general_sampled", "bilinear", [_sampled, _sampled_right],
        over=(0, 1))  # fmt: skip
declare(Multilinear, "bcoo_spdot_general", "bilinear", [_no_transpose] * 2, over=(0, 2))
declare(FromDense, "bcoo_fromdense", "linear", [
    lambda shape, indices, *, nse, n_batch, n_dense, index_dtype: _batched(indices, shape)
])  # fmt: skip

# BCSR: the last axis after the batch axes has compressed rows.


def _bcsr_dot(bind: Bind, ct: Value, ys: Any, data: Value, indices: Value, indptr: Value,
              rhs: Value, *, dimension_numbers: Any, preferred_element_type: Any,
              lhs_spinfo: Any):  # fmt: skip
    shape = lhs_spinfo.shape
    at = _batched(_compressed(indices, indptr), shape)
    return lax.convert_element_type(
        _dot_data(ct, at, rhs, len(shape), dimension_numbers), data.dtype
    )


def _bcsr_dot_right(bind: Bind, ct: Value, ys: Any, data: Value, indices: Value, indptr: Value,
                    rhs: Value, *, dimension_numbers: Any, preferred_element_type: Any,
                    lhs_spinfo: Any):  # fmt: skip
    n = len(lhs_spinfo.shape)
    return _dot_rhs(bind, ct, (data, indices, indptr), rhs, n, dimension_numbers)


declare(Multilinear, "bcsr_todense", "linear", [
    lambda bind, ct, ys, data, indices, indptr, *, spinfo: take(
        ct, _batched(_compressed(indices, indptr), spinfo.shape))
], over=(0,))  # fmt: skip
declare(Multilinear, "bcsr_extract", "linear", [
    lambda bind, ct, ys, indices, indptr, x: put(
        ct, _batched(_compressed(indices, indptr), x.shape), x.shape)
], over=(2,))  # fmt: skip
declare(Multilinear, "bcsr_dot_general", "bilinear", [_bcsr_dot, _bcsr_dot_right], over=(0, 3))
declare(FromDense, "bcsr_fromdense", "linear", [
    lambda shape, indices, indptr, *, nse, n_batch, n_dense, index_dtype: _batched(
        _compressed(indices, indptr), shape)
])  # fmt: skip

# COO and CSR: matrices.


def _apply(at: Callable[[Value, Value], Value]) -> list[Callable[..., Value]]:
    """Return transposes of a product of a matrix (two index arrays) with a dense array."""

    def matrix(bind: Bind, ct: Value, ys: Any, data: Value, i: Value, j: Value, x: Value, *,
               transpose: bool, spinfo: Any = None, shape: Any = None):  # fmt: skip
        ends = (1, 0) if transpose else (0, 1)
        places = _batched(at(i, j), shape or spinfo.shape)
        out, inner = (_columns(places, [e]) for e in ends)
        terms = lax.mul(take(ct, out), take(x, inner))
        return lax.reduce_sum(terms, tuple(range(1, terms.ndim)))

    def dense(bind: Bind, ct: Value, ys: Any, data: Value, i: Value, j: Value, x: Value, *,
              transpose: bool, spinfo: Any = None, shape: Any = None):  # fmt: skip
        return bind(data, i, j, ct, transpose=not transpose)

    return [matrix, dense]


for _name, _at in (("coo", _pairs), ("csr", _compressed)):
    declare(Multilinear, f"{_name}_todense", "linear", [
        lambda bind, ct, ys, data, i, j, *, spinfo=None, shape=None, at=_at: take(
            ct, _batched(at(i, j), ct.shape))
    ], over=(0,))  # fmt: skip
    declare(FromDense, f"{_name}_fromdense", "linear", [
        lambda shape, i, j, *, nse, index_dtype, at=_at: at(i, j)
    ])  # fmt: skip
    for _kind in ("matvec", "matmat"):
        declare(Multilinear, f"{_name}_{_kind}", "bilinear", _apply(_at), over=(0, 3))


class SparseSolve(Rule):
    """The rule of A x = b for a matrix A in compressed rows: dx = A⁻¹ (db - dA x)."""

    def push(self, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value], dxs: Sequence[Value]):
        _, indices, indptr, _ = xs
        ddata, _, _, db = dxs
        if ddata is not None:
            at = _compressed(indices, indptr)
            moved = lax.mul(ddata, take(ys[0], _columns(at, [1])))
            moved = put(moved, _columns(at, [0]), ys[0].shape)
            db = lax.neg(moved) if db is None else lax.sub(db, moved)
        return apply(eqn, [*xs[:3], db])

    def pull(self, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value], cts: Sequence[Value],
             active: Mask):  # fmt: skip
        data, indices, indptr, _ = xs
        at = _compressed(indices, indptr)
        rows = lax.squeeze(_columns(at, [0]), (1,))
        columns, rows, data = lax.sort((indices, rows, data), num_keys=2)
        starts = put(lax.full(columns.shape, 1, indptr.dtype),
                     lax.expand_dims(lax.add(columns, np.asarray(1, columns.dtype)), (1,)),
                     indptr.shape)  # fmt: skip
        ct_b = apply(eqn, [data, rows, lax.cumsum(starts), cts[0]])[0]
        terms = lax.mul(take(ct_b, _columns(at, [0])), take(ys[0], _columns(at, [1])))
        return [lax.neg(terms) if active[0] else None, None, None, ct_b if active[3] else None]


declare(SparseSolve, "spsolve", "solve", (), known=("tol", "reorder"))


def _dense(*buffers: Value, tree: Any) -> list[Value]:
    array = jax.tree.unflatten(tree, buffers)
    return [array.todense() if hasattr(array, "todense") else array]


composite("todense", jvp_of_definition(_dense))
