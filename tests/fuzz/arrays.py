"""Lines that reshape, join, reduce, accumulate and sort."""

from __future__ import annotations

import math

from tests.fuzz.source import Value
from tests.fuzz.writer import Writer

LARGEST = 24


def some_axis(w: Writer, x: Value) -> int:
    return int(w.random.integers(len(x.shape)))


def some_array(w: Writer, least: int = 1) -> Value:
    """Return a float array with at least `least` dimensions."""
    return w.pick(where=lambda v: len(v.shape) >= least and 0 not in v.shape)


# Shapes.


def shape(w: Writer) -> None:
    """Write reshape, transpose, broadcast, squeeze, reverse, tile, pad or slice."""
    x = w.pick() if w.chance(0.9) else w.pick("i")
    n, kind = len(x.shape), x.kind
    way = w.choose(("reshape", "transpose", "broadcast", "expand", "squeeze", "rev", "tile", "pad",
                    "slice"))  # fmt: skip
    if way == "reshape":
        options = [s for s in ((-1,), (1, -1), (2, -1), (-1, 3), (3, -1), (x.size,))
                   if x.size % abs(math.prod(s)) == 0]  # fmt: skip
        to = w.choose(options)
        full = tuple(x.size // abs(math.prod(to)) if d == -1 else d for d in to)
        w.emit(f"jnp.reshape({{0}}, {to})", [x], full, kind, x.most)
    elif way == "transpose":
        order = tuple(int(i) for i in w.random.permutation(n))
        w.emit(
            f"lax.transpose({{0}}, {order})", [x], tuple(x.shape[i] for i in order), kind, x.most
        )
    elif way == "broadcast" and x.size <= 9 and n <= 2:
        m = int(w.random.integers(1, 3))
        to = (*x.shape, m + 1) if w.chance(0.5) else (m + 1, *x.shape)
        dims = tuple(range(n)) if to[:n] == x.shape and to[-1] == m + 1 else tuple(range(1, n + 1))
        if tuple(to[i] for i in dims) != x.shape:
            dims = tuple(range(1, n + 1))
        w.emit(f"lax.broadcast_in_dim({{0}}, {to}, {dims})", [x], to, kind, x.most)
    elif way == "expand" and n <= 2:
        i = int(w.random.integers(n + 1))
        w.emit(
            f"lax.expand_dims({{0}}, ({i},))", [x], (*x.shape[:i], 1, *x.shape[i:]), kind, x.most
        )
    elif way == "squeeze" and 1 in x.shape:
        i = x.shape.index(1)
        w.emit(f"lax.squeeze({{0}}, ({i},))", [x], (*x.shape[:i], *x.shape[i + 1 :]), kind, x.most)
    elif way == "rev" and n:
        w.emit(f"lax.rev({{0}}, ({some_axis(w, x)},))", [x], x.shape, kind, x.most)
    elif way == "tile" and n and x.size * 2 <= LARGEST:
        to = (2 * x.shape[0], *x.shape[1:])
        w.emit(f"lax.tile({{0}}, {(2, *(1,) * (n - 1))})", [x], to, kind, x.most)
    elif way == "pad" and n:
        _pad(w, x)
    elif n:
        _slice(w, x)
    else:
        unit = (1,) * int(w.random.integers(1, 3))
        w.emit(f"lax.broadcast({{0}}, {unit})", [x], unit, kind, x.most)


def _pad(w: Writer, x: Value) -> None:
    """Write padding: at edges, between elements, and negative."""
    i, n = some_axis(w, x), x.shape
    low, high = int(w.random.integers(-1, 2)), int(w.random.integers(0, 2))
    hole = int(w.random.integers(0, 2))
    long = n[i] + (n[i] - 1) * hole + low + high
    if long < 1 or math.prod(n) // n[i] * long > LARGEST:
        low = high = hole = 0
        long = n[i]
    config = [(low, high, hole) if k == i else (0, 0, 0) for k in range(len(n))]
    fill = w.scalar() if x.kind == "f" else Value("jnp.int32(1)", (), "i")
    to = (*n[:i], long, *n[i + 1 :])
    w.emit(f"lax.pad({{0}}, {{1}}, {config})", [x, fill], to, x.kind, max(x.most, fill.most))


def _slice(w: Writer, x: Value) -> None:
    i = some_axis(w, x)
    start = int(w.random.integers(x.shape[i]))
    stop = int(w.random.integers(start + 1, x.shape[i] + 1))
    step = int(w.random.integers(1, 3))
    to = (*x.shape[:i], -((start - stop) // step), *x.shape[i + 1 :])
    text = f"lax.slice_in_dim({{0}}, {start}, {stop}, {step}, {i})"
    w.emit(text, [x], to, x.kind, x.most)


def join(w: Writer) -> None:
    """Write concatenate, stack or split."""
    x = some_array(w)
    i = some_axis(w, x)
    n = x.shape[i]
    way = int(w.random.integers(3))
    if way == 0 and x.size * 2 <= LARGEST:
        y = w.pick("f", x.shape)
        to = (*x.shape[:i], 2 * n, *x.shape[i + 1 :])
        w.emit(f"lax.concatenate([{{0}}, {{1}}], {i})", [x, y], to, "f", max(x.most, y.most))
    elif way == 1 and x.size * 2 <= LARGEST and len(x.shape) <= 2:
        y = w.pick("f", x.shape)
        to = (*x.shape[:i], 2, *x.shape[i:])
        w.emit(f"jnp.stack([{{0}}, {{1}}], {i})", [x, y], to, "f", max(x.most, y.most))
    elif n > 1:
        k = int(w.random.integers(1, n))
        parts = [Value("", (*x.shape[:i], m, *x.shape[i + 1 :]), "f", x.most) for m in (k, n - k)]
        w.call(f"lax.split({{0}}, ({k}, {n - k}), {i})", [x], parts)


# Reductions, cumulative operations, order.


def reduce(w: Writer) -> None:
    """Write a reduction over one axis or all of them."""
    x = some_array(w)
    axes = (some_axis(w, x),) if w.chance(0.7) else tuple(range(len(x.shape)))
    to = tuple(d for i, d in enumerate(x.shape) if i not in axes)
    n = x.size // max(math.prod(to), 1)
    way = w.choose(("sum", "mean", "max", "min", "prod", "logsumexp", "arg", "var", "any", "norm",
                    "custom"))  # fmt: skip
    if way == "sum":
        w.emit(f"jnp.sum({{0}}, {axes})", [x], to, "f", n * x.most)
    elif way == "mean":
        w.emit(f"jnp.mean({{0}}, {axes})", [x], to, "f", x.most)
    elif way in ("max", "min"):
        r = w.ramp(x.shape)
        w.emit(f"jnp.{way}({{0}} + {{1}}, {axes})", [x, r], to, "f", x.most + r.most)
    elif way == "prod":
        x = w.bounded(x, 1.5)
        w.emit(f"jnp.prod(0.6 * {{0}} + 0.2, {axes})", [x], to, "f", 1.1**n)
    elif way == "logsumexp":
        w.emit(f"jax.nn.logsumexp({{0}}, {axes})", [x], to, "f", x.most + 1)
    elif way == "arg":
        r, op = w.ramp(x.shape), w.choose(("argmax", "argmin"))
        to = (*x.shape[: axes[0]], *x.shape[axes[0] + 1 :])
        w.emit(f"lax.{op}({{0}} + {{1}}, {axes[0]}, np.int32)", [x, r], to, "i", 4.0)
    elif way == "var":
        w.emit(f"jnp.var({{0}}, {axes})", [x], to, "f", x.most**2)
    elif way == "any":
        op = w.choose(("any", "all"))
        w.emit(f"jnp.{op}({{0}} > 0.3103, {axes})", [x], to, "b")
    elif way == "norm":
        w.emit(f"jnp.sqrt(jnp.sum(lax.square({{0}}), {axes}) + 0.3)", [x], to, "f",
               math.sqrt(n) * x.most + 0.6)  # fmt: skip
    else:
        x = w.bounded(x, 1.5)
        text = f"reduce({{0}}, F(0.0), lambda a, b: a + b + 0.3 * a * b, {axes})"
        w.emit(text, [x], to, "f", 1.45**n * 4)


def cumulate(w: Writer) -> None:
    """Write running sums, products and extrema."""
    x = some_array(w)
    i, back = some_axis(w, x), w.chance(0.3)
    op = w.choose(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"))
    if op == "cumprod":
        x = w.bounded(x, 1.2)
    text, args = "{0}", [x]
    if op in ("cummax", "cummin"):
        text, args = "{0} + {1}", [x, w.ramp(x.shape)]
    most = {"cumsum": x.shape[i] * x.most, "cumprod": 1.2 ** x.shape[i]}
    bound = most.get(op, sum(v.most for v in args) + 1.4)
    w.emit(f"lax.{op}({text}, {i}, {back})", args, x.shape, "f", bound)


def order(w: Writer) -> None:
    """Write a sort of one or several operands, an argsort, or the largest elements."""
    x = some_array(w)
    i, r = some_axis(w, x), w.ramp(x.shape)
    most, way = x.most + r.most, int(w.random.integers(4))
    if way == 0:
        w.emit(f"lax.sort({{0}} + {{1}}, {i})", [x, r], x.shape, "f", most)
    elif way == 1:
        y = w.pick("f", x.shape)
        results = [Value("", x.shape, "f", most), Value("", x.shape, "f", y.most)]
        w.call(f"lax.sort(({{0}} + {{1}}, {{2}}), dimension={i}, num_keys=1)", [x, r, y], results)
    elif way == 2:
        w.emit(f"jnp.argsort({{0}} + {{1}}, {i}).astype(np.int32)", [x, r], x.shape, "i", 6.0)
    else:
        k = int(w.random.integers(1, x.shape[-1] + 1))
        to = (*x.shape[:-1], k)
        results = [Value("", to, "f", most), Value("", to, "i", 6.0)]
        w.call(f"lax.top_k({{0}} + {{1}}, {k})", [x, r], results)


def normalize(w: Writer) -> None:
    """Write softmax and similar functions, or an identity, which is counted."""
    x = some_array(w)
    if w.chance(0.6):
        op = w.choose(("jax.nn.softmax({0}, -1)", "jax.nn.log_softmax({0}, -1)",
                       "{0} - jnp.mean({0}, -1, keepdims=True)", "jnp.cumsum({0}) / {1}",
                       "jnp.linalg.norm({0} + 0.9)"))  # fmt: skip
        to = () if "norm(" in op else (x.size,) if "cumsum" in op else x.shape
        w.emit(op.replace("{1}", str(x.size)), [x], to, "f", x.most + 3.0)
    else:
        i = some_axis(w, x)
        iota = f"lax.broadcasted_iota(np.int32, {x.shape}, {i})"
        w.emit(iota, [], x.shape, "i", 6.0)


FAMILY = ((shape, 7.0), (join, 3.0), (reduce, 6.0), (cumulate, 2.5), (order, 2.5),
          (normalize, 1.6))  # fmt: skip
