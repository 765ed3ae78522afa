"""Patterns of whole programs: never smaller than the true one, and as small as expected."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import xform
from xform.errors import NotDifferentiable, NotScalar, WrongArgument

N = 6
X = jnp.cos(jnp.arange(1.0, N + 1))
BAND = np.tri(N, k=1, dtype=bool) & ~np.tri(N, k=-2, dtype=bool)


@jax.custom_vjp
def rounded(x):
    """A straight-through function: its derivative is that of the identity."""
    return jnp.round(x)


rounded.defvjp(lambda x: (jnp.round(x), None), lambda _, ct: (ct,))


@jax.custom_jvp
def shifted(x):
    return x


shifted.defjvp(lambda xs, dxs: (xs[0], jnp.roll(dxs[0], 1)))
WEIGHTS = np.where(BAND, 2.0, 0.0)
ROWS = np.array([3, 0, 0, 5])


def steps(x):
    return lax.fori_loop(0, 3, lambda i, y: y.at[i].set(y[i + 1] * y[i]), x)


def until(x):
    """A loop whose number of steps is not known in advance."""
    return lax.while_loop(lambda y: jnp.sum(y) < 3, lambda y: y.at[1].set(y[0] + y[1]), x)


def stacked(x):
    return lax.scan(lambda c, v: (c + v, jnp.sin(c)), 0.0, x)[1]


EYE = np.eye(N, dtype=bool)
LOWER = np.tri(N, dtype=bool)
BELOW, ABOVE = np.eye(N, k=-1, dtype=bool), np.eye(N, k=1, dtype=bool)
FIRST = np.arange(N) == 0
# A function, and its pattern.
EXACT = {
    "a band": (lambda x: x.at[1:].add(x[:-1] ** 2), EYE | BELOW),
    "a matrix with zeros": (lambda x: WEIGHTS @ x, BAND),
    "its transpose": (lambda x: x @ WEIGHTS, BAND.T),
    "a kernel with zeros": (
        lambda x: jnp.convolve(x, jnp.array([1.0, 0.0, 1.0]), mode="same"),
        np.eye(N, k=1, dtype=bool) | np.eye(N, k=-1, dtype=bool)),
    "rows that are known": (lambda x: x[ROWS], EYE[ROWS]),
    "rows of a mask": (lambda x: jnp.where(np.arange(N) < 2, x, x[::-1]),
                       np.where(np.arange(N)[:, None] < 2, EYE, EYE[::-1])),
    "times zero": (lambda x: x * (np.arange(N) % 2), EYE * (np.arange(N) % 2).astype(bool)),
    "a softmax": (jax.nn.softmax, np.ones((N, N), bool)),
    "a cut": (lambda x: x + lax.stop_gradient(x[::-1]), EYE),
    "integers": (lambda x: x + jnp.argsort(x), EYE),
    "a sum of all before": (jnp.cumsum, LOWER),
    "a map": (lambda x: lax.map(lambda v: v**2, x), EYE),
    "a scan": (stacked, LOWER & ~EYE),
    "a branch": (lambda x: lax.cond(x[0] > 0, lambda x: x, lambda x: x[::-1], x), EYE | EYE[::-1]),
    "steps": (steps, EYE | ABOVE & (np.arange(N) < 3)[:, None]),
    "steps of a number that is not known": (until, EYE | BELOW & FIRST),
    "a custom vjp": (rounded, EYE),
    "a custom jvp": (shifted, np.roll(EYE, 1, 0)),
    "a region": (jax.checkpoint(lambda x: checkpoint_name(jnp.sin(x), "y")[::-1]), EYE[::-1]),
    "a call": (jax.jit(lambda x: jax.nn.relu(x)), EYE),
    "blocks of a transform": (lambda x: jnp.abs(jnp.fft.fft(x.reshape(2, 3))).ravel(),
                              np.kron(np.eye(2), np.ones((3, 3))).astype(bool)),
    "blocks of a factorization": (
        lambda x: jnp.linalg.cholesky(x[:2, None, None] * np.eye(2) + 3 * np.eye(2))[:, 1, 1],
        EYE[:2]),
}  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_the_pattern_is(name: str) -> None:
    f, expected = EXACT[name]
    pattern = xform.sparse.sparsity(f, X)
    np.testing.assert_array_equal(pattern.todense(), expected)
    np.testing.assert_array_equal(
        jax.jit(lambda x: xform.sparse.sparsity(f, x).todense() + 0 * x[0])(X) > 0, expected
    )


@pytest.mark.usefixtures("x64")
def test_a_product_with_a_known_array_under_strict_dtypes() -> None:
    weights = jnp.asarray(WEIGHTS)
    with jax.numpy_dtype_promotion("strict"):
        pattern = xform.sparse.sparsity(lambda x, w: x @ w, np.ones(N), weights, at_point=True)
    np.testing.assert_array_equal(pattern.todense(), BAND.T)


def test_rows_that_are_not_known_may_be_any() -> None:
    f = lambda x, i: x.reshape(2, 3)[:, i]
    pattern = xform.sparse.sparsity(f, X, jnp.array([2, 0]))
    np.testing.assert_array_equal(pattern.todense(), np.kron(np.eye(2), np.ones((2, 3))))
    here = xform.sparse.sparsity(f, X, jnp.array([2, 0]), at_point=True)
    np.testing.assert_array_equal(here.cols, [2, 0, 5, 3])


def test_a_point_decides_branches_factors_and_steps() -> None:
    f = lambda x: lax.cond(x[0] > 0, lambda x: x, lambda x: x[::-1], x) * x[1]
    at = X.at[1].set(0.0)
    expected = np.zeros((N, N), bool)
    expected[[0, 2, 3, 4, 5], 1] = True  # a product with zero depends only on the factor
    np.testing.assert_array_equal(xform.sparse.sparsity(f, at, at_point=True).todense(), expected)
    assert xform.sparse.sparsity(until, X + 3, at_point=True).nonzeros == N  # no step runs


def test_other_arguments_count_as_any_values() -> None:
    f = lambda x, m: x * m
    assert xform.sparse.sparsity(f, X, jnp.zeros(N)).nonzeros == N
    assert xform.sparse.sparsity(f, X, jnp.zeros(N), at_point=True).nonzeros == 0
    assert xform.sparse.sparsity(f, X, jnp.zeros(N), argnums=(0, 1)).shape == (N, 2 * N)


def test_trees_scalars_integers_and_nothing() -> None:
    f = lambda t: {"a": t["x"][::-1] * t["s"], "b": t["i"] + 1, "c": jnp.zeros((0, 3)), "d": t["s"]}
    tree = {"x": X, "s": 2.0, "i": np.arange(2), "e": jnp.zeros(0)}
    pattern = xform.sparse.sparsity(f, tree)
    assert pattern.shape == (N + 2 + 1, N + 2 + 1)
    expected = np.zeros(pattern.shape, bool)  # e, i, s, x
    expected[:N, 3:], expected[:N, 2], expected[-1, 2] = EYE[::-1], True, True
    np.testing.assert_array_equal(pattern.todense(), expected)
    assert xform.sparse.sparsity(lambda x: x, jnp.zeros(0)).shape == (0, 0)
    assert xform.sparse.sparsity(lambda x: 3.0, X).nonzeros == 0


HESSIANS = {
    "products": (lambda x: jnp.sum(x[1:] * x[:-1]), np.eye(N, k=1) + np.eye(N, k=-1)),
    "sum": (lambda x: jnp.sum(x), np.zeros((N, N))),
    "squares": (lambda x: jnp.sum(x**2), np.eye(N)),
    "kinks": (lambda x: jnp.sum(jnp.abs(x) + jnp.maximum(x, 0.5)), np.zeros((N, N))),
    "quotient": (lambda x: x[0] / x[1] + x[2], np.pad([[0, 1], [1, 1]], (0, N - 2))),
    "norm": (lambda x: jnp.sqrt(x @ x), np.ones((N, N))),
    "scan": (lambda x: jnp.sum(lax.map(jnp.sin, x)), np.eye(N)),
}


@pytest.mark.parametrize("name", HESSIANS)
def test_the_pattern_of_a_hessian_is(name: str) -> None:
    f, expected = HESSIANS[name]
    np.testing.assert_array_equal(xform.sparse.sparsity(f, X, of="hessian").todense(), expected)


def test_long_loops_are_followed_to_a_fixed_point() -> None:
    f = lambda x: lax.scan(lambda c, _: (c.at[1].add(jnp.sin(c[0])), None), x, None, 10**6)[0]
    expected = EYE.copy()
    expected[1, 0] = True
    np.testing.assert_array_equal(xform.sparse.sparsity(f, X).todense(), expected)
    g = lambda x: lax.scan(lambda c, _: (jnp.roll(c, 1), None), jnp.tile(x, 20), None, 10**6)[0]
    assert xform.sparse.sparsity(g, X).nonzeros == 20 * N * N


def test_a_large_pattern_is_cheap() -> None:
    n = 100_000
    pattern = xform.sparse.sparsity(
        lambda x: x[1:] * x[:-1] + jnp.mean(x[:2]), jax.ShapeDtypeStruct((n,), "float32")
    )
    assert pattern.shape == (n - 1, n)
    assert pattern.col_counts.tolist()[:4] == [n - 1, n - 1, 2, 2]


def test_a_pattern_prints_plots_and_converts(tmp_path) -> None:
    pattern = xform.sparse.sparsity(lambda x: x[1:] * x[:-1], X)
    assert str(pattern).splitlines()[1:3] == ["  # # . . . .", "  . # # . . ."]
    assert len(str(xform.sparse.sparsity(lambda x: x, jnp.ones(500))).splitlines()) == 25
    np.testing.assert_array_equal(pattern.scipy().todense(), pattern.todense())
    assert pattern.contains(pattern.todense())
    assert not pattern.contains(np.ones(pattern.shape))
    prepared = xform.sparse.jacobian(lambda x: x[1:] * x[:-1]).prepare(X)
    pattern.plot(tmp_path / "pattern.png", coloring=prepared.coloring)
    assert (tmp_path / "pattern.png").stat().st_size > 1000


def test_nonscalar_hessians_bad_options_effects_and_huge_patterns_raise() -> None:
    with pytest.raises(NotScalar):
        xform.sparse.sparsity(lambda x: x, X, of="hessian")
    with pytest.raises(WrongArgument, match="neither 'jacobian' nor 'hessian'"):
        xform.sparse.sparsity(lambda x: x, X, of="gradient")  # pyright: ignore[reportArgumentType]
    with pytest.raises(WrongArgument, match="names no argument"):
        xform.sparse.sparsity(lambda x: x, X, argnums=())
    with pytest.raises(NotDifferentiable, match=r"has side effects(.|\n)*test_sparsity"):
        xform.sparse.sparsity(lambda x: (jax.debug.print("{}", x), x)[1], X)
    with pytest.raises(WrongArgument, match=r"may be nonzero(.|\n)*xform.jvp"):
        xform.sparse.sparsity(jax.nn.softmax, jax.ShapeDtypeStruct((100_000,), "float32"))
