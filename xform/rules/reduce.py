"""Rules of reductions, cumulative reductions, sorting and top-k.

If several elements tie, the rules treat them differently. `reduce_max` and `reduce_min` share the
derivative equally among the tied elements, as JAX does. `cummax`, `cummin` and a `max` in a generic
`reduce` combine elements pairwise, in a tree, and share the derivative by halves in each pair.
`sort` and `top_k` give it to the element that they chose. If the maximum or minimum is NaN, its
derivative is NaN.
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

from xform._jax import JaxprEqn, jax_primitives
from xform._jax.symbolic import is_at_least, is_symbolic
from xform.interpret import cost
from xform.interpret.jvp import jvp
from xform.program.arithmetic import cotangent_sharding
from xform.program.arrays import zeros
from xform.program.dimensions import shape
from xform.program.ir import evaluate, program, trace
from xform.registry.dependence import AxisLink, Links, axis_by_axis
from xform.registry.ends import mixes, reduced, summed
from xform.registry.table import declare
from xform.registry.traits import REDUCTION, Traits, with_ends
from xform.registry.words import composite, constant, linear
from xform.rules.reducers import Reduction

# The dependence says on which elements of the operand each element of the result depends.


def _cumulative_dependence(eqn: JaxprEqn) -> list[list[Links]]:
    axis, direction = eqn.params["axis"], -1 if eqn.params["reverse"] else 1
    axes = range(len(shape(eqn.invars[0])))
    return [[tuple(AxisLink(i, cumulative=direction if i == axis else 0) for i in axes)]]


# One FLOP for each element of the operand.
EACH_INPUT = Traits(flops=cost.operand_size)
CUMULATIVE = dataclasses.replace(
    EACH_INPUT, dependence=axis_by_axis(_cumulative_dependence), ends=mixes("axis")
)
EXTREMUM = with_ends(REDUCTION, reduced)
SUM = with_ends(REDUCTION, summed)

# A function that combines two lists of arrays elementwise. A list has one array for each operand of
# the reduction.
Combine = Callable[[list[Any], list[Any]], list[Any]]


def jvp_of_definition(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return the jvp of a primitive from a function `f` of JAX operations that computes the same.

    `f(*xs, **params)` returns a list. Its keyword-only arguments are the parameters that the rule
    supports. Only the tangents of `f` are used: the primitive itself computes the values.
    """

    @functools.wraps(f)
    def push(xs: Sequence[Any], dxs: Sequence[Any], **params: Any):
        return None, jvp(trace(lambda *xs: f(*xs, **params), *xs), xs, dxs)[1]

    return push


def sharding_option(out_sharding: Any) -> dict[str, Any]:
    """Return `out_sharding` as keyword arguments; no arguments if it is None.

    `reduce_max` of JAX 0.10 does not take the argument.
    """
    return {} if out_sharding is None else {"out_sharding": out_sharding}


def spread_over(y: Any, x: Any, axes: Sequence[int], sharding: Any = None) -> Any:
    """Repeat `y`, a reduction of `x`, along `axes`, with the sharding of `x` or the given one."""
    kept = tuple(i for i in range(np.ndim(x)) if i not in axes)
    sharding = sharding or jax.typeof(x).sharding
    return lax.broadcast_in_dim(y, np.shape(x), kept, out_sharding=sharding)


# Sums and products.


def elementwise(jaxpr: Any) -> Combine:
    """Return the combining function of a reduction, a jaxpr of scalars, as a function of arrays."""

    def combine(a: list[Any], b: list[Any]) -> list[Any]:
        reducer = lambda *ab: evaluate(program(jaxpr), ab)
        for _ in range(a[0].ndim):
            reducer = jax.vmap(reducer)
        return reducer(*a, *b)

    return combine


def fold(combine: Combine, xs: list[Any], axis: int) -> list[Any]:
    """Reduce a non-empty axis of `xs`: combine its first half with its second half, repeatedly.

    Returns arrays without the axis.
    """
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


def _in_order(combine: Combine, start: list[Any], xs: list[Any], axes: Sequence[int],
              reverse: bool = False) -> tuple[list[Any], list[Any]]:  # fmt: skip
    """Combine `start` with the elements along some axes, one after the other.

    `reverse` begins with the last element. Returns the last results, without the axes, and all
    results in a new leading axis. `fold` is faster, but needs axes of known length.
    """
    others = _without(range(xs[0].ndim), axes)
    rows = [lax.collapse(lax.transpose(x, (*axes, *others)), 0, len(axes)) for x in xs]

    def step(before: list[Any], row: list[Any]) -> tuple[list[Any], list[Any]]:
        result = list(combine(before, row))
        return result, result

    return lax.scan(step, start, rows, reverse=reverse)


def _without(values: Sequence[Any], axes: Sequence[int]) -> tuple[Any, ...]:
    """Return values that belong to the axes of an array, such as its shape, without some axes."""
    return tuple(n for i, n in enumerate(values) if i not in axes)


def _have_known_length(x: Any, axes: Sequence[int]) -> bool:
    """Return whether no length of some axes is symbolic."""
    return not any(is_symbolic(x.shape[axis]) for axis in axes)


def _product(x: Any, *, axes: tuple[int, ...]):
    """Return the product over some axes, multiplied pairwise if their lengths are known."""
    multiply: Combine = lambda a, b: [lax.mul(a[0], b[0])]
    one = lax.broadcast(np.ones((), x.dtype), _without(x.shape, axes))
    if not x.size:  # an empty product is 1, whatever x
        return [one]
    if not _have_known_length(x, axes):
        return _in_order(multiply, [one], [x], axes)[0]
    for axis in sorted(axes, reverse=True):
        (x,) = fold(multiply, [x], axis)
    return [x]


def _reduce(*operands: Any, jaxpr: Any, dimensions: tuple[int, ...], computation: Any):
    """Return the results of `lax.reduce`, combined pairwise by the user's function `jaxpr`.

    The operands are the arrays, then the initial values. `computation` is the same function as a
    Python callable, and is not used.
    """
    del computation
    n = len(operands) // 2
    xs, initial_values, combine = list(operands[:n]), operands[n:], elementwise(jaxpr)
    start = [
        lax.broadcast(c, _without(x.shape, dimensions))
        for c, x in zip(initial_values, xs, strict=True)
    ]
    if not xs[0].size:
        return start
    if not _have_known_length(xs[0], dimensions):
        return _in_order(combine, start, xs, dimensions)[0]
    for axis in sorted(dimensions, reverse=True):
        xs = fold(combine, xs, axis)
    return combine(start, xs)


linear(
    "reduce_sum",
    lambda ct, x, *, axes, out_sharding: spread_over(ct, x, axes, cotangent_sharding(x)),
    traits=SUM,
)
composite("reduce_prod", jvp_of_definition(_product), traits=EXTREMUM)
declare(Reduction, "reduce", "structured", [jvp_of_definition(_reduce)], Traits(
    flops=lambda e: cost.operand_size(e) * cost.flops(program(e.params["jaxpr"]))))  # fmt: skip


# Maximum and minimum.


def _extremum(name: str):
    """Return the jvp of `reduce_max` or `reduce_min`: the mean of the tied elements' tangents."""
    reduce = getattr(lax, name)

    def push(xs: Any, dxs: Any, *, axes: tuple[int, ...], out_sharding: Any = None):
        (x,), (dx,), kwargs = xs, dxs, sharding_option(out_sharding)
        y = reduce(x, axes, **kwargs)
        if dx is None:
            return [y], [None]
        # If y is NaN, all elements count as tied, and the sum of tangents is divided by NaN.
        is_nan = lax.ne(y, y)
        tied = lax.eq(x, spread_over(y, x, axes))
        tied = lax.bitwise_or(tied, spread_over(is_nan, x, axes))
        count = lax.reduce_sum(lax.convert_element_type(tied, np.int32), axes, **kwargs)
        total = lax.reduce_sum(lax.select(tied, dx, zeros(jax.typeof(dx))), axes, **kwargs)
        divisor = lax.select(is_nan, y, lax.convert_element_type(count, y.dtype))
        return [y], [lax.div(total, divisor)]

    return push


for _name in ("reduce_max", "reduce_min"):
    composite(_name, _extremum(_name), traits=EXTREMUM)
constant("argmax", "argmin", supported_params=("axes", "index_dtype"), traits=REDUCTION)
constant("reduce_and", "reduce_or", "reduce_xor",
         supported_params=("axes", "out_sharding"), traits=REDUCTION)  # fmt: skip


# Cumulative reductions, by an associative scan. It combines elements pairwise in a tree, so it
# needs no special cases for zeros and infinities.


def _associative_scan(combine: Combine, neutral: list[Any], xs: list[Any], reverse: bool, axis: int
                      ) -> list[Any]:  # fmt: skip
    """Combine all elements up to each element; in order if the length of the axis is symbolic.

    `neutral` are the numbers whose combination with other elements does not change these.
    """
    if _have_known_length(xs[0], (axis,)):
        return lax.associative_scan(combine, xs, reverse, axis)
    rest = _without(xs[0].shape, (axis,))
    start = [lax.full(rest, c, x.dtype) for c, x in zip(neutral, xs, strict=True)]
    _, results = _in_order(combine, start, xs, (axis,), reverse)
    order = [*range(1, axis + 1), 0, *range(axis + 1, xs[0].ndim)]
    return [lax.transpose(y, order) for y in results]


def _log_add_exp(a: Any, b: Any) -> Any:
    """Return log(exp(a) + exp(b)), without overflow."""
    top = lax.max(*(lax.real(v) if np.iscomplexobj(v) else v for v in (a, b)))
    top = lax.select(lax.is_finite(top), top, lax.full_like(top, 0))
    top = lax.convert_element_type(top, a.dtype)
    return lax.add(top, lax.log(lax.add(lax.exp(lax.sub(a, top)), lax.exp(lax.sub(b, top)))))


def _zero_if_infinite(v: Any) -> Any:
    """Return `v`, with 0 in place of +infinity. So the derivative there is a number, as in JAX."""
    real = lax.real(v) if np.iscomplexobj(v) else v
    largest = lax.full_like(real, jax.numpy.finfo(real.dtype).max)  # not all types have infinities
    return lax.select(lax.gt(real, largest), lax.full_like(v, 0), v)


def _cumlogsumexp(xs: Any, dxs: Any, *, axis: int, reverse: bool):
    """Return the jvp, by a scan of pairs (value, tangent).

    The tangent of a pair's result is the sum of both tangents, each times exp(value - result).
    """
    (x,), (dx,) = xs, dxs

    def combine(a: list[Any], b: list[Any]) -> list[Any]:
        y = _log_add_exp(a[0], b[0])
        finite_y = _zero_if_infinite(y)
        weight = lambda v: lax.exp(lax.sub(_zero_if_infinite(v), finite_y))
        da, db = (lax.mul(weight(v), dv) for v, dv in (a, b))
        return [y, lax.add(da, db)]

    _, dy = _associative_scan(combine, [-np.inf, 0], [x, dx], reverse, axis)
    return None, [dy]


def _cumulative(combine: Callable[[Any, Any], Any], neutral: float):
    """Return the jvp of a cumulative reduction, from an associative scan with `combine`.

    `neutral` is the number whose combination with another one is the other one.
    """
    one = lambda a, b: [combine(a[0], b[0])]
    return jvp_of_definition(
        lambda x, *, axis, reverse: _associative_scan(one, [neutral], [x], reverse, axis)
    )


linear(
    "cumsum",
    lambda ct, x, *, axis, reverse: lax.cumsum(ct, axis, not reverse),
    traits=CUMULATIVE,
)
composite("cumprod", _cumulative(lax.mul, 1), traits=CUMULATIVE)
composite("cummax", _cumulative(lax.max, -np.inf), traits=CUMULATIVE)
composite("cummin", _cumulative(lax.min, np.inf), traits=CUMULATIVE)
composite("cumlogsumexp", _cumlogsumexp, traits=CUMULATIVE)


# Sorting: each tangent moves with its primal.


def _take(dx: Any, index: Any, axis: int):
    """Return the elements of `dx` at `index`, which has no repeats; None if `dx` is None."""
    if dx is None:
        return None
    others = tuple(i for i in range(dx.ndim) if i != axis)
    return lax.gather(
        dx,
        lax.expand_dims(index, (index.ndim,)),
        lax.GatherDimensionNumbers((), (axis,), (axis,), others, others),
        (1,) * dx.ndim,
        unique_indices=True,
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )


def _sort(xs: Any, dxs: Any, *, dimension: int, is_stable: bool, num_keys: int):
    """Sort an array of positions with the operands; move the tangents to these positions."""
    shape = np.shape(xs[0])
    small = is_at_least(2**31 - 1, shape[dimension])
    dtype = np.int32 if small else jax.dtypes.canonicalize_dtype(np.int64)
    positions = lax.broadcasted_iota(
        dtype, shape, dimension, out_sharding=jax.typeof(xs[0]).sharding
    )
    *ys, index = jax_primitives.sort_p.bind(
        *xs, positions, dimension=dimension, is_stable=is_stable, num_keys=num_keys
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


def _sort_flops(eqn: JaxprEqn) -> int:
    """Return the number of comparisons: n log2(n) for each key."""
    n = cost.sizes(eqn.invars[0])[eqn.params["dimension"]]
    return cost.operand_size(eqn) * eqn.params["num_keys"] * math.ceil(math.log2(max(n, 1)))


composite("sort", _sort, traits=Traits(flops=_sort_flops, ends=mixes("dimension")))
composite("top_k", _top_k, traits=dataclasses.replace(EACH_INPUT, ends=mixes("axis")))
composite("approx_top_k", _approx_top_k, traits=dataclasses.replace(
    EACH_INPUT, ends=mixes("reduction_dimension")))  # fmt: skip
