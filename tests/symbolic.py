"""Programs whose shapes have symbolic dimensions, as `jax.export` traces them."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from jax.ad_checkpoint import checkpoint_name

# Five sizes of each symbol.
SIZES = {"a": (1, 1, 2, 2, 4), "b": (1, 2, 5, 4, 7), "h": (1, 2, 3, 4, 5), "n": (1, 3, 2, 4, 5),
         "s": (1, 4, 3, 4, 6), "w": (1, 4, 2, 4, 6)}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Program:
    """A scalar function, with the shapes of its float32 arguments as text.

    Attributes:
      f: the function.
      shapes: the shape of each argument, such as "b, 4".
      constraints: constraints on the symbols.
      least: the least size of each symbol.
      in_jax: whether JAX exports its gradient.
      reference: the same function in a form that JAX can differentiate at known sizes.
    """

    f: Callable[..., Any]
    shapes: tuple[str, ...]
    constraints: tuple[str, ...] = ()
    least: int = 1
    in_jax: bool = True
    reference: Callable[..., Any] | None = None

    @property
    def types(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The types of the arguments."""
        scope = export.SymbolicScope(self.constraints)
        shapes = (export.symbolic_shape(text, scope=scope) for text in self.shapes)
        return tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)

    @property
    def sizes(self) -> list[dict[str, int]]:
        """Five sizes of its symbols."""
        names = sorted(set(re.findall("[a-z]", " ".join(self.shapes))))
        return [{k: SIZES[k][i] + self.least - 1 for k in names} for i in range(5)]

    def arrays(self, sizes: dict[str, int]) -> list[np.ndarray]:
        """Return arguments for some sizes of the symbols."""
        random = np.random.default_rng(3)
        shapes = ([eval(n, {}, sizes) for n in text.split(",")] for text in self.shapes)
        return [random.normal(size=shape).astype(np.float32) for shape in shapes]


def exported(f: Callable[..., Any], types: Sequence[Any]) -> Callable[..., Any]:
    """Export a function for symbolic types, and return the exported function."""
    return export.export(jax.jit(f))(*types).call


def total(y: Any) -> Any:
    """Return a number that depends on all elements of an array."""
    return jnp.sum(y * jnp.sin(y + 0.3))


def attention(q: Any, k: Any, v: Any) -> Any:
    logits = q @ k.T / 2.0
    i = jnp.arange(q.shape[0])
    return total(jax.nn.softmax(jnp.where(i[:, None] >= i, logits, -1e9)) @ v)


def transformer(x: Any, w_in: Any, w: Any, w_out: Any) -> Any:
    h = x @ w_in
    for _ in range(2):
        normal = (h - h.mean(-1, keepdims=True)) * lax.rsqrt(h.var(-1, keepdims=True) + 1e-5)
        i = jnp.arange(x.shape[0])
        logits = jnp.where(i[:, None] >= i, (normal @ w) @ normal.T, -1e9)
        h = h + jax.nn.softmax(logits) @ normal
        h = h + jax.nn.gelu(h @ w)
    return jnp.mean((h @ w_out) ** 2)


def convolve(x: Any, w: Any, strides: Any = (1,), padding: Any = "SAME", **options: Any) -> Any:
    numbers = ("NHC", "HIO", "NHC") if x.ndim == 3 else ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, w, strides, padding, dimension_numbers=numbers, **options)


def layer(h: Any, w: Any) -> tuple[Any, None]:
    return jnp.tanh(h @ w) + h, None


def recurrent(w: Any, xs: Any) -> Any:
    step = lambda h, x: (jnp.tanh(h @ w + x), h)
    return total(lax.scan(step, jnp.zeros_like(xs[0]), xs)[1])


def nested_scans(xs: Any, w: Any) -> Any:
    def outer(h: Any, x: Any) -> Any:
        h, ys = lax.scan(lambda c, row: (jnp.tanh(c @ w + row), c), h, x)
        return h, ys.sum(0)

    h, ys = lax.scan(outer, jnp.zeros(3), xs)
    return total(h) + total(ys)


def experts(x: Any, router: Any, w: Any) -> Any:
    gates, chosen = lax.top_k(jax.nn.softmax(x @ router), 2)
    return total(jnp.einsum("bsk,bske->bse", gates, w[chosen]))


def cross_entropy(x: Any) -> Any:
    labels = jnp.argmax(lax.stop_gradient(-x), axis=1)[:, None]
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(x), labels, 1))


def while_loop(x: Any, w: Any) -> Any:
    step = lambda c: (c[0] + 1, jnp.tanh(c[1] @ w))
    return total(lax.while_loop(lambda c: c[0] < 3, step, (0, x))[1])


def loop_over_rows(x: Any, w: Any) -> Any:
    return total(lax.fori_loop(0, x.shape[0], lambda i, h: layer(h, w)[0], x))


def unrolled(x: Any, w: Any, n: int) -> Any:
    return functools.reduce(lambda h, _: layer(h, w)[0], range(n), x)


@jax.custom_vjp
def clipped(x: Any) -> Any:
    return jnp.clip(x, -1, 1)


clipped.defvjp(lambda x: (clipped(x), x.shape[0] * jnp.cos(x)), lambda r, ct: (ct * r,))


@jax.custom_jvp
def scaled(x: Any) -> Any:
    return x * x.shape[0]


scaled.defjvp(lambda p, t: (scaled(*p), t[0] * p[0].shape[0] * 2))


def spd(x: Any) -> Any:
    return x @ x.mT + jnp.eye(x.shape[-2])


def normalized(x: Any, axes: Any) -> Any:
    mean, var = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
    return (x - mean) * lax.rsqrt(var + 0.1)


def pool(x: Any, op: Any, size: Any, stride: Any, padding: Any = "VALID") -> Any:
    worst = {lax.max: -np.inf, lax.min: np.inf, lax.add: 0.0}[op]
    return lax.reduce_window(x, worst, op, size, stride, padding)


def solve_cg(x: Any) -> Any:
    a = spd(x)
    return total(jax.scipy.sparse.linalg.cg(lambda v: a @ v, x[:, 0], maxiter=3)[0])


def window_products(x: Any) -> Any:
    return total(x[:, 0:7:2] * x[:, 1:8:2] * x[:, 2:9:2])


_multiply = lambda a, b: a * b
_three = lambda x, w: total(functools.reduce(lambda h, _: jnp.tanh(h @ w), range(3), x))
_relu_and_others = lambda x: total(jax.nn.relu(x) + jax.nn.silu(x) + jax.nn.gelu(x))

PROGRAMS: dict[str, Program] = {
    # Products.
    "product": Program(lambda w, x: total(jnp.tanh(x @ w)), ("4, 5", "b, 4")),
    "batched product": Program(lambda x, y: total(jnp.tanh(x @ y)), ("b, s, 4", "b, 4, s")),
    "einsum": Program(lambda x, w: total(jnp.einsum("bsd,dhe->bhse", x, w)),
                      ("b, s, 4", "4, 2, 3")),
    "inner products": Program(lambda x, y: jnp.vdot(x, y) + total(x @ y.T) + total(x.T @ y),
                              ("b, s", "b, s")),
    "outer": Program(lambda x: total(jnp.outer(x[0], x[0])) + total(jnp.kron(x[0], x[0])),
                     ("b, s",)),
    "attention": Program(attention, ("s, 4", "s, 4", "s, 3")),
    "attention of jax.nn": Program(
        lambda q, k, v: total(jax.nn.dot_product_attention(q, k, v, is_causal=True)),
        ("b, s, 2, 4", "b, s, 1, 4", "b, s, 1, 4")),
    "transformer": Program(transformer, ("s, 3", "3, 8", "8, 8", "8, 3")),
    "experts": Program(experts, ("b, s, 3", "3, 8", "8, 3")),
    "16 bits": Program(lambda x, w: total((x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(
        jnp.float32)), ("b, 4", "4, 3")),
    "complex": Program(lambda x, y: total(jnp.real(lax.complex(x, y) ** 3)), ("b, 4", "b, 4")),
    # Convolutions.
    "convolution": Program(lambda w, x: total(jax.nn.relu(convolve(x, w, (1, 1)))),
                           ("3, 3, 2, 5", "b, 8, 8, 2")),
    "convolution of images": Program(lambda w, x: total(convolve(x, w, (1, 1), "VALID")),
                                     ("3, 3, 2, 5", "b, h, w, 2"), ("h >= 4", "w >= 4"), 4),
    "convolution with strides": Program(lambda w, x: total(convolve(x, w, (2,), [(1, 1)])),
                                        ("3, 2, 5", "b, 8*n, 2")),
    "convolution with holes": Program(
        lambda w, x: total(convolve(x, w, padding=[(2, 2)], rhs_dilation=(2,))),
        ("3, 2, 5", "b, n, 2"), ("n >= 5",), 5),
    "convolution by depth": Program(
        lambda w, x: total(convolve(x, w, (1, 1), feature_group_count=4)),
        ("3, 3, 1, 4", "b, 6, 6, 4")),
    "convolution, same, strides": Program(lambda w, x: total(convolve(x, w, (2,))),
                                          ("3, 2, 4", "b, s, 2"), in_jax=False),
    "transposed convolution": Program(lambda x, w: total(lax.conv_transpose(
        x, w, (2,), "SAME", dimension_numbers=("NHC", "HIO", "NHC"))), ("b, 6, 4", "3, 4, 2")),
    "patches": Program(lambda x: total(lax.conv_general_dilated_patches(
        x[:, None, :, None], (3, 1), (1, 1), "SAME")), ("b, s",)),
    # Loops, branches, calls.
    "scan over layers": Program(lambda x, ws: total(lax.scan(layer, x, ws)[0]),
                                ("b, 4", "5, 4, 4")),
    "recurrent": Program(recurrent, ("4, 4", "n, b, 4")),
    "scan backward": Program(lambda xs, h: total(lax.scan(
        lambda h, x: (jnp.sin(h) * x, h), h, xs, reverse=True)[1]), ("n, 3", "3")),
    "scan, linear": Program(lambda xs, h: total(lax.scan(
        lambda h, x: (h * 1.5, None), h, xs)[0]), ("n, 3", "3")),
    "scan in a scan": Program(nested_scans, ("n, b, 3", "3, 3")),
    "scan with remat": Program(lambda x, ws: total(lax.scan(jax.checkpoint(layer), x, ws)[0]),
                               ("b, 4", "6, 4, 4")),
    "map": Program(lambda x: total(lax.map(lambda row: jnp.tanh(row) * row.sum(), x)), ("n, 4",)),
    "fori_loop": Program(lambda x, w: total(lax.fori_loop(
        0, 3, lambda i, h: jnp.tanh(h @ w) * (i + 1), x)), ("b, 4", "4, 4")),
    "loop over rows": Program(loop_over_rows, ("b, 4", "4, 4"), in_jax=False,
                              reference=lambda x, w: total(unrolled(x, w, len(x)))),
    "while_loop": Program(while_loop, ("b, 4", "4, 4"), in_jax=False, reference=_three),
    "cond": Program(lambda x, w: total(lax.cond(
        x[0, 0] > 0, lambda x: jnp.tanh(x @ w), lambda x: x * 2, x)), ("b, 4", "4, 4")),
    "cond in a scan": Program(lambda x, w: total(lax.scan(lambda h, i: (lax.cond(
        i > 1, lambda h: jnp.tanh(h @ w), lambda h: h * 2, h), None), x, jnp.arange(3))[0]),
        ("b, 4", "4, 4")),
    "remat": Program(lambda x, w: total(jax.checkpoint(lambda x: jnp.tanh(jnp.tanh(x @ w) @ w))(x)),
                     ("b, 4", "4, 4")),
    "jit and remat": Program(lambda x, w: total(functools.reduce(lambda h, f: f(h), [jax.jit(
        jax.checkpoint(lambda h: layer(h, w)[0]))] * 3, x)), ("b, 4", "4, 4")),
    "unrolled": Program(lambda x, w: total(unrolled(x, w, 6)), ("b, 4", "4, 4")),
    "vmap": Program(lambda x, ws: total(jax.vmap(lambda w: jnp.tanh(x @ w))(ws)),
                    ("b, 4", "n, 4, 4")),
    "vmap of a vmap": Program(lambda x: total(jax.vmap(jax.vmap(
        lambda row: jnp.cumsum(row) * row.max()))(x)), ("b, 2, s",)),
    "custom_vjp": Program(lambda x: total(clipped(x * 2)), ("b, 4",)),
    "custom_jvp": Program(lambda x: total(scaled(x)), ("b, 4",)),
    "gradient within": Program(lambda x, w: total(jax.grad(lambda x: total(jnp.tanh(x @ w)))(x)),
                               ("b, 4", "4, 4")),
    "names": Program(lambda x: total(checkpoint_name(jnp.sin(x), "h") * x), ("b, 4",)),
    # Sorts, gathers, scatters, slices.
    "sort": Program(lambda x: total(jnp.sort(x, 1) * jnp.arange(x.shape[1])), ("b, n",)),
    "sort rows": Program(lambda x: total(jnp.sort(x, 0)), ("b, n",)),
    "argsort": Program(lambda x: total(jnp.take_along_axis(x, jnp.argsort(x, 1), 1)), ("b, n",)),
    "median": Program(lambda x: total(jnp.median(x, 1)), ("b, s",)),
    "top_k": Program(lambda x: total(lax.top_k(x, 3)[0]), ("b, n",), ("n >= 3",), 3),
    "gather": Program(lambda x, y: total(x[jnp.array([0, 0])]) + total(y[:, 1]), ("b, 4", "s, 3")),
    "embedding": Program(lambda table, x: total(table[jnp.clip(x * 3, 0, 6).astype(int)]),
                         ("7, 4", "b, s")),
    "cross entropy": Program(cross_entropy, ("b, 7",)),
    "rows by index": Program(lambda x: total(x[jnp.arange(x.shape[0]), 1]), ("b, 4",)),
    "scatter": Program(lambda x, y: total(x.at[jnp.array([0, 0])].add(y[:1]))
                       + total(x.at[0].set(y[0])) + total(x.at[:, 0].mul(2.0)), ("b, 4", "b, 4")),
    "segment_sum": Program(lambda x: total(jax.ops.segment_sum(x, jnp.arange(x.shape[0]) % 3, 3)),
                           ("b, 4",)),
    "dynamic slices": Program(lambda x, y: total(lax.dynamic_slice(x, (0, 1), (x.shape[0], 3)))
                              + total(lax.dynamic_update_slice(x, y, (0, 1))),
                              ("b, n", "b, 2"), ("n >= 4",), 4),
    "slices": Program(lambda x: total(x[:, 1:-1]) + total(x[:, ::2]), ("b, n",), ("n >= 4",), 4),
    "split": Program(lambda x: total(jnp.split(x, 3, 1)[0]) + total(jnp.unstack(x, axis=1)[4]),
                     ("b, 6",)),
    "flip and roll": Program(lambda x: total(jnp.flip(x, 1) + 2 * jnp.roll(x, 1, 0)), ("b, n",)),
    "differences": Program(lambda x: total(jnp.diff(x, axis=1)), ("b, n",), ("n >= 3",), 3),
    # Shapes.
    "pad": Program(lambda x: total(lax.pad(x, 0.5, [(1, 2, 0), (0, 1, 1)]))
                   + total(jnp.pad(x, ((1, 1), (2, 0)), mode="edge")), ("b, n",)),
    "concatenate": Program(lambda x, y: total(jnp.concatenate([x, y], 1))
                           + total(jnp.concatenate([x, x], 0)), ("b, n", "b, 3")),
    "stack": Program(lambda x, y: total(jnp.stack([x, y], 1)), ("b, n", "b, n")),
    "reshape": Program(lambda x: total(x.reshape(-1, 4) @ jnp.ones((4, 2))), ("b, s, 4",)),
    "reshape to groups": Program(lambda x: total(jnp.max(x.reshape(x.shape[0], -1, 4), -1)),
                                 ("b, 4*n",)),
    "even lengths": Program(
        lambda x: total(x.reshape(x.shape[0], 2, x.shape[1] // 2).sum(1)), ("b, 2*n",)),
    "halves": Program(lambda x: total(x[:, : x.shape[1] // 2]) + total(x[:, x.shape[1] // 2 :]),
                      ("b, n",), ("n >= 2",), 2),
    "transpose": Program(lambda x: total(jnp.transpose(x, (2, 1, 0)) * jnp.ones((4, 1, 1))),
                         ("b, s, 4",)),
    "broadcast": Program(lambda x, y: total(x * y), ("b, 1, 4", "s, 4")),
    "repeat": Program(lambda x: total(jnp.repeat(x, 2, axis=1)) + total(jnp.tile(x, (2, 1))),
                      ("b, n",)),
    "squeeze": Program(lambda x: total(jnp.squeeze(x[:, None, :, None], (1, 3))[..., 0]),
                       ("b, n",)),
    "triangle": Program(lambda x: total(jnp.tril(x) @ x.T) + total(jnp.diag(x[0])), ("b, s",)),
    "product of symbols": Program(
        lambda x, y: total(x.reshape(*y.shape, 4) * y[..., None]), ("b*s, 4", "b, s")),
    "one more": Program(lambda x, y: total(x[1:] * y + x[:-1]), ("b + 1, 4", "b, 4")),
    "at least another symbol": Program(
        lambda x: total(x[: x.shape[1]] + jnp.swapaxes(x[: x.shape[1]], 0, 1)),
        ("a + b, a, 4",), ("b >= a",)),
    "at least 8": Program(lambda x, w: total(jnp.tanh(x[:8] @ w)) + total(x),
                          ("b, 4", "4, 4"), ("b >= 8",), 8),
    "size as a value": Program(lambda x: total(x) * x.shape[0] / (x.shape[0] + 1), ("b, 4",)),
    # Reductions.
    "sums and extrema": Program(
        lambda x: total(x.sum((0, 1))) + total(x.max(1)) + total(jnp.min(x, 0))
        + total(x.mean((0, 2))) + jnp.ptp(x), ("b, s, 4",)),
    "sums of some": Program(lambda x: total(jnp.max(x, 1, where=x > -5, initial=-9.0))
                            + total(jnp.sum(x, 0, where=x > 0)), ("b, 4",)),
    "logsumexp": Program(lambda x: total(jax.nn.logsumexp(x, 1)) + total(jax.nn.softmax(x, 0)),
                         ("b, s",)),
    "product of elements": Program(lambda x: total(jnp.prod(x, 1)), ("b, 3",), in_jax=False),
    "product of rows": Program(lambda x: total(jnp.prod(x, 0)), ("b, 3",), in_jax=False),
    "reduce": Program(lambda x: total(lax.reduce(x, jnp.float32(2), _multiply, (1,))), ("b, 3",),
                      in_jax=False, reference=lambda x: total(2 * jnp.prod(x, 1))),
    # Over some numbers of rows XLA:CPU multiplies by the first value twice, or not at all.
    "reduce rows": Program(lambda x: total(lax.reduce(x, jnp.float32(1), _multiply, (0,))),
                           ("b, 3",), in_jax=False, reference=lambda x: total(jnp.prod(x, 0))),
    "cumsum": Program(lambda x: total(jnp.cumsum(x, 1)) + total(jnp.cumsum(x, 0)), ("b, s",)),
    "cumprod": Program(lambda x: total(jnp.cumprod(x + 1.5, 1)), ("b, s",), in_jax=False),
    "cummax": Program(lambda x: total(lax.cummax(x, 1) + lax.cummin(x, 0, True)), ("b, s",),
                      in_jax=False),
    "cumlogsumexp": Program(lambda x: total(lax.cumlogsumexp(x, 1, True)), ("b, s",), in_jax=False),
    # Windows.
    "max pool": Program(lambda x: total(pool(x, lax.max, (1, 2, 2, 1), (1, 2, 2, 1))),
                        ("b, 8, 8, 2",)),
    "max pool of images": Program(lambda x: total(pool(x, lax.max, (1, 2, 2, 1), (1, 2, 2, 1))),
                                  ("b, 2*h, 2*w, 2",)),
    "max pool, overlapping": Program(lambda x: total(pool(x, lax.max, (1, 3, 1), (1, 1, 1))),
                                     ("b, n, 2",), ("n >= 4",), 4),
    "min pool, same": Program(lambda x: total(pool(x, lax.min, (1, 3), (1, 2), "SAME")), ("b, s",)),
    "mean pool": Program(lambda x: total(pool(x, lax.add, (1, 3), (1, 2), "SAME")), ("b, s",)),
    "window of products": Program(
        lambda x: total(lax.reduce_window(x, 1.0, _multiply, (1, 3), (1, 2), "VALID")), ("b, 9",),
        in_jax=False, reference=window_products),
    # Normalizations, elementwise functions, random numbers.
    "layer norm": Program(lambda x, g: total(normalized(x, -1) * g), ("b, s, 4", "4")),
    "layer norm over a symbol": Program(lambda x: total(normalized(x, -1)), ("b, s",)),
    "batch norm": Program(lambda x: total(normalized(x, (0, 1))), ("b, s, 4",)),
    "group norm": Program(lambda x: total(normalized(x.reshape(*x.shape[:2], 2, 2), (1, 3))),
                          ("b, s, 4",)),
    "norm": Program(lambda x: total(jnp.linalg.norm(x + 1.0, axis=1)), ("b, 4",)),
    "activations": Program(_relu_and_others, ("b, 4",)),
    "where": Program(lambda x, y: total(jnp.where(x > y, x * y, jnp.sin(x)))
                     + total(lax.clamp(-0.5, x, 0.7)), ("b, 4", "b, 4")),
    "powers": Program(lambda x: total(jnp.abs(x) ** 1.5 + jnp.mod(x, 0.7) + 2.0**x), ("b, 4",)),
    "dropout": Program(lambda x: total(jnp.where(
        jax.random.bernoulli(jax.random.key(0), 0.5, x.shape), x, 0.0)), ("b, 4",)),
    "interpolation": Program(lambda x: total(jnp.interp(x[:, 0], jnp.arange(4.0), jnp.ones(4)))
                             + total(jax.image.resize(x, (x.shape[0], 5), "linear")), ("b, 4",)),
    # Linear algebra.
    "fft": Program(lambda x: total(jnp.abs(jnp.fft.rfft(x, axis=1) + 2.0)), ("b, 8",)),
    "solve": Program(lambda a, y: total(jnp.linalg.solve(a + 4 * jnp.eye(3), y[..., None])),
                     ("b, 3, 3", "b, 3")),
    "cholesky": Program(lambda a: total(jnp.linalg.cholesky(spd(a))), ("b, 3, 3",)),
    "qr and svd": Program(lambda x: total(jnp.linalg.qr(x)[1])
                          + total(jnp.linalg.svd(x, compute_uv=False)), ("b, 4, 3",)),
    "large cholesky": Program(lambda x: total(jnp.linalg.cholesky(spd(x))), ("b, 3",)),
    "large inverse": Program(lambda x: total(jnp.linalg.inv(spd(x))), ("b, 3",)),
    "large determinant": Program(lambda x: jnp.linalg.slogdet(spd(x))[1], ("b, 3",)),
    "large eigenvalues": Program(lambda x: total(jnp.linalg.eigh(
        x + x.T + jnp.diag(3.0 * jnp.arange(x.shape[0])))[0]), ("b, b",)),
    "large triangular solve": Program(lambda x: total(lax.linalg.triangular_solve(
        jnp.tril(x) + 3 * jnp.eye(x.shape[0]), x, left_side=True, lower=True)), ("b, b",)),
    "conjugate gradients": Program(solve_cg, ("b, s",)),
    "custom_linear_solve": Program(lambda x: total(lax.custom_linear_solve(
        lambda v: v * (x.shape[1] + 2.0), x, lambda mv, r: r / (x.shape[1] + 2.0),
        transpose_solve=lambda mv, r: r / (x.shape[1] + 2.0))), ("b, s",)),
}  # fmt: skip
