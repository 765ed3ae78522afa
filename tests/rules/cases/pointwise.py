"""Elementwise primitives: one case each, then ties, kinks, shapes and parameters."""

import numpy as np
from jax import lax

from xform._jax import primitives
from xform.testing import Case

X = np.array([0.3, -0.7, 1.4])
P = np.array([0.4, 0.9, 2.3])  # positive
U = np.array([-0.6, 0.2, 0.7])  # within (-1, 1)
B = np.array([1.3, -0.8, 0.6])
Z = np.array([0.3 - 0.4j, -0.7 + 0.2j, 1.4 + 1.1j])
W = np.array([1.3 + 0.5j, -0.8 - 0.9j, 0.6 - 0.2j])
ZERO = np.array([0.0, 2.0])
EMPTY = np.zeros((0, 2))
SCALAR = np.array(0.8)
MATRIX = np.arange(6.0).reshape(2, 3) / 5 - 0.45
HIGHEST = lax.AccuracyMode.HIGHEST


def unary(name, x=X, fun=None, complex=True, **fields):
    return Case(name, fun or getattr(lax, name), (x,), complex=complex, **fields)


def real(name, *args, **fields):
    return Case(name, getattr(lax, name), args, **fields)


CASES = [
    *(unary(n) for n in ("neg", "square", "exp", "exp2", "expm1", "logistic", "sin", "cos", "tan")),
    *(unary(n) for n in ("sinh", "cosh", "tanh", "atan", "asinh")),
    *(unary(n, P) for n in ("log", "log1p", "sqrt", "rsqrt")),
    *(unary(n, U) for n in ("asin", "acos", "atanh")),
    unary("acosh", 1 + P),
    unary("cbrt", complex=False),
    unary("sin", EMPTY, label="empty"),
    unary("tanh", SCALAR, label="scalar"),
    *(
        unary(n, P, lambda x, n=n: getattr(lax, n)(x, accuracy=HIGHEST), False, label="accurate")
        for n in ("sin", "cos", "tan", "exp", "exp2", "expm1", "log", "log1p", "tanh", "logistic")
    ),
    *(
        unary(n, P, lambda x, n=n: getattr(lax, n)(x, accuracy=HIGHEST), False, label="accurate")
        for n in ("sqrt", "rsqrt", "cbrt")
    ),
    Case("acosh", lax.acosh, (np.array([-2.0 + 0.5j, 0.3 - 2j]),), "left", bfloat16=False,
         jax=False),  # JAX 0.10 has 1 / sqrt(x² - 1), of the other sign where x < 0
    # Two inputs.
    *(Case(n, getattr(lax, n), (X, B), complex=True) for n in ("add", "sub", "mul", "div")),
    *(
        Case(n, getattr(lax, n), (MATRIX, SCALAR), "scalar", complex=True)
        for n in ("add", "sub", "mul", "div")
    ),
    *(
        Case(n, getattr(lax, n), (SCALAR, MATRIX + 0.03), "scalar-left", complex=True)
        for n in ("sub", "mul", "div")
    ),
    Case("mul", lax.mul, (MATRIX, np.array([[0.5], [-0.2]])), "broadcast"),
    Case("mul", lambda x: lax.mul(x, x), (X,), "same"),
    Case("add", lax.add, (EMPTY, EMPTY), "empty"),
    Case("add_any", primitives()["add_any"].bind, (X, B)),  # JAX's own AD makes it
    Case("sub", lambda x: lax.sub(x, x.dtype.type(1)), (X,), "literal"),
    real("rem", np.array([2.3, -2.3, 0.4]), np.array([0.7, 0.7, -0.9])),
    real("atan2", X, B),
    real("nextafter", X, B, jax=False, bfloat16=False, label="distance"),  # no rule in JAX 0.10
    real("max", X, B),
    real("min", X, B),
    # A tie: half to each, which differences cannot show.
    real("max", np.array([1.0, 0.5]), np.array([1.0, 0.7]), label="tie", differences=False),
    real("min", np.array([1.0, 0.5]), np.array([1.0, 0.7]), label="tie", differences=False),
    Case("max", lambda x: lax.max(x, x.dtype.type(0)), (X,), "literal"),
    Case("max", lax.max, (MATRIX, SCALAR), "scalar"),
    real("clamp", np.array([-0.5, -0.5, -0.4]), X, np.array([0.5, 0.6, 0.9])),
    # JAX's rule fails for scalar bounds.
    real("clamp", np.array(-0.5), X, np.array(0.9), label="scalars", jax=False),
    # At its bounds, and with bounds that cross.
    real("clamp", np.array([0.3, 0.0]), np.array([0.3, 1.0]), np.array([2.0, 1.0]), label="bounds",
         differences=False),
    # Bounds that cross: if x is below both, neither has a slope, by convention.
    real("clamp", np.full(3, 0.8), X, np.full(3, 0.1), label="crossed", differences=False),
    # Powers.
    *(
        Case("integer_pow", lambda x, n=n: lax.integer_pow(x, n), (X,), str(n), complex=True)
        for n in (0, 1, 2, 3, -1, -3)
    ),
    *(
        Case("integer_pow", lambda x, n=n: lax.integer_pow(x, n), (ZERO,), f"zero-{n}")
        for n in (0, 1, 3)
    ),
    Case("pow", lax.pow, (P, B), complex=True),
    Case("pow", lax.pow, (MATRIX + 1, SCALAR), "scalar-exponent"),
    Case("pow", lax.pow, (SCALAR, MATRIX), "scalar-base"),
    # JAX's rule promotes the integers, which strict promotion refuses.
    Case("pow", lax.pow, (X, np.array([3, -2, 0], np.int32)), "integer", complex=True, jax=False),
    Case("pow", lax.pow, (X, np.array(2, np.int32)), "integer-scalar", jax=False),
    Case("pow", lambda x: lax.pow(x, np.int32(0)), (np.array([0.0, 1.0]),), "zero-zero",
         jax=False),  # JAX's second derivative is nan
    # 0^y has slope 0 in y > 0 and in 0 itself, by convention.
    Case("pow", lax.pow, (np.array([0.0, 0.0]), np.array([2.0, 1.0])), "zero", second=False,
         differences=False),
    # Complex numbers.
    Case("abs", lax.abs, (X,), complex=True),
    Case("abs", lax.abs, (np.array([0.0, -0.0]),), "zero", differences=False),
    Case("abs", lax.abs, (np.array([0j, 1 + 0j]),), "complex-zero", differences=False,
         bfloat16=False, second=False),
    Case("real", lax.real, (Z,), bfloat16=False),
    Case("imag", lax.imag, (Z,), bfloat16=False),
    Case("complex", lax.complex, (X, B), bfloat16=False),
    Case("complex", lax.complex, (SCALAR, MATRIX), "scalar", bfloat16=False),
    Case("conj", lambda z: lax.mul(lax.conj(z), z), (Z,), bfloat16=False),
    Case("conj", lax.conj, (X,), "real", bfloat16=False),
    Case("sign", lax.sign, (X,)),
    Case("sign", lax.sign, (Z,), "complex", bfloat16=False, jax=False),  # zero in JAX 0.10
    # Choices.
    Case("select_n", lax.select_n, (np.array([True, False, True]), X, B), complex=True),
    Case("select_n", lax.select_n, (np.array([2, 0, 1], np.int32), X, B, P), "three"),
    Case("select_n", lax.select_n, (np.array(True), X, B), "scalar"),
    Case("select_n", lax.select_n, (np.zeros((0, 2), bool), EMPTY, EMPTY), "empty"),
    # Conversions.
    Case("convert_element_type", lambda x: lax.convert_element_type(x, np.float16), (X,), "narrow",
         differences=False, bfloat16=False),  # differences of float16 values
    Case("convert_element_type", lambda x: lax.convert_element_type(x, np.complex128), (X,),
         "complex", bfloat16=False),
    Case("convert_element_type", lambda x: lax.mul(x, lax.convert_element_type(
        lax.convert_element_type(x, np.int32), x.dtype)), (X,), "integer"),
    Case("reduce_precision", lambda x: lax.reduce_precision(x, 11, 52), (X,), bfloat16=False),
    # Slope 0 where they have one.
    *(Case(n, getattr(lax, n), (X,)) for n in ("floor", "ceil", "round")),
    Case("stop_gradient", lambda x: lax.mul(x, lax.stop_gradient(x)), (X,),
         differences=False),  # that is its purpose
]  # fmt: skip


def polynomial(x, *c):
    return lax.polynomial(x, c)


if hasattr(lax, "polynomial"):  # new in JAX 0.12
    CASES += [
        unary("log2", P),
        unary("one_minus_square"),
        Case("polynomial", polynomial, (X, B, U, P), complex=True),
        # Scalars: the slope of a line is one of its coefficients, without the shape of the result.
        Case("polynomial", polynomial, (MATRIX, SCALAR, -SCALAR), "line", complex=True),
        Case("polynomial", polynomial, (MATRIX, *np.float64([0.8, -0.3, 1.2])), "square",
             complex=True),
        Case("polynomial", polynomial, (SCALAR, MATRIX, -SCALAR), "wide", complex=True,
             jax=False),  # JAX 0.12 makes the tangent a scalar
        Case("polynomial", lambda x, c: polynomial(x, *[c] * 10), (MATRIX, SCALAR), "loop",
             complex=True),
        # A constant: `lax.polynomial` itself makes no equation for it.
        Case("polynomial", lambda x, c: primitives()["polynomial"].bind(x, c), (X, B), "constant"),
    ]  # fmt: skip
