"""Lines that contract, convolve, transform and solve."""

from __future__ import annotations

import math

from tests.fuzz.arrays import some_array
from tests.fuzz.writer import Writer


def contract(w: Writer) -> None:
    """Write products of vectors, matrices and batches of them."""
    x = some_array(w)
    n = x.shape[-1]
    way = int(w.random.integers(5))
    if way == 0:
        y = w.pick("f", (n,))
        w.emit("jnp.matmul({0}, {1})", [x, y], x.shape[:-1], "f", n * x.most * y.most)
    elif way == 1:
        m = int(w.choose((2, 3)))
        y = w.pick("f", (n, m))
        w.emit("jnp.matmul({0}, {1})", [x, y], (*x.shape[:-1], m), "f", n * x.most * y.most)
    elif way == 2:
        y = w.pick("f", x.shape)
        dims = tuple(range(len(x.shape)))
        text = f"lax.dot_general({{0}}, {{1}}, (({dims}, {dims}), ((), ())))"
        w.emit(text, [x, y], (), "f", x.size * x.most * y.most)
    elif way == 3:
        y = w.pick("f", x.shape)
        inner, batch = tuple(range(1, len(x.shape))), (0,)
        text = f"lax.dot_general({{0}}, {{1}}, (({inner}, {inner}), ({batch}, {batch})))"
        w.emit(text, [x, y], x.shape[:1], "f", x.size / x.shape[0] * x.most * y.most)
    else:
        x, y = w.pick("f", (3,)), w.pick("f", (2,))
        w.emit("jnp.einsum('i,j->ij', {0}, {1})", [x, y], (3, 2), "f", x.most * y.most)


def window(w: Writer) -> None:
    """Write convolutions, windows of sums and extrema, and Fourier transforms."""
    way = int(w.random.integers(5))
    if way == 0:
        x, k = w.pick("f", (2, 3)), w.pick("f", (2, 3) if w.chance(0.5) else (2, 2))
        stride, low = int(w.random.integers(1, 3)), int(w.random.integers(0, 2))
        dilation = int(w.random.integers(1, 3))
        long = ((2 if dilation == 1 else 4) + 1 + low + 1 - k.shape[1]) // stride + 1
        text = (f"lax.conv_general_dilated({{0}}[None], {{1}}[None], ({stride},), (({low}, 1),), "
                f"lhs_dilation=({dilation},))[0, 0]")  # fmt: skip
        w.emit(text, [x, k], (long,), "f", 2 * k.shape[1] * x.most * k.most)
    elif way == 1:
        x = some_array(w)
        sizes = tuple(2 if d > 1 else 1 for d in x.shape)
        to = tuple(d - s + 1 for d, s in zip(x.shape, sizes, strict=True))
        text = f"lax.reduce_window({{0}}, 0.0, lax.add, {sizes}, {(1,) * len(sizes)}, 'VALID')"
        w.emit(text, [x], to, "f", math.prod(sizes) * x.most)
    elif way == 2:
        x = some_array(w)
        r, (op, start) = w.ramp(x.shape), w.choose((("max", "-np.inf"), ("min", "np.inf")))
        sizes = tuple(2 if d > 1 else 1 for d in x.shape)
        to = tuple(d - s + 1 for d, s in zip(x.shape, sizes, strict=True))
        text = (f"lax.reduce_window({{0}} + {{1}}, {start}, lax.{op}, {sizes}, "
                f"{(1,) * len(sizes)}, 'VALID')")  # fmt: skip
        w.emit(text, [x, r], to, "f", x.most + r.most)
    elif way == 3:
        x = w.bounded(w.pick("f", w.choose(((3,), (2, 3)))), 1.0)
        part = w.choose(("real", "imag"))
        w.emit(f"lax.{part}(jnp.fft.fft({{0}}))", [x], x.shape, "f", 3.0)
    else:
        x = w.bounded(w.pick("f", w.choose(((3,), (2, 3)))), 1.0)
        w.emit("jnp.fft.irfft(jnp.fft.rfft({0}) * (0.6 + 0.5j), 3)", [x], x.shape, "f", 2.0)


SOLVES = (
    ("jnp.linalg.solve({0} + 3.7 * np.eye(3), {1})", (3,), 2.0),
    ("lax.linalg.triangular_solve({0} + 3.7 * np.eye(3), {1}[:, None], left_side=True, lower=True)"
     "[:, 0]", (3,), 2.0),
    ("jnp.linalg.inv({0} + 3.7 * np.eye(3)) @ {1}", (3,), 2.0),
    ("lax.linalg.cholesky({0} @ {0}.T + 2.1 * np.eye(3)) @ {1}", (3,), 4.0),
    ("jnp.linalg.slogdet({0} + 3.7 * np.eye(3))[1] * {1}", (3,), 5.0),
    ("jnp.linalg.det(0.4 * {0} + 1.3 * np.eye(3)) * {1}", (3,), 5.0),
    ("jnp.linalg.eigh(np.diag([1.0, 2.7, 4.1]) + 0.1 * ({0} + {0}.T))[0] * {1}", (3,), 6.0),
    ("jnp.linalg.qr({0} + 3.7 * np.eye(3))[1] @ {1}", (3,), 9.0),
    ("jnp.linalg.svd({0} + np.diag([2.9, 4.7, 7.1]), compute_uv=False) * {1}", (3,), 20.0),
    ("lax.linalg.lu({0} + 5.3 * np.eye(3))[0] @ {1}", (3,), 20.0),
    ("lax.linalg.tridiagonal_solve({1} * 0.2, 2.1 + {0}[1], {0}[0] * 0.2, {1}[:, None])[:, 0]",
     (3,), 3.0),
    ("lax.custom_linear_solve(lambda v: (2.3 + {1}) * v, {0}[0], lambda _, b: b / (2.3 + {1}), "
     "lambda _, b: b / (2.3 + {1}))", (3,), 2.0),
)  # fmt: skip


# Text, shapes of its arguments and of its value, bounds of its arguments and of its value.
LIBRARY = (
    ("lax.ragged_dot({0}, jnp.stack([{1}, 0.5 * {1}]), np.array([1, 2], np.int32))",
     ((3, 2), (2, 3)), (3, 3), 1.2, 3.0),
    ("lax.associative_scan(lambda a, b: 0.6 * a * b + a, {0})", ((3,),), (3,), 1.0, 4.2),
    ("lax.map(lambda v: jnp.sin(v) * jnp.sum({1}), {0})", ((3,), (2,)), (3,), 1.2, 2.4),
    ("jnp.median({0} + np.array([0.31, 0.12, -0.73])) * {1}", ((3,), (2, 3)), (2, 3), 1.2, 2.4),
    ("jnp.nanmax(jnp.where({0} >= jnp.max({0}) - 0.3, {0}, np.nan)) * {1}",
     ((3,), (3,)), (3,), 1.2, 1.5),
    ("lax.approx_max_k({0} + np.array([0.31, 0.12, -0.73]), 2)[0]", ((3,),), (2,), 2.0, 2.5),
    ("{0} * jax.random.normal(jax.random.key(3), (3,), F)", ((3,),), (3,), 1.2, 3.0),
    ("lax.conv_transpose({0}[None], {1}[None], (2,), 'SAME',"
     " dimension_numbers=('NCH', 'OIH', 'NCH'))[0, 0]", ((2, 3), (2, 2)), (6,), 1.2, 4.0),
    ("lax.conv_general_dilated({0}[None, None], {1}[None, None], (1, 2), ((1, 0), (0, 1)),"
     " rhs_dilation=(1, 2))[0, 0]", ((3, 3), (2, 2)), (3, 1), 1.2, 5.0),
    ("jnp.convolve({0}, {1})", ((3,), (2,)), (4,), 1.2, 3.0),
    ("jnp.interp({0}, np.array([-1.1, 0.2, 1.3]), {1})", ((2, 3), (3,)), (2, 3), 2.0, 2.0),
    ("jnp.trapezoid({0} * {1})", ((3,), (3,)), (), 1.2, 3.0),
    ("lax.sort((jnp.array([1, 0, 1]), {0} + np.array([0.31, 0.12, -0.73]), {1}), num_keys=2)[2]",
     ((3,), (3,)), (3,), 2.0, 2.0),
    ("jax.device_put({0}) * lax.shift_left(jnp.int32(1), np.int32(1))", ((3,),), (3,), 1.2, 2.5),
)  # fmt: skip
# Only in first order: JAX has no second derivative.
ONCE = (
    ("lax.igamma(lax.square({0}) + 0.6, lax.full_like({0}, 1.3))", ((3,),), (3,), 1.2, 1.0),
    ("lax.real(jnp.linalg.eigvals(np.diag([1.0, 2.7, 4.1]) + 0.1 * {0})) * {1}",
     ((3, 3), (3,)), (3,), 1.0, 5.0),
)  # fmt: skip


def library(w: Writer) -> None:
    """Write functions of several operations, like those of a library."""
    first = w.shared.order == 1 and w.chance(0.1)
    text, shapes, to, limit, most = w.choose(ONCE if first else LIBRARY)
    w.emit(text, [w.bounded(w.pick("f", s), limit) for s in shapes], to, "f", most)


def solve(w: Writer) -> None:
    """Write small, well-conditioned linear algebra."""
    text, to, most = w.choose(SOLVES)
    a, b = w.bounded(w.pick("f", (3, 3)), 1.0), w.bounded(w.pick("f", (3,)), 1.0)
    w.emit(text, [a, b], to, "f", most)


FAMILY = ((contract, 5.0), (window, 1.6), (solve, 1.0), (library, 1.8))
