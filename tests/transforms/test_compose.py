"""xform's transforms of xform's and JAX's, to third order, in any mixture."""

import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import xform
from tests.reference import close

X = np.array([0.3, -0.7, 1.1])
pytestmark = pytest.mark.usefixtures("x64")


@jax.custom_vjp
def cubed(x):
    return x**3


cubed.defvjp(lambda x: (x**3, x), lambda x, ct: (3 * x**2 * ct,))


@jax.custom_jvp
def squared(x):
    return x * x


squared.defjvps(lambda dx, y, x: 2 * x * dx)

FUNCTIONS = {
    "elementwise": lambda x: jnp.sum(x**3 * jnp.tanh(x)),
    "scan": lambda x: jnp.sum(lax.scan(lambda c, t: (c * x + t, c * c), x, x, length=3)[1]),
    "cond": lambda x: jnp.sum(lax.cond(x[0] > 0, lambda x: x**4, lambda x: x**3, x) * x),
    "remat": lambda x: jnp.sum(xform.remat(lambda x: (x * x) / (1 + x * x))(x) * x),
    "remat in scan": lambda x: jnp.sum(
        lax.scan(lambda c, _: (jax.checkpoint(lambda c: c * x + c * c)(c), None), x, None, 3)[0]
    ),
    "large jit": lambda x: jnp.sum(large(x)),
    "custom_jvp": lambda x: jnp.sum(squared(squared(x)) * x),
    "solve": lambda x: jnp.sum(jnp.linalg.solve(3 * jnp.eye(3) + jnp.outer(x, x), x) ** 2),
}


@jax.jit
def large(x):
    y = x
    for _ in range(25):
        y = y * x / 2 + x
    return y


def order(transforms, f):
    """Return directional derivatives along cos(x), one transform after the other."""
    d = np.cos(X)
    for t, mode in transforms:
        inner = f
        if mode == "grad":
            f = lambda x, t=t, inner=inner: jnp.vdot(t.grad(inner)(x), d)
        elif mode == "jvp":
            f = lambda x, t=t, inner=inner: t.jvp(inner, (x,), (d,))[1]
        else:
            f = lambda x, t=t, inner=inner: t.linearize(inner, x)[1](d)
    return f


WAYS = [(t, mode) for t in (xform, jax) for mode in ("grad", "jvp", "linearize")]
SECOND = [w for w in itertools.product(WAYS, WAYS) if any(t is xform for t, _ in w)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_second_order_in_every_mixture(name: str) -> None:
    f = FUNCTIONS[name]
    ways = SECOND if name == "elementwise" else SECOND[len(name) % 3 :: 3]

    @jax.jit
    def together(x):
        return [order(w, f)(x) for w in ways], order([(jax, "jvp"), (jax, "jvp")], f)(x)

    got, want = together(X)
    for way, y in zip(ways, got, strict=True):
        np.testing.assert_allclose(
            y, want, rtol=1e-10, err_msg=str([(t.__name__, m) for t, m in way])
        )


THIRD = [
    w
    for w in itertools.product([(xform, "grad"), (jax, "grad"), (xform, "jvp")], repeat=3)
    if any(t is xform for t, _ in w) and w.count((jax, "grad")) <= 2
]


@pytest.mark.parametrize("name", ["elementwise", "scan", "remat"])
def test_third_order_in_every_mixture(name: str) -> None:
    f = FUNCTIONS[name]
    ways = THIRD if name == "elementwise" else THIRD[::9]

    @jax.jit
    def together(x):
        return [order(w, f)(x) for w in ways], order([(jax, "jvp")] * 3, f)(x)

    got, want = together(X)
    for way, y in zip(ways, got, strict=True):
        np.testing.assert_allclose(
            y, want, rtol=1e-10, err_msg=str([(t.__name__, m) for t, m in way])
        )


def test_second_order_alone_and_under_vmap() -> None:
    f = FUNCTIONS["remat in scan"]
    want = jax.grad(lambda x: jnp.sum(jax.grad(f)(x) ** 2))(X)
    close(xform.grad(lambda x: jnp.sum(xform.grad(f)(x) ** 2))(X), want)
    xs = np.stack([X, X + 1])
    close(
        jax.vmap(xform.grad(lambda x: jnp.sum(xform.grad(f)(x) ** 2)))(xs),
        jax.vmap(jax.grad(lambda x: jnp.sum(jax.grad(f)(x) ** 2)))(xs),
    )


def test_second_order_of_a_custom_vjp_differentiates_its_backward_function() -> None:
    f = lambda x: jnp.sum(cubed(jnp.sin(x)))
    want = jax.grad(lambda x: jnp.sum(jax.grad(f)(x) ** 2))(X)
    for outer, inner in itertools.product((xform, jax), repeat=2):
        close(outer.grad(lambda x: jnp.sum(inner.grad(f)(x) ** 2))(X), want)  # noqa: B023
    close(xform.hvp(f, (X,), (X,)), jax.jvp(jax.grad(f), (X,), (X,))[1])


@pytest.mark.parametrize("t", [xform, jax], ids=["xform", "jax"])
def test_a_gradient_inside_a_loop_a_branch_and_a_remat_region(t) -> None:
    def f(inner, x):
        g = inner.grad(lambda x: jnp.sum(x**3))
        step = lambda c, _: (c - 0.1 * g(c), inner.jvp(g, (c,), (x,))[1])
        last, ys = lax.scan(step, x, None, length=3)
        y = lax.cond(x[0] > 0, g, lambda x: x, last)
        z = jax.checkpoint(lambda x: g(x) * x)(y)
        n = lax.while_loop(
            lambda s: s[0] < 2, lambda s: (s[0] + 1, g(s[1])), (0, lax.stop_gradient(x))
        )
        return jnp.sum(z) + jnp.sum(ys * n[1])

    want = jax.value_and_grad(lambda x: f(jax, x))(X)
    close(t.value_and_grad(lambda x: f(xform, x))(X), want)
    close(jax.jit(t.value_and_grad(lambda x: f(xform, x)))(X), want)


def test_vmap_inside_and_outside() -> None:
    xs = np.stack([X, X + 1, X * 2])
    f = lambda xs: jnp.sum(jax.vmap(lambda x: jnp.sin(x) * jnp.sum(x))(xs) ** 2)
    close(xform.grad(f)(xs), jax.grad(f)(xs))
    per_example = jax.vmap(xform.grad(lambda x, w: jnp.sum(jnp.tanh(x * w))), in_axes=(0, None))
    close(
        per_example(xs, X),
        jax.vmap(jax.grad(lambda x, w: jnp.sum(jnp.tanh(x * w))), (0, None))(xs, X),
    )
    named = lambda x: jnp.sum((x - lax.pmean(x, "batch")) ** 3)
    close(
        jax.vmap(xform.grad(named), axis_name="batch")(xs),
        jax.vmap(jax.grad(named), axis_name="batch")(xs),
    )


def test_ten_transforms_deep() -> None:
    def pushed(f):
        return lambda x: xform.jvp(f, (x,), (1.0,))[1]

    f, want = jnp.sin, [1.0, 0.0, -1.0, 0.0]
    for n in range(10):
        f = xform.grad(f) if n % 2 else pushed(f)
        np.testing.assert_allclose(f(0.0), want[n % 4], atol=1e-12)


@pytest.mark.slow
def test_no_tracer_leaks() -> None:
    def f(x):
        y = lax.scan(lambda c, _: (jnp.sin(c) * x, c), x, None, length=2)[0]
        return jnp.sum(xform.remat(large)(y)) + jnp.sum(lax.cond(True, jnp.sin, jnp.cos, y))

    with jax.checking_leaks():
        close(jax.jit(xform.grad(f))(X), jax.jit(jax.grad(f))(X))
        jax.jit(lambda x: xform.hvp(f, (x,), (x,)))(X)
        jax.vmap(lambda s: xform.linearize(lambda x: f(x * s), X)[1](X))(X)
        xform.grad(lambda s: xform.grad(lambda x: s * f(s * x))(X)[0])(2.0)


def test_threads_differentiate_at_once() -> None:
    want = jax.grad(FUNCTIONS["scan"])(X)
    failures = []

    def work(i):
        try:
            with jax.enable_x64(True):
                for _ in range(3):
                    close(xform.grad(FUNCTIONS["scan"])(X), want)
                    xform.grad(lambda x: jnp.sum(large(x) * i))(X)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


def chain(n):
    def f(x):
        for i in range(n):
            x = x * 0.999 if i % 2 else x + x * x * 1e-6
        return jnp.sum(x)

    return f


@pytest.mark.slow
def test_thousands_of_equations_do_not_meet_the_recursion_limit() -> None:
    for n, policy in ((5000, None), (1000, xform.policies.save_nothing)):
        jaxpr = jax.make_jaxpr(xform.grad(chain(n), policy=policy))(X)
        assert n < len(jaxpr.eqns) < 8 * n


def test_work_is_linear_in_the_equations() -> None:
    """Calls are counted, not timed: 4 times the equations make 4 times the calls in Python."""
    import cProfile

    def calls(n: int) -> int:
        profile = cProfile.Profile()
        profile.enable()
        for policy in (None, xform.policies.save_nothing):
            jax.make_jaxpr(xform.grad(chain(n), policy=policy))(X)
        profile.disable()
        return sum(entry.callcount for entry in profile.getstats())

    calls(10)
    assert calls(400) < 4.5 * calls(100)


def test_deep_nesting_of_calls_and_regions() -> None:
    f = lambda x: jnp.sin(x) * x
    for i in range(25):
        f = (jax.jit, xform.remat, lambda g: lambda x: lax.cond(True, g, jnp.negative, x))[i % 3](f)
    g = lambda x: jnp.sum(f(x))
    close(xform.grad(g)(X), jax.grad(lambda x: jnp.sum(jnp.sin(x) * x))(X))
