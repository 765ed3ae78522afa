"""Derivatives of values of every type: weakly typed, integer, complex, short, empty, NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.scipy import special, stats

import xform
from tests.reference import close, grads_agree
from xform.program.arithmetic import is_number

X = np.array([0.3, -0.7, 1.1], np.float32)
F0 = jax.dtypes.float0


WEAK = {
    "float": (lambda x: x * x, 3.0),
    "strong": (lambda x: x * x, np.float32(3.0)),
    "asarray": (lambda x: x * x, jnp.asarray(3.0)),
    "array times float": (lambda x: jnp.sum(x * 2.0), X),
    "weak output of strong input": (lambda x: jnp.where(x > 0, 1.0, 2.0) * 1.0, np.float32(3.0)),
    "through float32": (lambda x: x * jnp.float32(2.0), 3.0),
    "constant": (lambda x: 1.0, 3.0),
    "input": (lambda x: x, 3.0),
    "scan": (lambda x: lax.scan(lambda c, _: (c * 2.0, None), x, None, length=2)[0], 3.0),
    "cond": (lambda x: lax.cond(True, lambda x: x, lambda x: -x, x), 3.0),
    "jit": (jax.jit(lambda x: x * x), 3.0),
    "gather": (lambda x: jnp.take(x, 0), 3.0),
    "remat": (jax.checkpoint(lambda x: x * x), 3.0),
    "bfloat16": (lambda x: x * 2.0, jnp.bfloat16(3)),
    "dot": (lambda x: jnp.dot(x, 2.0), 3.0),
    "power": (lambda x: x**2.5, 3.0),
    "clamp": (lambda x: lax.clamp(0.0, x, 5.0), 3.0),
    "clamp, strong bound": (lambda x: lax.clamp(0.0, x, np.float32(5)), 3.0),
    "choice beside a strong case": (lambda x: lax.select(x > 0, x, np.float32(2)), 3.0),
    "literals": (jax.jit(lambda x: lax.igamma(0.4, x) + lax.betainc(1.2, 0.7, x)), 0.3),
    "strong tangent of a weak value, in a jit": (lambda x: special.rel_entr(x, 0.7), 0.4),
    "logpmf": (lambda x: stats.poisson.logpmf(2, x), 1.7),
}


@pytest.mark.parametrize("name", WEAK)
def test_weak_types_are_those_of_jax(name: str) -> None:
    f, x = WEAK[name]

    def derivatives(t, x):
        y, g = t.value_and_grad(f)(x)
        y2, pull = t.vjp(f, x)
        y3, dy = t.jvp(f, (x,), (jnp.ones_like(x),))
        y4, push = t.linearize(f, x)
        return y, g, y2, pull(jnp.ones_like(y2))[0], y3, dy, y4, push(jnp.ones_like(x))

    kinds = lambda avals: [(a.str_short(), a.weak_type) for a in avals]
    eager = lambda t: kinds(map(jax.typeof, derivatives(t, x)))
    staged = lambda t: kinds(jax.make_jaxpr(lambda x: derivatives(t, x))(x).out_avals)
    assert eager(xform) == eager(jax)
    assert staged(xform) == staged(jax)


# Beside an inactive value a tangent has the weak type of its own primal.
choice = lambda on, x: lax.select(on, x, np.float32(2))
BESIDE = {
    "scan": lambda x: lax.scan(lambda c, i: (choice(i > 0, x), c * x), np.float32(1), np.arange(3)),
    "fori": lambda x: lax.fori_loop(0, 3, lambda i, c: choice(i > 0, x) + 0 * c, np.float32(1)),
    "cond": lambda x: lax.cond(x > 0, lambda x: choice(x > 1, x), lambda x: np.float32(2) * x, x),
    "remat": jax.checkpoint(lambda x: choice(x > 1, x)),
    "jit": jax.jit(lambda x: choice(x > 1, x)),
}


@pytest.mark.parametrize("way", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("name", BESIDE)
def test_weakly_typed_tangents_of_strong_values_pass_through_regions(name: str, way) -> None:
    f = BESIDE[name]
    loss = lambda x: sum(map(jnp.sum, jax.tree.leaves(f(x))))
    for g in (lambda t, x: t.jvp(f, (x,), (1.0,)), lambda t, x: t.grad(loss)(x),
              lambda t, x: t.linearize(f, x)[1](1.0), lambda t, x: t.hessian(loss)(x)):  # fmt: skip
        own, theirs = (way(lambda x, g=g, t=t: g(t, x))(3.0) for t in (xform, jax))
        close(own, theirs, 1e-6)


def test_integers_get_float0() -> None:
    f = lambda x, n, flag: jnp.sum(x * n) * flag
    args = (X, np.arange(3), True)
    got = xform.grad(f, (0, 1, 2), allow_int=True)(*args)
    close(got, jax.grad(f, (0, 1, 2), allow_int=True)(*args), 1e-6)
    assert got[1].dtype == F0
    assert got[1].shape == (3,)
    got = jax.jit(xform.grad(f, (0, 1), allow_int=True))(*args)
    close(got, jax.jit(jax.grad(f, (0, 1), allow_int=True))(*args), 1e-6)


def test_vjp_of_integer_inputs_and_outputs() -> None:
    f = lambda x, n: (jnp.sin(x) * n, n + 1, x > 0)
    n = np.arange(3)
    (y, pull), (want, jax_pull) = (t.vjp(f, X, n) for t in (xform, jax))
    close(y, want, 1e-6)
    cts = (X, np.zeros(3, F0), np.zeros(3, F0))
    close(pull(cts), jax_pull(cts), 1e-6)


def test_keys_as_inputs() -> None:
    key = jax.random.key(0)
    f = lambda x, k: jnp.sum(x * jax.random.normal(k, x.shape))
    close(xform.grad(f)(X, key), jax.grad(f)(X, key), 1e-6)
    got, want = (t.vjp(f, X, key)[1](1.0) for t in (xform, jax))
    close(got, want, 1e-6)
    close(
        xform.grad(f, (0, 1), allow_int=True)(X, key),
        jax.grad(f, (0, 1), allow_int=True)(X, key),
        1e-6,
    )


@pytest.mark.usefixtures("x64")
def test_complex_numbers() -> None:
    z = np.asarray(X + 1j * X[::-1], np.complex128)
    real = lambda z: jnp.sum(jnp.abs(z) ** 2 + jnp.real(z * z * jnp.conj(z)) + jnp.imag(jnp.exp(z)))
    grads_agree(real, z, ways=("alone", "jit"))
    holomorphic = lambda z: jnp.sum(z**3 + jnp.sin(z) * z)
    close(xform.grad(holomorphic, holomorphic=True)(z), jax.grad(holomorphic, holomorphic=True)(z))
    f = lambda x, z: jnp.exp(x * z) * jnp.conj(z)
    (y, pull), (want, jax_pull) = (t.vjp(f, X.astype(np.float64), z) for t in (xform, jax))
    close(y, want)
    close(pull(1j * z), jax_pull(1j * z))


def test_bfloat16_and_float16() -> None:
    f = lambda x: jnp.sum(jnp.sin(x) * x)
    for dtype in (jnp.bfloat16, jnp.float16):
        x = X.astype(dtype)
        close(xform.grad(f)(x), jax.grad(f)(x), 1e-2)


def test_mixed_precision() -> None:
    def f(w, x):
        y = jnp.dot(
            x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), preferred_element_type=jnp.float32
        )
        return jnp.sum(jnp.tanh(y))

    w = np.linspace(-1, 1, 9, dtype=np.float32).reshape(3, 3)
    close(xform.grad(f, (0, 1))(w, X), jax.grad(f, (0, 1))(w, X), 1e-6)


@pytest.mark.usefixtures("strict_promotion")
def test_strict_dtype_promotion() -> None:
    f = lambda x, z: jnp.sum(jax.nn.gelu(x) * jnp.abs(z) + jnp.max(x) * jnp.mean(x) ** 3)
    args = X, (X + 1j).astype(np.complex64)
    close(xform.grad(f, (0, 1))(*args), jax.grad(f, (0, 1))(*args), 1e-5)
    close(
        xform.hessian(lambda x: jnp.sum(jnp.tanh(x) ** 3))(X),
        jax.hessian(lambda x: jnp.sum(jnp.tanh(x) ** 3))(X),
        1e-5,
    )


def test_zero_size_arrays() -> None:
    x = np.zeros((0, 3), np.float32)
    f = lambda x: jnp.sum(jnp.sin(x) @ jnp.ones((3, 2)))
    for policy in (None, xform.policies.save_nothing):
        close(xform.grad(f, policy=policy)(x), jax.grad(f)(x))
        close(jax.jit(xform.grad(xform.remat(f), policy=policy))(x), jax.grad(f)(x))
    close(xform.jacrev(lambda x: x * 2)(x), jax.jacrev(lambda x: x * 2)(x))
    close(xform.jacfwd(lambda x: x * 2)(x), jax.jacfwd(lambda x: x * 2)(x))


def test_nan_and_infinity_are_jaxs() -> None:
    x = np.array([np.nan, np.inf, -np.inf, 0.0, 1.0], np.float32)
    for f in (
        jnp.log,
        jnp.sqrt,
        lambda x: jnp.where(x > 0.5, jnp.log(jnp.where(x > 0.5, x, 1)), 0),
    ):
        loss = lambda x: jnp.sum(f(x))  # noqa: B023
        np.testing.assert_array_equal(xform.grad(loss)(x), jax.grad(loss)(x))
        np.testing.assert_array_equal(jax.jit(xform.grad(loss))(x), jax.grad(loss)(x))


def test_where_masks_the_nan_of_the_branch_not_taken() -> None:
    f = lambda x: jnp.sum(jnp.where(x > 0, jnp.log(jnp.where(x > 0, x, 1.0)), 0.0))
    assert np.isfinite(xform.grad(f)(np.array([0.0, 2.0], np.float32))).all()


def test_debug_nans_points_at_the_derivative() -> None:
    with jax.debug_nans(True):
        close(xform.grad(lambda x: jnp.sum(jnp.sin(x)))(X), jnp.cos(X), 1e-6)
        with pytest.raises(FloatingPointError):
            xform.grad(jnp.sqrt)(0.0) * 0.0


@pytest.mark.parametrize(
    "given", [2.0, 2j, np.float64(2), np.float32(2), np.complex128(2j)], ids=repr
)
def test_a_number_that_nothing_is_done_to(given) -> None:
    """A Python number is returned as one; NumPy's become arrays of an enabled dtype."""
    kind = lambda x: (is_number(x), jax.typeof(x).dtype, jax.typeof(x).weak_type)
    f = lambda x: (x, x, x * x)
    (ys, pull), (want, jax_pull) = (t.vjp(f, given) for t in (xform, jax))
    cts = (*want[:2], jnp.ones_like(want[2]))
    for made, wanted in ((ys, want), (pull(cts), jax_pull(cts))):
        close(made, wanted, 1e-6)
        assert list(map(kind, made)) == list(map(kind, wanted))
    pushed = (t.jvp(f, (given,), (given,)) for t in (xform, jax))
    for made, wanted in zip(*pushed, strict=True):
        close(made, wanted, 1e-6)
        assert list(map(kind, made)) == list(map(kind, wanted))


def test_a_zero_that_a_derivative_starts_from_is_as_weakly_typed_as_its_value() -> None:
    f = lambda x: jax.lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, s[1] * x), (0, x))[1]
    value = lambda x, n: xform.vjp(lambda n: xform.grad(f)(x), n)[0]
    for g in (value, lambda x, n: xform.jvp(lambda x: value(x, n), (x,), (1.0,))[0]):
        (aval,) = jax.make_jaxpr(g)(2.0, np.arange(2)).out_avals
        assert aval.weak_type


LOOPS_AND_CALLS = {
    "scan": lambda x: jax.lax.scan(lambda c, _: (c * x, c), x, None, length=2),
    "while": lambda x: jax.lax.while_loop(
        lambda s: (s[0] < 3) & (s[1] < 9.0), lambda s: (s[0] + 1, s[1] * x), (0, x)
    )[1],
    "cond": lambda x: jax.lax.cond(x > 0, lambda x: x * 2.0, lambda x: x, x),
    "remat": lambda x: jax.checkpoint(lambda x: x * 2.0)(x),
    "jit": lambda x: jax.jit(lambda x: x * 2.0)(x),
    "custom_jvp": lambda x: jax.nn.relu(x),
}


@pytest.mark.parametrize("name", LOOPS_AND_CALLS)
def test_values_in_lanes_are_as_weakly_typed_as_the_functions(name: str) -> None:
    f = LOOPS_AND_CALLS[name]
    modes = (
        lambda x: xform.vjp(f, x)[0],
        lambda x: xform.jvp(f, (x,), (x,))[0],
        lambda x: xform.linearize(f, x)[0],
    )
    for mode in modes:
        lanes = lambda x, mode=mode: jax.vmap(mode)(jnp.stack([x, 0.7 * x]))
        for run in (mode, lanes):
            assert all(aval.weak_type for aval in jax.make_jaxpr(run)(2.0).out_avals)
