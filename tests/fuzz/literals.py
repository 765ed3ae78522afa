"""Lines with a value and a constant as users write it: NumPy's or Python's, of any type.

The value is converted to the program's type first, because a float32 constant would turn a weakly
typed value into float32.
"""

from __future__ import annotations

from tests.fuzz.source import Value
from tests.fuzz.writer import Writer

_FLOATS = ("({})", "np.float64({})", "np.float32({})", "np.array({})", "np.array({}, np.float32)",
           "jnp.asarray({})", "np.float16({})")  # fmt: skip
_WHOLE = ("({})", "np.int32({})", "np.int64({})", "np.array({})", "np.uint8(abs({}))")
_TRUTH = ("True", "np.bool_(True)", "np.array(True)")
# Text of a value {0} and a constant {c}, the bound of the value, and the bound of the result.
MIXED = (
    ("{0} * {c}", 2.0, 4.0),
    ("{c} * {0}", 2.0, 4.0),
    ("{0} + {c}", 2.5, 4.5),
    ("{c} + {0}", 2.5, 4.5),
    ("{0} - {c}", 2.5, 4.5),
    ("{c} - {0}", 2.5, 4.5),
    ("{0} / ({c} + 3.1)", 2.5, 2.5),
    ("{c} / ({0} + 3.1)", 2.2, 2.2),
    ("jnp.add({0}, {c})", 2.5, 4.5),
    ("jnp.multiply({c}, {0})", 2.0, 4.0),
    ("jnp.where({0} > 0.1309, {0}, {c})", 2.5, 2.5),
    ("jnp.where({0} > 0.1309, {c}, {0})", 2.5, 2.5),
    ("jnp.maximum({0} + 0.0171, {c})", 2.5, 2.6),
    ("jnp.minimum({c}, {0} + 0.0171)", 2.5, 2.6),
    ("jnp.clip({0}, -1.8171, {c})", 2.5, 2.5),
    ("jnp.power({0} + 3.1, {c})", 1.0, 17.0),
    ("jnp.power(jnp.abs({c}) + 1.3, {0})", 1.0, 3.3),
    ("({0} + 3.1) ** {c}", 1.0, 17.0),
    ("jnp.arctan2({0} + 3.1, {c})", 2.2, 2.0),
    ("jnp.hypot({0}, {c} + 0.9)", 2.5, 4.0),
    ("jnp.logaddexp({c}, {0})", 2.5, 4.0),
    ("jnp.remainder({0} * 2.1, jnp.abs({c}) + 0.9)", 2.2, 3.0),
    ("jnp.vdot({0}, {c} + 0 * {0})", 0.5, 8.0),
    ("jnp.sum({0}, initial={c})", 0.5, 6.0),
    ("jnp.sum({0}, where={0} > 0.1309)", 0.5, 6.0),
    ("jnp.max({0}, initial={c} + 0.0171)", 2.5, 2.5),
    ("jnp.prod(0.4 * {0} + 0.3, initial={c})", 1.0, 2.0),
    ("lax.cond(jnp.sum({0}) > 0.2, lambda: {0} * {c}, lambda: {0})", 2.0, 4.0),
    ("lax.scan(lambda a, _: (a * 0.5 + {c}, None), {0}, None, length=2)[0]", 2.0, 4.0),
    ("jax.jit(jnp.multiply)({0}, {c})", 2.0, 4.0),
    ("jax.checkpoint(lambda a, b: jnp.sin(a) * b)({0}, {c})", 2.0, 2.0),
    ("jax.vmap(lambda a, b: a * b, (None, 0))({0}, jnp.stack([{c}, {c}]))[1]", 2.0, 4.0),
    ("sum([{0}, {c} * {0}])", 1.2, 4.0),
    ("jnp.full_like({0}, {c}) * {0}", 2.0, 4.0),
    ("jnp.asarray({c}) * {0}", 2.0, 4.0),
)
# The constant is an array of the value's shape.
ARRAYS = (
    ("{c} * {0}", 2.0, 4.0),
    ("{0} - {c}", 2.5, 4.5),
    ("jnp.where({c} > 0.2, {0}, {c})", 2.5, 2.5),
    ("jnp.stack([{c}, {0}])[1]", 2.5, 2.5),
    ("jnp.concatenate([{0}, {c}])[: {0}.shape[0]]", 2.5, 2.5),
    ("jnp.tensordot({c}, {0}, {c}.ndim)", 0.5, 8.0),
    ("{0}.at[:].add({c})", 2.5, 4.5),
    ("{0}.at[0].set({c}[0])", 2.5, 2.5),
)
# Of the program's own type, as `lax` requires.
STRICT = (
    ("lax.add({0}, {c})", 2.5, 4.5),
    ("lax.mul({c}, {0})", 2.0, 4.0),
    ("lax.div({c}, {0} + 3.1)", 2.2, 2.2),
    ("lax.max({0} + 0.0171, {c})", 2.5, 2.6),
    ("lax.clamp(-1.8171, {0}, {c})", 2.5, 2.5),
    ("lax.pad({0}, {c}, [(0, 0, 0)] * {0}.ndim)", 2.5, 2.5),
    ("lax.while_loop(lambda a: jnp.sum(a) < -99.0, lambda a: a * {c}, {0})", 2.0, 4.0),
    ("lax.fori_loop(0, 2, lambda i, a: a * 0.5 + {c}, {0})", 2.0, 4.0),
    ("lax.switch(1, [lambda a: a, lambda a: a * {c}], {0})", 2.0, 4.0),
    ("lax.full({0}.shape, {c}) * {0}", 2.0, 4.0),
    ("lax.full_like({0}, {c}) * {0}", 2.0, 4.0),
)
# Weakly typed values of any shape.
WEAK = ("lax.full({0}.shape, {c})", "{c} * lax.convert_element_type({0} * 1.7, np.int32)",
        "jnp.where({0} > 0.1309, {c}, 0.7)", "lax.mul({c}, {c})")  # fmt: skip


def constant(w: Writer) -> str:
    """Return a number below 2, in a form that users write."""
    kind = int(w.random.integers(6))
    if kind < 4:
        return w.choose(_FLOATS).format(w.number() * w.choose((1, 1, -1)))
    return w.choose(_WHOLE).format(w.choose((1, 2, -1))) if kind == 4 else w.choose(_TRUTH)


def mixed(w: Writer) -> None:
    """Write a value with a constant that JAX promotes, or with an array of constants."""
    x = w.pick()
    many = bool(x.shape) and w.chance(0.25)
    text, limit, most = w.choose(ARRAYS if many else MIXED)
    x = w.bounded(x, limit)
    if many:
        numbers = [round(float(a), 3) for a in w.random.uniform(-1.4, 1.4, x.size)]
        c = f"np.array({numbers}{w.choose(('', ', np.float32'))}).reshape{x.shape}"
    else:
        c = constant(w)
        if "{c})" in text and ("pow" in text or "**" in text) and "True" in c:
            c = "2"  # a boolean power is not allowed
    _emit(w, text.replace("{0}", "lax.convert_element_type({0}, F)"), x, c, most)


def strict(w: Writer) -> None:
    """Write a value and a constant of its type."""
    text, limit, most = w.choose(STRICT)
    n = w.number()
    c = w.choose(("{}", "np.float64({})", "np.array({})", "jnp.asarray({})")).format(n)
    _emit(w, text, w.bounded(w.pick(), limit), c, most)


def weak(w: Writer) -> None:
    """Write a weakly typed value."""
    text = w.choose(WEAK)
    _emit(w, text, w.pick(), w.choose(("{}", "jnp.asarray({})")).format(w.number()), 4.5)


def _emit(w: Writer, text: str, x: Value, c: str, most: float) -> None:
    whole = any(word in text for word in ("vdot", "tensordot", "initial", "where={0}", "sum({0},"))
    whole = whole or text.startswith(("jnp.sum(", "lax.mul({c}, {c})"))
    w.emit(text.replace("{c}", c), [x], () if whole else x.shape, "f", most)


FAMILY = ((mixed, 4.0), (strict, 1.5), (weak, 1.0))
