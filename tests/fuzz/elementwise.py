"""Lines of one elementwise operation, at points where its first three derivatives are moderate."""

from __future__ import annotations

from tests.fuzz.writer import Writer

# Text, the required bound of its argument, and the bound of its value.
UNARY = (
    ("lax.sin({0})", 3.0, 1.0),
    ("lax.cos({0})", 3.0, 1.0),
    ("lax.tan({0})", 0.8, 1.1),
    ("lax.tanh({0})", 3.0, 1.0),
    ("lax.exp({0})", 1.2, 3.4),
    ("lax.exp2({0})", 1.5, 2.9),
    ("lax.expm1({0})", 1.0, 1.8),
    ("lax.log({0} + 3.2)", 2.5, 1.75),
    ("lax.log(lax.square({0}) + 0.6)", 2.5, 2.0),
    ("lax.log1p(0.35 * {0})", 2.5, 2.1),
    ("lax.log1p(lax.square({0}))", 2.5, 2.0),
    ("jnp.log2(lax.square({0}) + 0.8)", 2.0, 2.4),
    ("lax.sqrt({0} + 3.1)", 2.5, 2.4),
    ("lax.rsqrt(lax.square({0}) + 0.5)", 2.5, 1.5),
    ("lax.cbrt({0} + 3.1)", 2.5, 1.8),
    ("lax.square({0})", 1.5, 2.3),
    ("lax.integer_pow({0}, 3)", 1.3, 2.2),
    ("{0} ** 2", 1.5, 2.3),
    ("lax.integer_pow({0} + 3.2, -2)", 2.2, 1.1),
    ("lax.reciprocal({0} + 3.1)", 2.3, 1.3),
    ("lax.pow({0} + 3.0, 0.7)", 2.2, 3.2),
    ("lax.pow({0} + 2.9, np.int32(2)) * 0.1", 2.5, 3.0),
    ("lax.pow(1.3, {0})", 2.5, 2.0),
    ("lax.sinh({0})", 1.2, 1.6),
    ("lax.cosh({0})", 1.2, 1.9),
    ("lax.asin(0.4 * {0})", 2.0, 1.0),
    ("lax.acos(0.4 * {0})", 2.0, 2.6),
    ("lax.atan({0})", 3.0, 1.3),
    ("lax.asinh({0})", 3.0, 1.9),
    ("lax.acosh({0} + 3.6)", 2.2, 2.5),
    ("lax.atanh(0.4 * {0})", 2.0, 1.1),
    ("lax.logistic({0})", 3.0, 1.0),
    ("lax.erf({0})", 2.5, 1.0),
    ("lax.erfc({0})", 2.5, 2.0),
    ("lax.erf_inv(0.4 * {0})", 1.8, 0.8),
    ("lax.lgamma({0} + 3.3)", 2.2, 3.0),
    ("lax.digamma({0} + 3.3)", 2.2, 1.6),
    ("lax.bessel_i0e({0})", 2.5, 1.0),
    ("lax.bessel_i1e({0})", 2.5, 1.0),
    ("lax.neg({0})", 3.0, 3.0),
    ("lax.abs({0} + 0.3707)", 3.0, 3.4),
    ("lax.reduce_precision({0}, 11, 52)", 3.0, 3.0),
    ("checkpoint_name({0}, 'h')", 3.0, 3.0),
    ("checkpoint_name({0}, 'g')", 3.0, 3.0),
    ("lax.optimization_barrier({0})", 3.0, 3.0),
    ("jnp.copy({0})", 3.0, 3.0),
    ("lax.convert_element_type({0}, C).real", 3.0, 3.0),
    ("lax.real(lax.exp(lax.complex(0.2 * {0}, {0})))", 3.0, 1.8),
    ("lax.imag(lax.log(lax.complex({0}, 3.0 + 0.4 * {0})))", 2.5, 2.4),
    ("lax.abs(lax.complex({0} + 2.9, 0.3 * {0}))", 2.2, 5.2),
    ("lax.imag(lax.conj(lax.tanh(lax.complex(0.3 * {0}, 0.2 * {0}))))", 2.5, 1.0),
    ("jax.nn.relu({0} + 0.1207)", 2.5, 2.7),
    ("jax.nn.relu6({0} * 3.1)", 2.5, 6.0),
    ("jax.nn.silu({0})", 2.5, 2.4),
    ("jax.nn.softplus({0})", 2.5, 2.6),
    ("jax.nn.gelu({0})", 2.5, 2.5),
    ("jax.nn.elu({0} + 0.0917)", 2.5, 2.6),
    ("jax.nn.sigmoid({0})", 3.0, 1.0),
    ("jnp.sinc({0} + 3.1)", 2.3, 0.5),
    ("jnp.where({0} > 0.1307, lax.sin({0}), lax.square({0}))", 1.5, 2.3),
)
RARE = (
    ("lax.polygamma(1.0, {0} + 3.5)", 2.0, 1.0),
    ("lax.igamma(1.7, lax.square({0}) + 0.4)", 1.5, 1.0),
    ("lax.igammac(1.7, lax.square({0}) + 0.4)", 1.5, 1.0),
    ("lax.betainc(1.3, 2.1, lax.logistic({0}))", 2.0, 1.0),
    ("lax.sign({0} - 0.2107)", 3.0, 1.0),
    ("lax.floor({0} * 1.7)", 2.5, 5.0),
    ("lax.ceil({0} * 1.7)", 2.5, 5.0),
    ("lax.round({0} * 2.3)", 2.5, 6.0),
    ("lax.stop_gradient({0})", 3.0, 3.0),
    ("{0} * lax.convert_element_type({0} * 2.1, np.int32)", 2.5, 13.0),
    # Only the high bits: rounding changes the low ones.
    ("lax.population_count(lax.bitcast_convert_type({0}, U) >> U(18)) * 0.05 + {0}", 2.5, 5.7),
)
# Text, bounds of the two arguments, and the bound of the value as a function of theirs.
BINARY = (
    ("lax.add({0}, {1})", 3.0, 3.0, lambda a, b: a + b),
    ("{0} + {1}", 3.0, 3.0, lambda a, b: a + b),
    ("lax.sub({0}, {1})", 3.0, 3.0, lambda a, b: a + b),
    ("lax.mul({0}, {1})", 3.0, 3.0, lambda a, b: a * b),
    ("{0} * {1}", 3.0, 3.0, lambda a, b: a * b),
    ("lax.div({0}, lax.square({1}) + 0.7)", 2.0, 2.0, lambda a, b: a / 0.7),
    ("{0} / ({1} + 3.3)", 3.0, 2.2, lambda a, b: a / 1.1),
    ("lax.max({0}, {1} + 0.1373)", 3.0, 2.5, lambda a, b: max(a, b + 0.2)),
    ("lax.min({0} * 1.0707, {1})", 2.5, 2.5, lambda a, b: 1.1 * max(a, b)),
    ("lax.atan2({0} + 0.2, lax.square({1}) + 0.5)", 2.5, 2.5, lambda a, b: 1.6),
    ("lax.rem({0} * 2.1, lax.square({1}) + 0.9)", 2.2, 2.2, lambda a, b: 2.1 * a),
    ("lax.pow({0} + 3.0, {1})", 2.0, 0.9, lambda a, b: 4.3),
    ("lax.real(lax.complex({0}, {1}) * lax.complex({1}, {0} + 1.1))", 1.5, 1.5,
     lambda a, b: a * b + b * (a + 1.1)),
    ("lax.abs(lax.complex({0} + 2.9, {1}))", 2.2, 2.2, lambda a, b: a + b + 2.9),
    ("jnp.logaddexp({0}, {1} + 0.21)", 2.0, 2.0, lambda a, b: max(a, b) + 1.0),
    ("jnp.hypot({0} + 2.8, {1})", 2.0, 2.0, lambda a, b: a + b + 2.8),
)  # fmt: skip


def unary(w: Writer) -> None:
    """Write an operation with one argument."""
    text, limit, most = w.choose(UNARY if w.chance(0.88) else RARE)
    x = w.bounded(w.pick(), limit)
    w.emit(text, [x], x.shape, "f", min(most, most if limit < 3 else max(most, x.most)))


def binary(w: Writer) -> None:
    """Write an operation with two arguments of one shape, or with one scalar."""
    text, low, high, most = w.choose(BINARY)
    a = w.pick()
    b = w.scalar() if w.chance(0.2) and "{1} +" not in text else w.pick("f", a.shape)
    if b.shape != a.shape and "lax." in text:
        text = "{0} * jnp.cos({1})"
    if w.chance(0.3) and b.shape == a.shape:
        a, b = b, a
    a, b = w.bounded(a, low), w.bounded(b, high)
    w.emit(text, [a, b], a.shape, "f", most(a.most, b.most))


def select(w: Writer) -> None:
    """Write a choice of two or three values, elementwise or by a scalar."""
    a = w.pick()
    b = w.pick("f", a.shape)
    if w.chance(0.7):
        which = w.pick("b", a.shape) if w.chance(0.7) else w.scalar("b")
        text = "jnp.where({0}, {1}, {2})" if w.chance(0.5) else "lax.select({0}, {1}, {2})"
        w.emit(text, [which, a, b], a.shape, "f", max(a.most, b.most))
    else:
        which, c = w.pick("i", a.shape), w.pick("f", a.shape)
        most = max(a.most, b.most, c.most)
        w.emit("lax.select_n(jnp.clip({0}, 0, 2), {1}, {2}, {3})", [which, a, b, c], a.shape,
               "f", most)  # fmt: skip


def clamp(w: Writer) -> None:
    """Write a clamp between constants or between values."""
    x = w.pick()
    if w.chance(0.5) or not x.shape:
        w.emit(f"lax.clamp({-w.number()}, {{0}}, {w.number()})", [x], x.shape, "f", x.most)
    else:
        low, high = w.pick("f", x.shape), w.pick("f", x.shape)
        most = max(x.most, low.most + 0.6, high.most + 0.4)
        w.emit("lax.clamp({1} - 0.5317, {0}, {2} + 0.3717)", [x, low, high], x.shape, "f", most)


def compare(w: Writer) -> None:
    """Write a comparison of floats or integers."""
    op = w.choose(("lax.lt", "lax.le", "lax.gt", "lax.ge", "lax.ne", "lax.eq"))
    if w.chance(0.6):
        a = w.pick()
        b = w.pick("f", a.shape) if w.chance(0.5) else w.literal("f", a.shape)
        w.emit(f"{op}({{0}}, {{1}} + 0.0313)", [a, b], a.shape, "b")
    else:
        a = w.pick("i")
        b = w.pick("i", a.shape)
        w.emit(f"{op}({{0}}, {{1}})", [a, b], a.shape, "b")


def logical(w: Writer) -> None:
    """Write a logical operation."""
    a = w.pick("b")
    b = w.pick("b", a.shape)
    text = w.choose(("lax.bitwise_and({0}, {1})", "lax.bitwise_or({0}, {1})", "~{0}",
                     "lax.bitwise_xor({0}, {1})", "lax.bitwise_not({1})"))  # fmt: skip
    w.emit(text, [a, b], a.shape, "b")


INTEGER = (
    "lax.rem({0} * {1} + 3, np.int32(5))",
    "{0} + {1}",
    "{0} - {1}",
    "lax.max({0}, {1})",
    "lax.bitwise_xor({0}, {1})",
    "lax.bitwise_and({0}, np.int32(3))",
    "lax.shift_right_arithmetic({0}, np.int32(1))",
    "jnp.mod({0} + {1}, 4)",
    "{0} // 2",
    "lax.population_count({0})",
    "lax.clz({0} + 9) - 25",
    "lax.abs({0}) % 3",
    "-{0}",
    "lax.sign({0})",
    "lax.clamp(np.int32(-2), {0}, {1} + 2)",
    "jnp.where({0} > {1}, {0}, 1)",
)


def integer(w: Writer) -> None:
    """Write integer arithmetic with small values."""
    a = w.pick("i")
    b = w.pick("i", a.shape)
    text, most = w.choose(INTEGER), a.most + b.most + 3
    if most > 20:
        text, most = f"lax.rem({text}, np.int32(5))", 5.0
    w.emit(text, [a, b], a.shape, "i", most)


def convert(w: Writer) -> None:
    """Write a conversion from one kind of number to another."""
    way = int(w.random.integers(4))
    if way == 0:
        x = w.pick("i")
        w.emit("0.15 * lax.convert_element_type({0}, F)", [x], x.shape, "f",
               0.15 * x.most)  # fmt: skip
    elif way == 1:
        x = w.pick("b")
        kind, dtype = w.choose((("f", "F"), ("i", "np.int32")))
        w.emit(f"lax.convert_element_type({{0}}, {dtype})", [x], x.shape, kind, 1.0)
    elif way == 2:
        x = w.pick()
        w.emit("lax.convert_element_type({0} * 1.9, np.int32)", [x], x.shape, "i", 2 * x.most)
    else:
        x = w.pick()
        w.emit("jnp.asarray({0} * 0.7 + 0.3).astype(F)", [x], x.shape, "f", x.most + 0.3)


FAMILY = ((unary, 18.0), (binary, 16.0), (select, 3.0), (clamp, 1.5), (compare, 2.0),
          (logical, 0.7), (integer, 2.0), (convert, 2.0))  # fmt: skip
