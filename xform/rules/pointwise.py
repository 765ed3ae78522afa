"""Rules of elementwise primitives: a partial derivative for each input.

`pointwise(name, d1, d2, ...)` declares a primitive. `di(y, *x)`, a function of the output and the
inputs, returns a partial derivative: an array, 1, -1, or factors that are applied one by one.

Where a derivative does not exist, the conventions are those of JAX. `max` and `min` share a tie
equally. At its bounds `clamp` gives `x` no derivative. `abs` has slope 1 at 0, `sign` and rounding
have slope 0, and `pow` takes log 0 as 0. Functions of complex numbers are holomorphic, and
pullbacks multiply without conjugation. But `abs`, `sign`, `real`, `imag` and `conj` are
differentiable over the reals only.

Where a derivative is infinite, the order of factors matters. The cotangents that make the rows of a
Jacobian are 0-1 masks. XLA replaces the product of a mask and a factor by a select, so 0 * inf is
0, not NaN. It does so for the first factor only. So the factor that may be infinite comes first in
a tuple, and a quotient of two values is one factor.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from xform._jax import JaxprEqn, match_weak_type, primitives
from xform._jax.one_minus_square import one_minus_square_p
from xform.program.arithmetic import (
    DivideBy,
    Value,
    constant_like,
    reduce_like,
    shaped_like,
)
from xform.program.arrays import zeros
from xform.program.equation import apply
from xform.registry.dependence import ELEMENTWISE_DEPENDENCE, DataMovement
from xform.registry.table import declare
from xform.registry.traits import CONVERSION, ELEMENTWISE, EXPENSIVE, Traits
from xform.registry.words import Linear, bilinear, composite, constant, linear, pointwise
from xform.rules.over_squares import atan_slope, over_squares
from xform.rules.slopes import (
    acosh_slope,
    asinh_slope,
    cbrt_slope,
    in_32_bits,
    log2_slope,
    logistic_slope,
    one_minus_square,
    over_one_minus_square,
    power,
    real_valued,
    tanh_slope,
)

C = constant_like  # C(x, c): the scalar c in the dtype of x


def step(mask: Value, x: Value) -> Value:
    """Return 1 in the type of `x` where the mask is True, else 0. The mask is cheaper to save."""
    return match_weak_type(lax.convert_element_type(mask, x.dtype), jax.typeof(x))


def nonzero(x: Value) -> Value:
    """Return `x`, with 1 in place of 0."""
    return lax.select(lax.eq(x, C(x, 0)), lax.full_like(x, 1), x)


# Arithmetic.

linear("neg", lambda ct, x: lax.neg(ct), traits=ELEMENTWISE)
_SUM = dataclasses.replace(ELEMENTWISE, linear_in=(0, 1), neutral=(0, (0, 1)))
_DIFFERENCE = dataclasses.replace(_SUM, neutral=(0, (1,)))
pointwise("add", lambda y, a, b: 1, lambda y, a, b: 1, traits=_SUM)
pointwise("add_any", lambda y, a, b: 1, lambda y, a, b: 1, traits=_SUM)
pointwise("sub", lambda y, a, b: 1, lambda y, a, b: -1, traits=_DIFFERENCE)
bilinear(
    "mul",
    lambda ct, a, b, *, out_dtype=None: lax.mul(ct, b, out_dtype=out_dtype and a.dtype),
    lambda ct, a, b, *, out_dtype=None: lax.mul(a, ct, out_dtype=out_dtype and b.dtype),
    traits=dataclasses.replace(ELEMENTWISE, neutral=(1, (0, 1))),
)
pointwise(
    "div", lambda y, a, b: DivideBy(b), lambda y, a, b: lax.div(y, lax.neg(b)),
    traits=dataclasses.replace(EXPENSIVE, linear_in=(0,), neutral=(1, (1,))),
)  # fmt: skip


@in_32_bits
def _rem_divisor(a: Value, b: Value) -> Value:
    """Return -trunc(a / b): rem(a, b) is a - b trunc(a / b). lax has no trunc."""
    quotient = lax.div(a, b)
    return lax.neg(lax.mul(lax.sign(quotient), lax.floor(lax.abs(quotient))))


pointwise("rem", lambda y, a, b: 1, lambda y, a, b: _rem_divisor(a, b), traits=EXPENSIVE)
pointwise("square", lambda y, x: lax.mul(C(x, 2), x), traits=ELEMENTWISE)
pointwise(one_minus_square_p, lambda y, x: lax.mul(C(x, -2), x), traits=ELEMENTWISE)
pointwise("sqrt", lambda y, x, *, accuracy=None: DivideBy(lax.add(y, y)), traits=EXPENSIVE)
pointwise(
    "rsqrt", lambda y, x, *, accuracy=None: lax.div(lax.mul(C(x, -0.5), y), x), traits=EXPENSIVE
)
pointwise(
    "cbrt",
    lambda y, x, *, accuracy=None: cbrt_slope(y, x),
    traits=EXPENSIVE,
)


def _integer_pow(out: Value, x: Value, *, y: int) -> Any:
    """Return y x^(y - 1); `y` is the exponent. The common powers are plain factors."""
    if y == -1:
        return lax.neg(lax.square(out))
    if y == 3:
        return lax.mul(C(x, 3), x), x
    if y > 3:
        return power(y, y - 1)(x)
    return (lax.integer_pow(x, y - 1) if y != 2 else x, C(x, y)) if y else C(x, 0)


pointwise("integer_pow", _integer_pow, traits=ELEMENTWISE)


def _pow_base(y: Value, a: Value, b: Value) -> Value:
    """Return b a^(b - 1), the partial derivative of a^b for `a`. As in JAX, its type is strong."""
    exponent = lax.sub(b, C(b, 1))
    if jax.numpy.issubdtype(b.dtype, np.integer):
        # An exponent 0 stays 0, not -1: no 0/0 here or in higher derivatives.
        exponent = lax.select(lax.eq(b, C(b, 0)), b, exponent)
    return lax.mul(lax.convert_element_type(b, a.dtype), lax.pow(a, exponent))


pointwise("pow", _pow_base, lambda y, a, b: lax.mul(lax.log(nonzero(a)), y), traits=EXPENSIVE)


def _polynomial(primals: Sequence[Value], tangents: Sequence[Any], *, unroll: int | None = None):
    """Return the jvp of a polynomial in x, with coefficients c[0], c[1], ... (constant first)."""
    (x, *c), (dx, *dc) = primals, tangents
    params = {} if unroll is None else {"unroll": unroll}
    polynomial = lambda *coefficients: primitives()["polynomial"].bind(x, *coefficients, **params)
    y, dy = polynomial(*c), None
    if dx is not None and len(c) > 1:
        slope = [lax.mul(C(ck, k), ck) for k, ck in enumerate(c[1:], 1)]
        # A polynomial of one coefficient is the coefficient. JAX would give it a wrong shape.
        dy = lax.mul(dx, slope[0] if len(slope) == 1 else polynomial(*slope))
    power = lax.full_like(x, 1)
    for dck in dc:
        if dck is not None:
            term = lax.mul(dck, power)
            dy = term if dy is None else lax.add(dy, term)
        power = lax.mul(power, x)
    return [y], [None if dy is None else shaped_like(dy, y)]


composite("polynomial", _polynomial, traits=ELEMENTWISE)

# Exponentials and logarithms.

pointwise("exp", lambda y, x, *, accuracy=None: y, traits=EXPENSIVE)


def _exp2(y: Value, x: Value, *, accuracy: Any = None) -> Value:
    """Return 2^x log 2, as 2^(x - 1) 2 log 2 where 2^x overflows and the product does not."""
    if not real_valued(x):
        return lax.mul(y, C(x, math.log(2)))
    shift = step(lax.ge(x, C(x, jax.numpy.finfo(x.dtype).maxexp)), x)
    factor = lax.mul(C(x, math.log(2)), lax.add(shift, C(x, 1)))
    return lax.mul(lax.exp2(lax.sub(x, shift), accuracy=accuracy), factor)


pointwise("exp2", _exp2, traits=EXPENSIVE)
# Not y + 1 for expm1, nor y (1 - y) for logistic: for y near -1, or 1, these lose all digits.
pointwise("expm1", lambda y, x, *, accuracy=None: lax.exp(x, accuracy=accuracy), traits=EXPENSIVE)
pointwise("log", lambda y, x, *, accuracy=None: DivideBy(x), traits=EXPENSIVE)
pointwise("log2", lambda y, x, *, accuracy=None: log2_slope(x), traits=EXPENSIVE)
pointwise("log1p", lambda y, x, *, accuracy=None: DivideBy(lax.add(x, C(x, 1))), traits=EXPENSIVE)
pointwise(
    "logistic",
    lambda y, x, *, accuracy=None: logistic_slope(accuracy)(y, x),
    traits=EXPENSIVE,
)

# Trigonometric and hyperbolic functions, and their inverses.


def _one_plus_square(x: Value) -> Value:
    return lax.add(C(x, 1), lax.square(x))


pointwise("sin", lambda y, x, *, accuracy=None: lax.cos(x, accuracy=accuracy), traits=ELEMENTWISE)
pointwise(
    "cos",
    lambda y, x, *, accuracy=None: lax.neg(lax.sin(x, accuracy=accuracy)),
    traits=ELEMENTWISE,
)
pointwise("tan", lambda y, x, *, accuracy=None: _one_plus_square(y), traits=EXPENSIVE)
pointwise("asin", lambda y, x: lax.rsqrt(one_minus_square(x)), traits=EXPENSIVE)
pointwise("acos", lambda y, x: lax.neg(lax.rsqrt(one_minus_square(x))), traits=EXPENSIVE)
pointwise("atan", lambda y, x: atan_slope(x), traits=EXPENSIVE)
pointwise(
    "atan2",
    lambda y, a, b: over_squares(shaped_like(a, y), shaped_like(b, y)),
    lambda y, a, b: lax.neg(over_squares(shaped_like(b, y), shaped_like(a, y))),
    traits=EXPENSIVE,
)
pointwise("sinh", lambda y, x: lax.cosh(x), traits=EXPENSIVE)
pointwise("cosh", lambda y, x: lax.sinh(x), traits=EXPENSIVE)


def _tanh(y: Value, x: Value, *, accuracy: Any = None) -> Value:
    """Return 1 - y²; at the highest accuracy, as in JAX, a formula of x that is right for y = 1."""
    return tanh_slope(x, accuracy) if accuracy is lax.AccuracyMode.HIGHEST else one_minus_square(y)


pointwise("tanh", _tanh, traits=EXPENSIVE)


pointwise("asinh", lambda y, x: asinh_slope(x), traits=EXPENSIVE)
pointwise("acosh", lambda y, x: acosh_slope(x), traits=EXPENSIVE)


pointwise("atanh", lambda y, x: over_one_minus_square(x), traits=EXPENSIVE)

# Choices.


def _share(y: Value, a: Value, b: Value) -> Value:
    """Return the slope of `y = max(a, b)` in `a`: 1, 0, or half for a tie. The same for min."""
    half = lax.select(lax.eq(b, y), lax.full_like(y, 0.5), lax.full_like(y, 1))
    return lax.select(lax.eq(a, y), half, lax.full_like(y, 0))


for _name, _least in (("max", -math.inf), ("min", math.inf)):
    pointwise(_name, lambda y, a, b: _share(y, a, b), lambda y, a, b: _share(y, b, a),
              traits=dataclasses.replace(ELEMENTWISE, neutral=(_least, (0, 1))))  # fmt: skip
pointwise(
    "clamp",
    lambda y, low, x, high: step(lax.bitwise_and(lax.gt(low, x), lax.lt(low, high)), x),
    lambda y, low, x, high: step(lax.bitwise_and(lax.gt(x, low), lax.lt(x, high)), x),
    lambda y, low, x, high: step(lax.lt(high, x), x),
)
# The next float after a: a plus a distance that is constant between powers of two.
pointwise("nextafter", lambda y, a, b: 1, lambda y, a, b: C(b, 0))


class _Select(Linear):
    """The rule of `select_n`. As in JAX, a zero tangent takes the weak type of another case's."""

    def linear_groups(self, eqn: JaxprEqn) -> Sequence[Sequence[int]]:
        return (range(1, len(eqn.invars)),)

    def push(self, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value], dxs: Sequence[Value]):
        zero = zeros(jax.typeof(next(dx for dx in dxs[1:] if dx is not None)))
        return apply(eqn, [xs[0], *(zero if dx is None else dx for dx in dxs[1:])])


def _select_n(ct: Value, which: Value, *cases: Value) -> list[Any]:
    """Return the cotangent of each case: `ct` where the case is selected, else 0."""
    zero = zeros(jax.typeof(ct))
    if len(cases) == 2 and which.dtype == np.bool_:
        return [None, lax.select_n(which, ct, zero), lax.select_n(which, zero, ct)]
    index = lax.convert_element_type(which, np.int32)
    return [None, *(lax.select_n(lax.eq(index, np.int32(i)), zero, ct) for i in range(len(cases)))]


def _move_selected(params: dict[str, Any], which: np.ndarray, *cases: np.ndarray) -> np.ndarray:
    """Do in NumPy what `select_n` does."""
    which = np.broadcast_to(which.astype(int), cases[0].shape)
    return np.take_along_axis(np.stack(cases), which[None], 0)[0]


declare(_Select, "select_n", "linear", [_select_n], dataclasses.replace(
    ELEMENTWISE,
    dependence=DataMovement(_move_selected, reads=(0, 1), otherwise=ELEMENTWISE_DEPENDENCE),
))  # fmt: skip

# Complex numbers: maps that are linear over the reals only.


def _abs(primals: Sequence[Value], tangents: Sequence[Any]):
    (x,), (dx,) = primals, tangents
    y = lax.abs(x)
    if real_valued(x):
        return [y], [lax.select(lax.ge(x, C(x, 0)), dx, lax.neg(dx))]
    phase = lax.div(x, lax.complex(nonzero(y), C(y, 0)))
    return [y], [lax.real(lax.mul(dx, lax.conj(phase)))]


def _sign(primals: Sequence[Value], tangents: Sequence[Any]):
    (x,), (dx,) = primals, tangents
    y = lax.sign(x)
    if real_valued(x):
        return [y], [None]
    # y = exp(iθ): dy = i y dθ, and dθ = Im(conj(y) dx) / |x|.
    angle = lax.div(lax.imag(lax.mul(lax.conj(y), dx)), nonzero(lax.abs(x)))
    return [y], [lax.mul(y, lax.complex(C(angle, 0), angle))]


composite("abs", _abs, traits=ELEMENTWISE)
# The formula of `sign` returns the tangent None for real numbers.
composite("sign", _sign, traits=dataclasses.replace(ELEMENTWISE, dependence=None))
linear("real", lambda ct, x: lax.complex(ct, C(ct, 0)), traits=CONVERSION)
linear("imag", lambda ct, x: lax.complex(C(ct, 0), lax.neg(ct)), traits=CONVERSION)
linear(
    "complex",
    lambda ct, a, b: [reduce_like(lax.real(ct), a), reduce_like(lax.neg(lax.imag(ct)), b)],
    traits=CONVERSION,
)
linear(
    "conj",
    lambda ct, x, *, input_dtype: lax.real(ct) if real_valued(x) else lax.conj(ct),
    traits=ELEMENTWISE,
)

# Conversions. A conversion to an integer type carries no derivative: `Rule.active` handles that.


def _convert(ct: Value, x: Value, *, new_dtype: Any, weak_type: bool, sharding: Any) -> Value:
    if real_valued(x) and not real_valued(ct):
        ct = lax.real(ct)
    return match_weak_type(lax.convert_element_type(ct, x.dtype), jax.typeof(x))


linear("convert_element_type", _convert, traits=CONVERSION)
linear(
    "reduce_precision",
    lambda ct, x, *, exponent_bits, mantissa_bits: lax.reduce_precision(
        ct, exponent_bits, mantissa_bits
    ),
    traits=ELEMENTWISE,
)

constant("stop_gradient", supported_params=(), traits=Traits("movement", identity=True))
constant("floor", "ceil", "is_finite", supported_params=(), traits=ELEMENTWISE)
constant("round", supported_params=("rounding_method",), traits=ELEMENTWISE)
constant(
    "eq", "ne", "lt", "le", "gt", "ge", "eq_to", "lt_to", "le_to", "and", "or", "xor", "not",
    "population_count", "clz", "mulhi", "shift_left", "shift_right_arithmetic",
    "shift_right_logical", supported_params=(), traits=ELEMENTWISE,
)  # fmt: skip
constant("bitcast_convert_type", supported_params=("new_dtype",), traits=CONVERSION)
