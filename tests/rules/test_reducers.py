"""Derivatives of reductions by a user's function: right for any order, or as in JAX, or refused."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import xform
from tests.fuzz import folded
from xform.errors import NotDifferentiable
from xform.program.ir import program
from xform.rules.reducers import any_order

pytestmark = pytest.mark.usefixtures("x64")
where = jnp.where


def merged(a: Any, b: Any) -> Any:
    """Merge the counts, means and sums of squares of two samples."""
    n, d = a[0] + b[0], b[1] - a[1]
    return n, a[1] + d * b[0] / n, a[2] + b[2] + d * d * a[0] * b[0] / n


def online_softmax(a: Any, b: Any) -> Any:
    top = lax.max(a[0], b[0])
    return top, a[1] * jnp.exp(a[0] - top) + b[1] * jnp.exp(b[0] - top)


def largest(a: Any, b: Any) -> Any:
    """Return the larger key and its value; at a tie the smaller value."""
    by_key = (a[0] > b[0]) | (a[0] != a[0])
    return where(by_key, a[0], b[0]), where(by_key | ((a[0] == b[0]) & (a[1] < b[1])), a[1], b[1])


def product(a: Any, b: Any) -> Any:
    """Multiply complex numbers that are given as pairs."""
    return a[0] * b[0] - a[1] * b[1], a[0] * b[1] + a[1] * b[0]


@jax.custom_jvp
def difference(a: Any, b: Any) -> Any:
    """Subtract by a function with a rule of its own, as `logaddexp` is."""
    return a - b


difference.defjvp(lambda xs, dxs: (xs[0] - xs[1], dxs[0] - dxs[1]))

# By name: the number of operands, and the reducer.
ANY_ORDER: dict[str, tuple[int, Callable[..., Any]]] = {
    "add": (1, lax.add),
    "twice the product": (1, lambda a, b: 2 * a * b),
    "max": (1, lax.max),
    "where": (1, lambda a, b: where(a < b, a, b)),
    "a + b + ab": (1, lambda a, b: a + b + 0.3 * a * b),
    "velocities": (1, lambda a, b: (a + b) / (1 + a * b)),
    "parallel": (1, lambda a, b: a * b / (a + b)),
    "hypot": (1, lambda a, b: jnp.sqrt(a**2 + b**2)),
    "log of a sum": (1, lambda a, b: jnp.log(jnp.exp(a) + jnp.exp(b))),
    "logaddexp": (1, jnp.logaddexp),
    "sum and product": (2, lambda a, b: (a[0] + b[0], a[1] * b[1])),
    "complex product": (2, product),
    "largest": (2, largest),
    "online softmax": (2, online_softmax),
    "merged": (3, merged),
}
OTHER: dict[str, tuple[int, Callable[..., Any]]] = {
    "a + 2b": (1, lambda a, b: a + 2 * b),
    "sub": (1, lax.sub),
    "mean": (1, lambda a, b: (a + b) / 2),
    "left": (1, lambda a, b: a),
    "pow": (1, lax.pow),
    "a rounded sum": (1, lambda a, b: jnp.floor(a + b)),
    "by size": (1, lambda a, b: where(abs(a) > abs(b), a, b)),
    "compared with a constant": (1, lambda a, b: where(a > 100, a - b, a + b)),
    "a compared sum": (1, lambda a, b: where(a + b > 100, a - b, a + b)),
    "affine maps": (2, lambda a, b: (a[0] * b[0], a[0] * b[1] + a[1])),
    "a rule of its own": (1, difference),
    "crossed": (2, lambda a, b: (a[1] + b[0], a[0] + b[1])),
}


def recognized(n: int, f: Callable[..., Any], dtype: Any) -> bool:
    flat = lambda *ab: f(ab[:n], ab[n:]) if n > 1 else f(*ab)
    scalars = [jax.ShapeDtypeStruct((), dtype)] * (2 * n)
    return any_order(program(jax.make_jaxpr(flat)(*scalars)))


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_reducers_are_recognized_only_if_the_order_does_not_matter(dtype: str) -> None:
    assert {name: recognized(*f, dtype) for name, f in ANY_ORDER.items()} == dict.fromkeys(
        ANY_ORDER, True
    )
    assert {name: recognized(*f, dtype) for name, f in OTHER.items()} == dict.fromkeys(OTHER, False)
    assert recognized(1, lax.mul, "complex64")
    assert not recognized(1, lax.sub, "complex64")


X = np.random.default_rng(3).uniform(0.2, 0.9, (3, 4, 5))
STARTS = 0.4, 0.7, 0.3


@pytest.mark.parametrize("name", ["logaddexp", "velocities", "online softmax", "merged"])
def test_derivatives_of_recognized_reducers_are_those_of_a_loop(name: str) -> None:
    n, f = ANY_ORDER[name]

    def reduced(xs: Any, starts: Any) -> Any:
        one = n == 1
        rows, window = lax.reduce, lax.reduce_window
        args = (xs[0], starts[0]) if one else (xs, starts)
        return rows(*args, f, (0,)), window(*args, f, (2, 2), (1, 2), "VALID")

    def loop(xs: Any, starts: Any) -> Any:
        one = lambda x: x[0] if n == 1 else tuple(x)
        fold = lambda start, rows: functools.reduce(f, rows, start)
        rows = [one([x[i] for x in xs]) for i in range(4)]
        spread = [jnp.full(5, s) for s in starts]
        places = [one([x[i : i + 3, j : j + 4 : 2] for x in xs]) for i in (0, 1) for j in (0, 1)]
        return (fold(one(spread), rows),
                fold(one([jnp.full((3, 2), s) for s in starts]), places))  # fmt: skip

    xs, starts = tuple(map(jnp.asarray, X[:n])), tuple(map(jnp.asarray, STARTS[:n]))
    y, pull = xform.vjp(jax.jit(reduced), xs, starts)
    want, pull_loop = jax.vjp(jax.jit(loop), xs, starts)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-10), y, want)
    ct = jax.tree.map(jnp.cos, y)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-9), pull(ct), pull_loop(ct))


WINDOWS: dict[str, Any] = {
    "plain": ((2, 3), (1, 1), "VALID"),
    "elements": ((1, 1), (1, 1), "VALID"),
    "strides": ((2, 1), (2, 2), ((1, 0), (0, 1))),
    "dilations": ((2, 2), (1, 1), ((0, 1), (2, 0)), (2, 1), (1, 2)),
}


@pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS)
def test_forward_derivatives_of_windows_follow_the_order_of_xla(windows: Any) -> None:
    """By JAX, whose rule also combines pairs of values and tangents."""

    def f(x: Any, count: bool = True) -> Any:
        """Reduce `x` alone, and with its square; `count` also counts (JAX's rule fails then)."""
        one = lax.reduce_window(x, 0.5, lambda a, b: jnp.sin(a) + 2 * b, *windows)
        g = lambda a, b: (a[0] - 2 * b[0] * a[1], *map(lax.add, a[1:], b[1:]))
        more, zero = ((lax.full(x.shape, 1),), (0,)) if count else ((), ())
        two = lax.reduce_window((x, x * x, *more), (1.0, 0.5, *zero), g, *windows)
        return one * 2, two[:2]

    x, dx = jnp.asarray(X[0]), jnp.asarray(X[1])
    of_jax = lambda x: f(x, False)
    same = functools.partial(
        jax.tree.map, functools.partial(np.testing.assert_allclose, rtol=1e-12)
    )
    want = jax.jvp(of_jax, (x,), (dx,))
    same(xform.jvp(f, (x,), (dx,)), want)
    same(jax.jit(lambda x, dx: xform.jvp(f, (x,), (dx,)))(x, dx), want)
    same(jax.jit(lambda x, dx: xform.linearize(f, x)[1](dx))(x, dx), want[1])
    y, push = xform.linearize(f, x)
    same((y, push(dx)), want)
    batched = jax.vmap(lambda x, dx: xform.jvp(f, (x,), (dx,)))
    same(batched(X[:2], X[1:]), jax.vmap(lambda x, dx: jax.jvp(of_jax, (x,), (dx,)))(X[:2], X[1:]))
    for transform in (xform.grad, lambda f: jax.jit(xform.grad(f))):
        with pytest.raises(NotDifferentiable, match="does not recognize the reducer"):
            transform(lambda x: jnp.sum(f(x)[0]))(x)


def test_second_derivatives_of_windows_are_those_of_a_loop() -> None:
    f = lambda reduce_window: (
        lambda x: reduce_window(
            x, 0.5, lambda a, b: jnp.sin(a) + 2 * b * a, (2, 2), (1, 1), ((1, 0), (0, 0))
        )
    )
    x = X[0, :2, :3]
    found = xform.jacfwd(xform.jacfwd(f(lax.reduce_window)))(x)
    want = jax.jit(jax.jacfwd(jax.jacfwd(f(folded.reduce_window))))(x)
    np.testing.assert_allclose(found, want, rtol=1e-10)


def test_the_derivative_with_respect_to_an_initial_value() -> None:
    f = lambda start: lax.reduce_window(X[0], start, lambda a, b: a * 0.5 - b, *WINDOWS["plain"])
    at, step = jnp.asarray(0.7), 0.25
    _, dy = xform.jvp(f, (at,), (jnp.asarray(1.0),))
    np.testing.assert_allclose(dy, (f(at + step) - f(at - step)) / (2 * step), rtol=1e-10)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: lax.reduce(x, 0.0, lambda a, b: a + 2 * b, (0,)),
        lambda x: lax.reduce((x, x), (0.0, 1.0), lambda a, b: (a[0] - b[0], a[1] * b[1]), (0, 1)),
        lambda x: lax.reduce_window(x, 0.0, lax.sub, x.shape, (1, 1), "VALID"),
        lambda x: lax.reduce_window(x, 0.0, lax.sub, (1, x.shape[1]), (2, 1), "VALID"),
    ],
    ids=["reduce", "two", "window", "rows"],
)
def test_derivatives_of_order_dependent_reducers_raise(f: Callable[..., Any]) -> None:
    loss = lambda x: sum(map(jnp.sum, jax.tree.leaves(f(x))))
    x = jnp.asarray(X[0])
    for derivative in (
        lambda: xform.jvp(loss, (x,), (x,)),
        lambda: xform.grad(loss)(x),
        lambda: jax.jit(xform.grad(loss))(x),
        lambda: xform.linearize(loss, x),
    ):
        with pytest.raises(NotDifferentiable, match=r"jax\.lax\.scan"):
            derivative()
