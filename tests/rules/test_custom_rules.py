"""Rules of the user's own: `custom_jvp`, `custom_vjp`, roots and linear solves."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import xform
from tests.reference import close, grads_agree
from tests.rules.programs import KEY, POLICIES, X, bend, bowl, loop

pytestmark = pytest.mark.usefixtures("x64")


def test_custom_rules_are_the_ones_that_run() -> None:
    @jax.custom_vjp
    def wrong(x):
        return x * x

    wrong.defvjp(lambda x: (x * x, None), lambda res, ct: (100.0 * ct,))

    @jax.custom_jvp
    def off(x):
        return x * x

    off.defjvps(lambda dx, y, x: 50.0 * dx)
    assert xform.grad(wrong)(1.0) == 100.0
    assert xform.grad(off)(1.0) == xform.jvp(off, (1.0,), (1.0,))[1] == 50.0


def test_custom_vjp_with_integer_and_none_cotangents() -> None:
    @jax.custom_vjp
    def f(x, n, tree):
        return x * n + tree["a"]

    f.defvjp(lambda x, n, tree: (f(x, n, tree), n), lambda n, ct: (ct * n, None, {"a": ct}))
    grads_agree(lambda x: jnp.sum(f(bend(x), 3, {"a": x})), X)
    grads_agree(lambda x: jnp.sum(f(bend(x), jnp.arange(3), {"a": x})), X)


def test_custom_vjp_residuals_that_are_integers_keys_and_inputs() -> None:
    @jax.custom_vjp
    def drop(x, key):
        return x * jax.random.bernoulli(key, 0.5, x.shape)

    drop.defvjp(
        lambda x, key: (drop(x, key), (key, x, jnp.arange(3))),
        lambda res, ct: (ct * jax.random.bernoulli(res[0], 0.5, ct.shape) * res[2], None),
    )
    f = lambda x: loop(lambda c, k: (drop(bend(c) * x, k), None), x, jax.random.split(KEY, 3))
    grads_agree(f, X, policies=POLICIES)


def test_custom_jvp_with_a_loop_in_its_rule() -> None:
    @jax.custom_jvp
    def f(x, y):
        return x * y

    @f.defjvp
    def _(primals, tangents):
        (x, y), (dx, dy) = primals, tangents
        return f(x, y), lax.scan(lambda c, _: (bend(x) * c + dy, None), dx, None, length=3)[0]

    grads_agree(lambda x: jnp.sum(f(x, bowl(x))), X, policies=POLICIES)


def test_custom_jvp_with_symbolic_zeros() -> None:
    seen = []

    @jax.custom_jvp
    def f(x, y):
        return x * y

    @functools.partial(f.defjvp, symbolic_zeros=True)
    def _(primals, tangents):
        (x, y), (dx, dy) = primals, tangents
        zero = [isinstance(t, jax.custom_derivatives.SymbolicZero) for t in tangents]
        seen.append(zero)
        return f(x, y), (0.0 if zero[0] else dx * y) + (0.0 if zero[1] else x * dy)

    close(xform.grad(lambda x: jnp.sum(f(x * x, X)))(X), 2 * X * X)
    assert seen[-1] == [False, True]


def test_custom_root_and_custom_linear_solve() -> None:
    def root(x):
        return lax.custom_root(
            lambda y: y**3 - x,
            x,
            lambda f, y: lax.fori_loop(0, 30, lambda _, y: y - f(y) / (3 * y**2 + 1e-9), y),
            lambda g, y: y / g(1.0),
        )

    grads_agree(root, 0.7)

    def solve(x, b):
        a = jnp.diag(3.0 + x) + jnp.outer(x, bowl(x)) / 5
        return lax.custom_linear_solve(
            lambda v: a @ v,
            b,
            solve=lambda _, b: jnp.linalg.inv(lax.stop_gradient(a)) @ b,
            transpose_solve=lambda _, b: jnp.linalg.inv(lax.stop_gradient(a)).T @ b,
        )

    grads_agree(lambda x, b: jnp.sum(solve(x, bend(b)) ** 2), X, X + 1, argnums=(0, 1))
    close(
        jax.jit(xform.hessian(lambda x: jnp.sum(solve(x, X) ** 2)))(X),
        jax.jit(jax.hessian(lambda x: jnp.sum(solve(x, X) ** 2)))(X),
    )


SHORT = ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]


@pytest.mark.parametrize("dtype", SHORT)
def test_a_custom_vjp_of_a_short_float_returns_any_float(dtype: str) -> None:
    for cotangent in [*SHORT, "float32"]:
        double = jax.custom_vjp(lambda x: x * 2)
        double.defvjp(lambda x: (x * 2, None), lambda _, ct, to=cotangent: ((ct * 2).astype(to),))
        f, x = lambda x, f=double: jnp.sum(f(x).astype("float32")), jnp.ones(2, dtype)
        close(xform.grad(f)(x), jax.grad(f)(x))


PLACES = np.array([2, 0, 3, 0])
# Functions that move values, or multiply them by 0 or 1.
MOVE = {
    "gather": lambda x: x[PLACES],
    "sort": lambda x: lax.sort(x),
    "top_k": lambda x: lax.top_k(x, 2)[0],
    "dynamic_slice": lambda x: lax.dynamic_slice(x, (1,), (2,)),
    "dynamic_update_slice": lambda x: lax.dynamic_update_slice(x, x[:2], (1,)),
    "clamp": lambda x: lax.clamp(jnp.asarray(2, x.dtype), x, jnp.asarray(3.5, x.dtype)),
    "integer_pow": lambda x: lax.integer_pow(x, 1),
    "pad": lambda x: lax.pad(lax.rev(x, (0,)), jnp.zeros((), x.dtype), [(1, 0, 1)]),
    "reduce_window_max": lambda x: lax.reduce_window(x, -np.inf, lax.max, (2,), (1,), "VALID"),
}
PAIRS = [("float8_e4m3fn", "bfloat16"), ("float8_e5m2", "float32"), ("bfloat16", "float32")]


@pytest.mark.parametrize("name", MOVE)
def test_a_cotangent_of_another_dtype_moves_like_the_value(name: str) -> None:
    """JAX's tests have this for a gather; the values are those of JAX in float32."""
    f = MOVE[name]
    for dtype, wide in PAIRS:
        x = jnp.asarray([3, 1, 4, 2], dtype)
        weights = 1 + jnp.arange(f(x).size, dtype=wide) / 128  # too fine for `dtype`
        widen = jax.custom_vjp(lambda x: x)
        widen.defvjp(lambda x: (x, None), lambda _, ct, weights=weights: (weights,))
        y, pull = xform.vjp(lambda x, widen=widen: widen(f(x)), x)
        (found,) = pull(y)
        (want,) = jax.vjp(f, x.astype("float32"))[1](weights.astype("float32"))
        assert found.dtype == wide
        np.testing.assert_allclose(found.astype("float32"), want, rtol=0.004)


def test_a_custom_vjp_may_index_a_constant_by_a_traced_value() -> None:
    @jax.custom_vjp
    def first(x, table):
        return x * table[0]

    def back(table, ct):
        total = lax.fori_loop(0, len(X), lambda i, s: s + table[i], 0.0)
        return total * ct, None

    first.defvjp(lambda x, table: (first(x, table), table), back)
    f = jax.jit(lambda x: first(x, X))
    close(xform.grad(lambda x: first(x, X))(2.0), jax.grad(f)(2.0))
    close(xform.grad(f)(2.0), jax.grad(f)(2.0))
    close(jax.vmap(xform.value_and_grad(f))(X), jax.vmap(jax.value_and_grad(f))(X))


@jax.custom_jvp
def signed(x, k):
    return lax.select(k > 0, x, -x)


signed.defjvp(lambda ps, ts: (signed(*ps), lax.select(ps[1] > 0, ts[0], -ts[0])))

TRUTHS = {
    "select": lambda x: lax.select(True, x, x * 2),
    "select of a constant": lambda x: lax.select_n(False, 1.0, x),
    "a rule that compares numbers": lambda x: signed(x, 1.0) * x,
}


@pytest.mark.parametrize("name", TRUTHS)
def test_python_truth_values_are_literals(name: str) -> None:
    f = TRUTHS[name]
    for way in (lambda f: f, jax.jit, jax.checkpoint, jax.vmap):
        x = X if way is jax.vmap else 2.0
        close(way(xform.grad(f))(x), way(jax.grad(f))(x))
        close(xform.jvp(way(f), (x,), (x,)), jax.jvp(way(f), (x,), (x,)))


@jax.custom_jvp
def _held(x):
    return x


def _held_rule(xs, dxs):
    if not isinstance(dxs[0], jax.custom_derivatives.SymbolicZero):
        raise RuntimeError("it moves")
    return xs[0], dxs[0]


_held.defjvp(_held_rule, symbolic_zeros=True)


@jax.custom_jvp
def _both(x, y):
    return x, y


_both.defjvp(lambda xs, dxs: (tuple(xs), tuple(dxs)), symbolic_zeros=True)


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("way", ["plain", "jit", "scan"])
def test_symbolic_zeros_returned_by_a_custom_jvp_stay_symbolic(way: str, jitted: bool) -> None:
    def f(x):
        a, b = _both(x, lax.stop_gradient(x))
        return a * _held(b)

    ways = {"plain": f, "jit": jax.jit(f)}
    ways["scan"] = lambda x: lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0]
    g = xform.grad(ways[way])
    np.testing.assert_allclose((jax.jit(g) if jitted else g)(2.0), jax.grad(ways[way])(2.0))
    with pytest.raises(RuntimeError, match="it moves"):
        xform.grad(lambda x: _held(ways[way](x)))(2.0)
