"""Mutable references made inside a differentiated function are values."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

import xform
from tests.parameters import slow
from xform.errors import NotDifferentiable

X = np.array([0.3, 0.7, 1.1])
RNG = np.random.default_rng(31)


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


def freeze(x):
    ref = jax.new_ref(x)
    ref[...] = jnp.sin(ref[...]) * x
    return jax.freeze(ref)


def empty(x):
    ref = jax.empty_ref(jax.typeof(x))
    ref[...] = 2.0 * x * x
    y = ref[...]
    jax.free_ref(ref)
    return y


def added(x):
    ref = jax.new_ref(jnp.zeros(2))
    jax.ref.addupdate(ref, 0, x[0] * x[1])
    jax.ref.addupdate(ref, jnp.array([1, 1]), x[1:] * x[:2])
    return ref[...]


def swapped(x):
    ref = jax.new_ref(x)
    before = jax.ref.swap(ref, 1, x[0] * x[2])
    return ref[...] * before


def in_scan(x):
    ref, total = jax.new_ref(x), jax.new_ref(jnp.zeros(()))

    def body(c, i):
        total[...] += jnp.sin(ref[i]) * c
        ref[i] = ref[i] * total[...]
        return c * 1.1, ref[i]

    c, ys = lax.scan(body, 1.0, jnp.arange(3))
    return c * ref[...] * total[...] + ys


def made_in_scan(x):
    def body(c, x):
        ref = jax.new_ref(c)
        ref[...] *= x
        return jnp.sin(ref[...]), ref[...]

    return lax.scan(body, 1.0, x)


def scanned(x):
    ref = jax.new_ref(x)

    def body(c, row):
        row[...] = jnp.sin(row[...]) * c
        return c + row[...], None

    c, _ = lax.scan(body, 1.0, ref, reverse=True)
    return c * ref[...]


def in_cond(x):
    ref = jax.new_ref(x)

    def double():
        ref[1:] = ref[1:] * 2.0
        return ref[0]

    y = lax.cond(x[0] > 0, double, lambda: 0.0)
    return y * ref[...]


def in_while(x):
    ref, limit = jax.new_ref(x), jax.new_ref(3)

    def body(i):
        ref[i] = ref[i] * jnp.cos(ref[i - 1])
        return i + 1

    lax.while_loop(lambda i: i < limit[...], body, 0)
    return ref[...]


def in_calls(x):
    ref = jax.new_ref(x)

    @jax.jit
    def inner():
        @jax.remat
        def innermost(y):
            ref[...] += jnp.sin(y)
            return ref[...] * y

        return innermost(ref[...])

    return inner() * ref[...]


def in_remat(x):
    @jax.remat
    def f(x):
        ref = jax.new_ref(x)
        ref[...] *= jnp.sin(ref[...])
        return ref[...]

    return f(f(x))


def not_differentiated(x):
    ref = jax.new_ref(x, kind="no_grad_no_remat")
    ref[...] += x
    return ref[...] * x


FUNCTIONS = [freeze, empty, added, swapped, in_scan, made_in_scan, scanned, in_cond, in_calls,
             in_remat]  # fmt: skip


def total(f):
    return lambda x: sum(jnp.sum(y * (1.0 + i)) for i, y in enumerate(jax.tree.leaves(f(x))))


@pytest.mark.parametrize("jit", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("f", slow([*FUNCTIONS, in_while], *FUNCTIONS[1::2]))
def test_derivatives(f, jit: bool) -> None:
    compiled = jax.jit if jit else lambda f: f
    f, x = total(f), jnp.asarray(X)
    # JAX's forward mode over a basis, because it has no vmap for some of these.
    with jax.disable_jit(False):  # nor does it have all of them outside jit
        slopes = [jax.jit(lambda e: jax.jvp(f, (x,), (e,))[1])(e) for e in jnp.eye(3)]
    close = functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-12)
    close(compiled(xform.grad(f))(x), slopes)
    close(compiled(lambda x: xform.jvp(f, (x,), (x,))[1])(x), np.dot(slopes, X))
    close(compiled(lambda x: xform.linearize(f, x)[1](x))(x), np.dot(slopes, X))
    if f is not in_while:
        hessian = compiled(xform.jacfwd(xform.grad(f)))(x)
        close(hessian, hessian.T)
        close(jax.vmap(compiled(xform.grad(f)))(x[None])[0], slopes)


def test_a_reference_of_the_kind_that_has_no_gradient() -> None:
    f = total(not_differentiated)
    np.testing.assert_allclose(xform.grad(f)(X), jax.grad(f)(X))
    np.testing.assert_allclose(jax.jit(xform.grad(f))(X), jax.grad(f)(X))


INDICES = {
    "integer": np.s_[1],
    "negative": np.s_[-1],
    "slice": np.s_[1:3],
    "strided": np.s_[::2, 1:4:2],
    "both": np.s_[2, 1:3],
    "array": np.s_[np.array([2, 0, 2])],
    "array and slice": np.s_[np.array([2, 0]), 1:3],
    "slice and array": np.s_[1:, np.array([2, 0])],
    "apart": np.s_[np.array([2, 0]), :, np.array([1, 1])],
    "with an integer": np.s_[0, :, np.array([1, 0])],
    "ellipsis": np.s_[..., 0],
}


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
@pytest.mark.parametrize("traced", [pytest.param(False, marks=pytest.mark.slow), True])
def test_places(index, traced: bool) -> None:
    """Reads and writes use the same elements as in JAX outside of any transform."""
    x = jnp.asarray(RNG.normal(size=(4, 5, 2)))

    def f(x, index):
        ref = jax.new_ref(x)
        y = ref[index]
        ref[index] = jnp.sin(y)
        jax.ref.addupdate(ref, index, 2.0 * y)
        return y, jax.freeze(ref)

    if traced and not any(isinstance(i, slice | type(...)) for i in np.index_exp[index]):
        run = lambda x, index: xform.vjp(lambda x: f(x, index), x)[0]
        found = jax.jit(run)(x, jax.tree.map(jnp.asarray, index))
    else:
        found = xform.vjp(lambda x: f(x, index), x)[0]
    for a, b in zip(found, f(x, index), strict=True):
        np.testing.assert_allclose(a, b)


def test_a_slice_from_a_traced_start() -> None:
    def f(x, i):
        ref = jax.new_ref(x)
        ref[pl.ds(i, 2)] = jnp.sin(ref[pl.ds(i, 2)])
        ref[pl.ds(i, 2), jnp.array([0, 3])] = ref[pl.ds(i, 2), jnp.array([1, 2])]
        jax.ref.addupdate(ref, (pl.ds(i, 2), 1), ref[pl.ds(i, 2), 0])
        return ref[...]

    x, i = jnp.asarray(RNG.normal(size=(5, 4))), jnp.int32(2)
    run = jax.jit(lambda ad, x, i: ad.jvp(lambda x: f(x, i), (x,), (x,)), static_argnums=0)
    np.testing.assert_allclose(run(xform, x, i), run(jax, x, i))


MOVING = {
    "integer": lambda i: np.s_[i],
    "integer and strided": lambda i: np.s_[i, ::2, i],
    "slice": lambda i: np.s_[:, pl.ds(i, 2)],
    "strided": lambda i: np.s_[:, pl.ds(i, 2, 2)],
    "strided and integer": lambda i: np.s_[pl.ds(i, 2, 2), :, i],
    "slice and array": lambda i: np.s_[pl.ds(i, 2), jnp.array([0, 3, -1])],
    "apart": lambda i: np.s_[jnp.array([1, 0]), pl.ds(i, 3), jnp.stack([i, i + 1])],
    "together": lambda i: np.s_[pl.ds(i, 2), jnp.array([[1], [0]]), jnp.stack([i, i + 1])],
}


def moved(name, x, i):
    ref, index = jax.new_ref(x), MOVING[name](i)
    y = ref[index]
    before = jax.ref.swap(ref, index, jnp.sin(y))
    jax.ref.addupdate(ref, index, 2.0 * y)
    return y, before, jax.freeze(ref)


@pytest.mark.parametrize("name", slow(MOVING, "slice", "strided and integer", "together"))
def test_places_outside_of_a_reference(name) -> None:
    """A traced start may be negative, or beyond the end. JAX defines the element then."""
    x = jnp.asarray(RNG.normal(size=(4, 5, 2)))
    found = jax.jit(lambda x, i: xform.vjp(lambda x: moved(name, x, i), x)[0])
    expected = jax.jit(lambda x, i: moved(name, x, i))
    for i in range(-7, 8):
        with jax.disable_jit(False):  # JAX accepts no traced start outside jit
            want = expected(x, jnp.int32(i))
        for a, b in zip(found(x, jnp.int32(i)), want, strict=True):
            np.testing.assert_allclose(a, b)


@pytest.mark.parametrize("name", MOVING)
def test_places_counted_from_the_end(name) -> None:
    """A known negative start means the same as a traced one."""
    x = jnp.asarray(RNG.normal(size=(4, 5, 2)))
    expected = jax.jit(lambda x, i: moved(name, x, i))
    for i in (-1, np.int64(-2)):
        found = xform.vjp(lambda x: moved(name, x, i), x)[0]  # noqa: B023
        with jax.disable_jit(False):
            want = expected(x, jnp.int32(i))
        for a, b in zip(found, want, strict=True):
            np.testing.assert_allclose(a, b)


def test_views() -> None:
    def f(x):
        ref = jax.new_ref(x)
        view = ref.at[1]
        view[:2] = jnp.sin(view[:2])
        jax.ref.addupdate(view, jnp.array([0, 0]), x[0, :2])
        return ref[...]

    x = jnp.asarray(RNG.normal(size=(2, 3)))
    ones = jnp.ones_like(x)

    def pure(x):  # JAX itself does not differentiate views
        x = x.at[1, :2].set(jnp.sin(x[1, :2]))
        return x.at[1, jnp.array([0, 0])].add(x[0, :2])

    found = jax.jit(xform.jvp, static_argnums=0)(f, (x,), (ones,))
    np.testing.assert_allclose(found, jax.jvp(pure, (x,), (ones,)))


# References from outside.


@pytest.mark.parametrize("jit", [False, True])
def test_a_constant_may_be_written_to_a_reference_from_outside(jit: bool) -> None:
    ref = jax.new_ref(jnp.zeros(3))

    def f(x):
        ref[...] += 2.0
        return (x * ref[...]).sum()

    gradient = jax.jit(xform.grad(f)) if jit else xform.grad(f)
    np.testing.assert_allclose(gradient(jnp.asarray(X)), 2.0)
    np.testing.assert_allclose(gradient(jnp.asarray(X)), 4.0)
    np.testing.assert_allclose(ref[...], 4.0)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("write", [jax.ref.set, jax.ref.addupdate])
def test_an_active_value_may_not(write, jit: bool) -> None:
    ref = jax.new_ref(jnp.zeros(3))

    def f(x):
        write(ref, None, x)
        return (x * ref[...]).sum()

    gradient = jax.jit(xform.grad(f)) if jit else xform.grad(f)
    with pytest.raises(NotDifferentiable, match="reference from outside"):
        gradient(jnp.asarray(X))


def test_a_reference_that_asks_for_no_gradient_takes_any_value() -> None:
    ref = jax.new_ref(jnp.zeros(3), kind="no_grad_no_remat")

    def f(x):
        ref[...] += x
        return (x * x).sum()

    np.testing.assert_allclose(xform.grad(f)(jnp.asarray(X)), 2 * X)
    np.testing.assert_allclose(ref[...], X)


@pytest.mark.parametrize("jit", [False, True])
def test_a_backward_pass_may_write(jit: bool) -> None:
    @jax.custom_vjp
    def stash(ref, x):
        return x

    def pull(ref, ct):
        ref[...] = ct
        return None, ct

    stash.defvjp(lambda ref, x: (x, ref), pull)

    def f(ref, x):
        return jnp.sin(stash(ref, jnp.sin(x)))

    ref = jax.new_ref(0.0)
    gradient = jax.jit(xform.grad(f, 1)) if jit else xform.grad(f, 1)
    gradient(ref, 0.5)
    np.testing.assert_allclose(ref[...], np.cos(np.sin(0.5)))


@jax.custom_vjp
def logged(x, log):
    """Return `x`; the sum of its cotangent is put in front of the contents of `log`."""
    return x


def _log(log, ct):
    log[:] = jnp.roll(log[:], 1).at[0].set(ct.sum())
    return ct, None


logged.defvjp(lambda x, log: (x, log), _log)


def _twice(x, log):
    return logged(jnp.sin(logged(x, log)), log).sum()


LOGGED = {
    "plain": _twice,
    "checkpoint": jax.checkpoint(_twice),
    "scan": lambda x, log: lax.scan(lambda c, _: (_twice(x * c, log), None), 1.0, None, 2)[0],
    "closed over": lambda x, log: jax.jit(lambda x: _twice(x, log))(x),
}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", LOGGED)
def test_backward_pass_reads_its_own_writes_to_a_reference(name: str, jit: bool) -> None:
    ended = []
    for grad in jax.grad, xform.grad:
        log = jax.new_ref(jnp.arange(4.0))
        gradient = grad(LOGGED[name])
        ended.append(((jax.jit(gradient) if jit else gradient)(jnp.asarray(X), log), log[...]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a, rtol=1e-6), *ended)
