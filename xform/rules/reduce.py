"""Reductions, cumulative reductions, sorting and selection of the largest.

At ties, `reduce_max` and `reduce_min` share the derivative equally among the tied elements, as JAX
does. `cummax`, `cummin` and a `max` in a generic `reduce` share it by halves, pair by pair, in the
order of a tree of pairs. `sort` and `top_k` give it to the element that they chose. A slice whose
extremum is NaN has derivative NaN.
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

from xform._jax import JaxprEqn, jax_primitives, zeros
from xform.interpret import cost
from xform.interpret.cost import shape
from xform.interpret.jvp import jvp
from xform.program.arithmetic import cotangent_sharding
from xform.program.ir import evaluate, program, trace
from xform.registry.dependence import AxisLink, Links, axis_by_axis, reduction_links
from xform.registry.traits import REDUCTION, Traits
from xform.registry.words import composite, constant, linear


def _reduced(eqn: JaxprEqn) -> list[list[Links]]:
    return [[reduction_links(len(shape(v)), eqn.params["axes"])] for v in eqn.invars]


def _accumulated(eqn: JaxprEqn) -> list[list[Links]]:
    axis, way = eqn.params["axis"], -1 if eqn.params["reverse"] else 1
    axes = range(len(shape(eqn.invars[0])))
    return [[tuple(AxisLink(i, cumulative=way if i == axis else 0) for i in axes)]]


# A kernel that reads each element of its operand once.
EACH_INPUT = Traits(flops=cost.operand_size)
CUMULATIVE = dataclasses.replace(EACH_INPUT, dependence=axis_by_axis(_accumulated))
SUM = dataclasses.replace(REDUCTION, dependence=axis_by_axis(_reduced))

# Combines the parts of two slices.
Combine = Callable[[list[Any], list[Any]], list[Any]]


def jvp_of_definition(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return the jvp of a primitive whose value `f` computes by operations that have rules.

    `f(*xs, **params)` returns a list. Its keyword-only arguments are the rule's parameters. Only
    the tangents of `f` are used: the primitive itself computes the values.
    """

    @functools.wraps(f)
    def push(xs: Sequence[Any], dxs: Sequence[Any], **params: Any):
        return None, jvp(trace(lambda *xs: f(*xs, **params), *xs), xs, dxs)[1]

    return push


def sharding_option(out_sharding: Any) -> dict[str, Any]:
    """Return `out_sharding` as keyword arguments: reduce_max of JAX 0.10 does not have it."""
    return {} if out_sharding is None else {"out_sharding": out_sharding}


def spread_over(y: Any, x: Any, axes: Sequence[int], sharding: Any = None) -> Any:
    """Repeat `y`, a reduction of `x`, along `axes`, with the sharding of `x` or the given one."""
    kept = tuple(i for i in range(np.ndim(x)) if i not in axes)
    sharding = sharding or jax.typeof(x).sharding
    return lax.broadcast_in_dim(y, np.shape(x), kept, out_sharding=sharding)


# Sums and products.


def elementwise(jaxpr: Any) -> Combine:
    """Return the reducer of a primitive, a program of scalars, as a function of arrays."""

    def combine(a: list[Any], b: list[Any]) -> list[Any]:
        reducer = lambda *ab: evaluate(program(jaxpr), ab)
        for _ in range(a[0].ndim):
            reducer = jax.vmap(reducer)
        return reducer(*a, *b)

    return combine


def fold(combine: Combine, xs: list[Any], axis: int) -> list[Any]:
    """Combine the slices of `xs` along a non-empty axis by halves; this removes the axis."""
    while (n := xs[0].shape[axis]) > 1:
        half = n // 2
        pairs = combine(
            [lax.slice_in_dim(x, 0, half, axis=axis) for x in xs],
            [lax.slice_in_dim(x, n - half, n, axis=axis) for x in xs],
        )
        if n % 2:
            middle = [lax.slice_in_dim(x, half, half + 1, axis=axis) for x in xs]
            pairs = [lax.concatenate(two, axis) for two in zip(pairs, middle, strict=True)]
        xs = list(pairs)
    return [lax.squeeze(x, (axis,)) for x in xs]


def _product(x: Any, *, axes: tuple[int, ...]):
    """Return the product over some axes, multiplied pairwise."""
    if not x.size:  # an empty product is 1, whatever x
        return [lax.broadcast(np.ones((), x.dtype), tuple(np.delete(x.shape, axes)))]
    for axis in sorted(axes, reverse=True):
        (x,) = fold(lambda a, b: [lax.mul(a[0], b[0])], [x], axis)
    return [x]


def _reduce(*operands: Any, jaxpr: Any, dimensions: tuple[int, ...], computation: Any):
    """Return the results of `lax.reduce`, combined pairwise by the user's function."""
    del computation  # the reducer as a function; jaxpr is the same reducer as data
    n = len(operands) // 2
    xs, inits, combine = list(operands[:n]), operands[n:], elementwise(jaxpr)
    first = [
        lax.broadcast(c, tuple(np.delete(x.shape, dimensions)))
        for c, x in zip(inits, xs, strict=True)
    ]
    if not xs[0].size:
        return first
    for axis in sorted(dimensions, reverse=True):
        xs = fold(combine, xs, axis)
    return combine(first, xs)


linear(
    "reduce_sum",
    lambda ct, x, *, axes, out_sharding: spread_over(ct, x, axes, cotangent_sharding(x)),
    traits=SUM,
)
composite("reduce_prod", jvp_of_definition(_product), SUM)
composite("reduce", jvp_of_definition(_reduce), Traits(
    flops=lambda e: cost.operand_size(e) * cost.flops(program(e.params["jaxpr"]))))  # fmt: skip


# The largest and the smallest.


def _extremum(name: str):
    """Return the jvp rule of a maximum or minimum; equal largest elements share the tangent."""
    reduced = getattr(lax, name)

    def push(xs: Any, dxs: Any, *, axes: tuple[int, ...], out_sharding: Any = None):
        (x,), (dx,), kwargs = xs, dxs, sharding_option(out_sharding)
        y = reduced(x, axes, **kwargs)
        if dx is None:
            return [y], [None]
        # NaN is unequal to itself: then all elements are chosen, and each has a share of NaN.
        none = lax.ne(y, y)
        chosen = lax.eq(x, spread_over(y, x, axes))
        chosen = lax.bitwise_or(chosen, spread_over(none, x, axes))
        count = lax.reduce_sum(lax.convert_element_type(chosen, np.int32), axes, **kwargs)
        total = lax.reduce_sum(lax.select(chosen, dx, zeros(jax.typeof(dx))), axes, **kwargs)
        return [y], [lax.div(total, lax.select(none, y, lax.convert_element_type(count, y.dtype)))]

    return push


for _name in ("reduce_max", "reduce_min"):
    composite(_name, _extremum(_name), SUM)
constant("argmax", "argmin", known=("axes", "index_dtype"), traits=REDUCTION)
constant("reduce_and", "reduce_or", "reduce_xor", known=("axes", "out_sharding"), traits=REDUCTION)


# Cumulative reductions: a tree of pairs, which needs no special cases for zeros and infinities.


def _log_add_exp(a: Any, b: Any) -> Any:
    top = lax.max(*(lax.real(v) if np.iscomplexobj(v) else v for v in (a, b)))
    top = lax.select(lax.is_finite(top), top, lax.full_like(top, 0))
    top = lax.convert_element_type(top, a.dtype)
    return lax.add(top, lax.log(lax.add(lax.exp(lax.sub(a, top)), lax.exp(lax.sub(b, top)))))


def _bounded(v: Any) -> Any:
    """Return `v`, with 0 in place of infinity: as in JAX, the derivative there is a number."""
    real = lax.real(v) if np.iscomplexobj(v) else v
    return lax.select(lax.eq(real, lax.full_like(real, np.inf)), lax.full_like(v, 0), v)


def _cumlogsumexp(xs: Any, dxs: Any, *, axis: int, reverse: bool):
    (x,), (dx,) = xs, dxs

    def combine(a: Any, b: Any):
        y = _log_add_exp(a[0], b[0])
        da, db = (lax.mul(lax.exp(lax.sub(_bounded(v), _bounded(y))), dv) for v, dv in (a, b))
        return y, lax.add(da, db)

    _, dy = lax.associative_scan(combine, (x, dx), reverse, axis)
    return None, [dy]


def _cumulative(combine: Callable[[Any, Any], Any]):
    return jvp_of_definition(
        lambda x, *, axis, reverse: [lax.associative_scan(combine, x, reverse, axis)]
    )


linear(
    "cumsum",
    lambda ct, x, *, axis, reverse: lax.cumsum(ct, axis, not reverse),
    traits=CUMULATIVE,
)
composite("cumprod", _cumulative(lax.mul), CUMULATIVE)
composite("cummax", _cumulative(lax.max), CUMULATIVE)
composite("cummin", _cumulative(lax.min), CUMULATIVE)
composite("cumlogsumexp", _cumlogsumexp, CUMULATIVE)


# Sorting: each tangent moves with its primal.


def _take(dx: Any, index: Any, axis: int):
    """Return `dx` at `index` along `axis`; no index occurs twice."""
    if dx is None:
        return None
    rest = tuple(i for i in range(dx.ndim) if i != axis)
    return lax.gather(
        dx,
        lax.expand_dims(index, (index.ndim,)),
        lax.GatherDimensionNumbers((), (axis,), (axis,), rest, rest),
        (1,) * dx.ndim,
        unique_indices=True,
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )


def _sort(xs: Any, dxs: Any, *, dimension: int, is_stable: bool, num_keys: int):
    shape = np.shape(xs[0])
    dtype = np.int32 if shape[dimension] < 2**31 else np.int64
    place = lax.broadcasted_iota(dtype, shape, dimension, out_sharding=jax.typeof(xs[0]).sharding)
    *ys, index = jax_primitives.sort_p.bind(
        *xs, place, dimension=dimension, is_stable=is_stable, num_keys=num_keys
    )
    return ys, [_take(dx, index, dimension) for dx in dxs]


def _top_k(xs: Any, dxs: Any, *, k: int, axis: int, is_stable: bool | None = None):
    stable = {} if is_stable is None else {"is_stable": is_stable}  # new in JAX 0.12
    y, index = jax_primitives.top_k_p.bind(*xs, k=k, axis=axis, **stable)
    return [y, index], [_take(dxs[0], index, axis), None]


def _approx_top_k(xs: Any, dxs: Any, *, k: int, reduction_dimension: int, recall_target: float,
                  is_max_k: bool, reduction_input_size_override: int,
                  aggregate_to_topk: bool):  # fmt: skip
    y, index = jax_primitives.approx_top_k_p.bind(
        *xs,
        k=k,
        reduction_dimension=reduction_dimension,
        recall_target=recall_target,
        is_max_k=is_max_k,
        reduction_input_size_override=reduction_input_size_override,
        aggregate_to_topk=aggregate_to_topk,
    )
    return [y, index], [_take(dxs[0], index, reduction_dimension % index.ndim), None]


def _comparisons(eqn: JaxprEqn) -> int:
    n = cost.shape(eqn.invars[0])[eqn.params["dimension"]]
    return cost.operand_size(eqn) * eqn.params["num_keys"] * math.ceil(math.log2(max(n, 1)))


composite("sort", _sort, Traits(flops=_comparisons))
composite("top_k", _top_k, EACH_INPUT)
composite("approx_top_k", _approx_top_k, EACH_INPUT)
