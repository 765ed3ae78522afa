"""A derivative's primal output is the primitive's own: bit for bit, in dtype and weak type.

Under `jit` the program shows it: without the equations that serve tangents, a derivative is the
function itself. More complicated cases, and cases outside `jit`, are run operation by operation.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import xform
from tests.rules.test_rules import CASES, dtypes, ids
from xform import passes
from xform._jax import jaxpr_and_consts
from xform.registry.table import differentiable
from xform.testing import Case, cast

Fun = Callable[..., Any]
ALONE = passes.Pipeline([passes.Inline(), passes.Dce()])


def derivatives(f: Fun, xs: tuple[Any, ...]) -> dict[str, Fun]:
    """Return the output of `f` from each transform."""
    dxs = jax.tree.map(tangent, xs)
    return {
        "jvp": lambda *xs: xform.jvp(f, xs, dxs)[0],
        "vjp": lambda *xs: xform.vjp(f, *xs)[0],
        "linearize": lambda *xs: xform.linearize(f, *xs)[0],
    }


def tangent(x: Any) -> Any:
    aval = jax.typeof(x)
    if differentiable(aval):
        return jnp.ones(aval.shape, aval.dtype)
    return np.ones(aval.shape, jax.dtypes.float0)


def text(f: Fun, xs: tuple[Any, ...]) -> tuple[str, list[Any]]:
    """Return the program of a function, and the types of its outputs."""
    jaxpr = jax.make_jaxpr(ALONE(lambda *xs: jax.tree.leaves(f(*xs))))(*xs)
    return str(jaxpr), jaxpr.out_avals


def staged(f: Fun, *xs: Any) -> list[Any]:
    """Run `f` as traced under `jit`, but operation by operation: no compiler fuses differently."""
    jaxpr = jax.make_jaxpr(f)(*xs)
    return jax.core.eval_jaxpr(*jaxpr_and_consts(jaxpr), *jax.tree.leaves(xs))


def eager(f: Fun, *xs: Any) -> list[Any]:
    return jax.tree.leaves(f(*xs))


def bits(x: Any) -> tuple[Any, ...]:
    """Return the bits of a value that must not change; the bits of a NaN may."""
    aval, raw = jax.typeof(x), np.asarray(jnp.asarray(x))  # it may be a Python number
    parts = raw.view(raw.real.dtype) if raw.ndim else np.stack([raw.real, raw.imag])
    if not differentiable(aval):
        return aval.str_short(), aval.weak_type, raw.tobytes()
    nan = np.isnan(parts.astype(np.float64))
    known = np.where(nan, np.zeros((), parts.dtype), parts)
    return aval.str_short(), aval.weak_type, known.tobytes(), nan.tobytes()


def check(f: Fun, xs: tuple[Any, ...], *ways: Callable[..., list[Any]]) -> None:
    arrays = list(map(jnp.asarray, xs))
    for run in ways:
        own = list(map(bits, run(f, *arrays)))
        for name, output in derivatives(f, xs).items():
            assert list(map(bits, run(output, *xs))) == own, (name, run.__name__)


def arguments(case: Case, dtype: str) -> tuple[Any, ...]:
    return tuple(cast(x, dtype, i) for i, x in enumerate(case.args))


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_under_jit(case: Case) -> None:
    with jax.enable_x64(True):
        xs = arguments(case, "float64")
        own = text(case.fun, xs)
        if any(text(f, xs) != own for f in derivatives(case.fun, xs).values()):
            check(case.fun, xs, staged)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_in_every_dtype(case: Case) -> None:
    for dtype in dtypes(case, "float64", "float32", "bfloat16", "complex64"):
        with jax.enable_x64(True):
            check(case.fun, arguments(case, dtype), eager, staged)
    jax.clear_caches()


# Cases that the rules' own cases leave out, because those are compared with differences and JAX.

F = np.float32
ODD = np.array([[np.nan, np.inf, -np.inf, -0.0], [0.0, 1e-40, 2.5, -0.0]], F)
X = np.array([[0.5, -1.5, 2.0, 0.25], [3.0, -0.75, 1.25, 0.5]], F)
K = np.array([[1, 0, 1, 2], [3, 1, 0, 3]], np.int32)
NONE = np.zeros((0, 3), F)


def window(reducer, init, dimensions, strides, padding, base=None, dilation=None):
    def fun(x):
        start = np.asarray(init, x.dtype)
        return lax.reduce_window(x, start, reducer, dimensions, strides, padding, base, dilation)

    return fun


def reduced(reducer, init, *axes):
    return lambda x: lax.reduce(x, np.asarray(init, x.dtype), reducer, axes)


def times(a, b):
    return a * b


def overwritten(x, updates):
    numbers = lax.ScatterDimensionNumbers((1,), (0,), (0,))
    return lax.scatter(x, np.array([[1], [0], [1]]), updates, numbers)


def looped(**options):
    def fun(x, xs):
        step = lambda c, s: (c * s, (c, s > 0, c.astype(jnp.bfloat16)))
        return lax.scan(step, x, xs, **options)

    return fun


@jax.custom_jvp
def by_rule(x):
    return x * 2.0


by_rule.defjvp(lambda xs, dxs: (by_rule(*xs), 2.0 * dxs[0]))

SQUARE = ((2, 2), (1, 1))
ODD_CASES = {
    "reduce_window, initial value": (window(times, 2.0, *SQUARE, ((1, 1), (0, 2))), X),
    "reduce_window, holes": (window(times, 3.0, *SQUARE, ((1, 0), (1, 1)), (2, 3), (1, 2)), X),
    "reduce_window, cropped": (window(times, 3.0, *SQUARE, ((0, 1), (-1, -1))), X),
    "reduce_window, sum": (window(lax.add, 1.0, *SQUARE, ((1, 1), (0, 2))), X),
    "reduce_window, largest": (window(lax.max, 1.0, *SQUARE, ((3, 1), (0, 2))), X),
    "reduce_window, no windows": (window(times, 2.0, (3, 2), (1, 1), "VALID"), X),
    "reduce_window, nothing but padding": (window(times, 2.0, (1, 2), (1, 1), ((1, 0), (3, 0))), X),
    "reduce_window, not finite": (window(times, 2.0, *SQUARE, "SAME"), ODD),
    "reduce_window_max, not finite": (window(lax.max, -np.inf, *SQUARE, "SAME"), ODD),
    "reduce, initial value": (reduced(times, 3.0, 1), X),
    "reduce, sum": (reduced(lambda a, b: a + b, 3.0, 0, 1), X),
    "reduce, empty": (reduced(times, 3.0, 0), NONE),
    "reduce_prod, not finite": (lambda x: jnp.prod(x, 1), ODD),
    "reduce_prod, empty": (lambda x: jnp.prod(x, 0), NONE),
    "reduce_max, not finite": (lambda x: jnp.max(x, 1), ODD),
    "cumulative": (
        lambda x: [f(x, 1, r) for r in (False, True)
                   for f in (lax.cumsum, lax.cumprod, lax.cummax, lax.cummin, lax.cumlogsumexp)],
        X,
    ),
    "cumulative, not finite": (
        lambda x: [f(x, 1) for f in (lax.cumprod, lax.cummax, lax.cummin, lax.cumlogsumexp)], ODD
    ),
    "cumulative, empty": (lambda x: [lax.cumprod(x, 0), lax.cummax(x, 1, True)], NONE),
    "sort, ties": (lambda x, i: lax.sort((i, x), num_keys=1, is_stable=False), X, K),
    "sort, not finite": (lambda x: [lax.sort(x), *lax.top_k(x, 2)], ODD),
    "scatter, twice": (overwritten, ODD, np.concatenate([-ODD, ODD[:1]])),
    "elementwise, not finite": (
        lambda x: [lax.abs(x), lax.sign(x), jnp.exp2(x), x**3, jnp.logaddexp(x, 1.0),
                   lax.rem(x, F(2)), jnp.maximum(x, 0), jnp.clip(x, -1, 1), jax.nn.relu6(x)],
        ODD,
    ),
    "complex, not finite": (
        lambda x: [lax.abs(x), lax.sign(x), jnp.prod(x, 1), lax.cumprod(x)],
        (X + 1j * X[::-1]).astype(np.complex64),
    ),
    "dot, wider": (
        lambda a, b: [
            lax.dot(a, b, preferred_element_type=F, precision=lax.Precision.HIGHEST),
            lax.dot(a, b, precision=("bfloat16", "bfloat16")),
        ],
        jnp.asarray(X, jnp.bfloat16), jnp.asarray(X.T, jnp.bfloat16),
    ),
    "dot, of integers": (lambda a, b: lax.dot(a, b, preferred_element_type=F), X, K.T),
    "dot, empty": (lambda a: a.T @ a, NONE),
    "convolution": (
        lambda x, w: lax.conv_general_dilated(
            x[None, None], w[None, None], (1, 2), ((1, 0), (-1, 2)), (1, 2), (2, 1),
            preferred_element_type=F),
        jnp.asarray(X, jnp.bfloat16), jnp.asarray(X[:, :2], jnp.bfloat16),
    ),
    "pad, cropped": (lambda x: lax.pad(x, F(7), ((-1, 1, 0), (0, -1, 2))), X),
    "scan": (looped(reverse=True, unroll=2), X[0], X),
    "scan, no steps": (looped(length=0), X[0], X[:0]),
    "while": (
        lambda x: lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] * x), (0, x)), X
    ),
    "while, no steps": (lambda x: lax.while_loop(lambda x: x.sum() < 0, jnp.sin, x), np.abs(X)),
    "cond": (lambda x, i: lax.cond(i[0, 0] > 0, lambda x: (x * 2, i), lambda x: (x, -i), x), X, K),
    "remat": (lambda x: jax.checkpoint(lambda x: (jnp.sin(x), x > 0))(x), X),
    "jit": (lambda x, i: jax.jit(lambda x, i: (x.astype(jnp.bfloat16), i, x * i))(x, i), X, K),
    "custom_jvp": (by_rule, 2.0),
    "Python number": (
        lambda x, y: [x, x * 2, x * y, x + 1j, jnp.sin(x), jnp.where(x > 0, x, 1)], 2.0, X
    ),
    "Python numbers": (lambda x, y, on: [x**2, x * y, y, jnp.where(on, x, y)], 1.5, 3, True),
    "NumPy numbers": (lambda x, y: [x * y, x + 1.0, y * 2], F(1.5), np.int32(3)),
    "NumPy float16": (lambda x, y: [x * y.astype(x.dtype), y * 1.5], np.float16(1.5), X),
    "weak and strong": (lambda x: [lax.mul(x, x), x * F(2), x + np.arange(3)], 2.0),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD_CASES)
def test_odd(name: str) -> None:
    f, *xs = ODD_CASES[name]
    check(f, tuple(xs), eager, staged)
