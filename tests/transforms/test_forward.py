"""`jvp` and `linearize`."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.interpreters import ad

import xform
from tests.parameters import slow
from tests.reference import close
from xform.errors import NotDifferentiable

X = np.array([0.3, -0.7, 1.1], np.float32)
F0 = jax.dtypes.float0

FUNCTIONS = {
    "elementwise": lambda x: jnp.sin(x) * jnp.exp(-x),
    "tree": lambda x: {"a": (x, x * 2), "b": [jnp.sum(x**3)], "c": None},
    "scan": lambda x: lax.scan(lambda c, t: (jnp.sin(c) * t, c * t), x, x),
    "cond": lambda x: lax.cond(x[0] > 0, jnp.sin, lambda x: x**2, x),
    "jit": jax.jit(lambda x: jnp.cumsum(x) * x),
    "large jit": jax.jit(lambda x: sum(jnp.sin(x * i) for i in range(30))),
    "remat": jax.checkpoint(lambda x: jnp.sin(jnp.sin(x))),
    "softmax": jax.nn.softmax,
    "relu": jax.nn.relu,
    "sort": lambda x: jnp.sort(x) * x,
    "solve": lambda x: jnp.linalg.solve(jnp.diag(x) + jnp.outer(x, x) + 3 * jnp.eye(3), x),
    "while": lambda x: lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] * x), (0, x))[
        1
    ],
    "unused branch": lambda x: (x * 2, jnp.sin(lax.stop_gradient(x))),
}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", slow(FUNCTIONS, *{"solve", "softmax", *list(FUNCTIONS)[1::2]}))
def test_jvp_and_linearize_are_jaxs(name: str) -> None:
    f, x, dx = FUNCTIONS[name], X.astype(np.float64), np.cos(X.astype(np.float64))

    def both(t, x, dx):
        y, push = t.linearize(f, x)
        return t.jvp(f, (x,), (dx,)), (y, push(dx), push(2 * dx))

    want = both(jax, x, dx)
    close(both(xform, x, dx), want)
    xs = np.stack([x, x * 1.5])
    compiled = jax.jit(
        lambda x, xs, dx: (both(xform, x, dx), jax.vmap(lambda x: both(xform, x, dx))(xs))
    )
    close(compiled(x, xs, dx), (want, jax.vmap(lambda x: both(jax, x, dx))(xs)))


def test_integers_have_float0_tangents() -> None:
    f = lambda x, n: (jnp.sin(x) * n, n + 1)
    n = np.arange(3)
    args = ((X, n), (X, np.zeros(3, F0)))
    close(xform.jvp(f, *args), jax.jvp(f, *args), 1e-6)
    close(xform.linearize(f, X, n)[1](*args[1]), jax.linearize(f, X, n)[1](*args[1]), 1e-6)


def test_auxiliary_output() -> None:
    f = lambda x: (jnp.sin(x), {"x": x, "s": "text"})
    y, dy, aux = xform.jvp(f, (X,), (X,), has_aux=True)
    assert aux["s"] == "text"
    close((y, dy, aux["x"]), (jnp.sin(X), jnp.cos(X) * X, jnp.asarray(X)), 1e-6)
    y, push, aux = xform.linearize(f, X, has_aux=True)
    assert aux["s"] == "text"
    close((y, push(X)), (jnp.sin(X), jnp.cos(X) * X), 1e-6)


def test_linearize_evaluates_the_function_once() -> None:
    calls = []

    def f(x):
        calls.append(1)
        return jnp.sin(x)

    _, push = xform.linearize(f, X)
    for _ in range(3):
        push(X)
    assert len(calls) == 1


def test_a_push_may_leave_a_jitted_function() -> None:
    y, push = jax.jit(lambda x: xform.linearize(lambda x: jnp.sin(x) * x, x))(X)
    close(push(X), jax.jvp(lambda x: jnp.sin(x) * x, (X,), (X,))[1], 1e-6)
    close(jax.jit(lambda p: p(X))(push), push(X), 1e-6)
    close(jax.vmap(push)(jnp.eye(3)), jax.jacfwd(lambda x: jnp.sin(x) * x)(X).T, 1e-6)
    assert y.shape == (3,)


def test_a_push_is_linear_and_the_transpose_of_the_pull() -> None:
    f = lambda x: jnp.cumsum(jnp.sin(x)) * x[0]
    _, push = xform.linearize(f, X)
    _, pull = xform.vjp(f, X)
    dx, ct = np.cos(X), np.sin(3 * X)
    np.testing.assert_allclose(jnp.vdot(ct, push(dx)), jnp.vdot(pull(ct)[0], dx), rtol=1e-5)
    close(push(2 * dx + ct), 2 * push(dx) + push(ct), 1e-5)


def test_a_push_can_be_transposed() -> None:
    f = lambda x: jnp.sin(x) * x[0]
    _, push = xform.linearize(f, X)
    want = jax.vjp(f, X)[1](X)
    close(xform.linear_transpose(push, X)(X), want, 1e-6)
    close(jax.linear_transpose(push, X)(X), want, 1e-6)


def test_several_primals_and_trees() -> None:
    f = lambda p, x: x @ p["w"] + p["b"]
    p = {"w": np.eye(3, dtype=np.float32), "b": X}
    dp = jax.tree.map(np.cos, p)
    close(xform.jvp(f, (p, X), (dp, X)), jax.jvp(f, (p, X), (dp, X)), 1e-6)
    close(xform.jvp(f, [p, X], [dp, X]), jax.jvp(f, (p, X), (dp, X)), 1e-6)


class Variants(chex.TestCase):
    """Run with and without jit, by chex."""

    @chex.variants(with_jit=True, without_jit=True, with_device=True)
    def test_jvp(self) -> None:
        f = lambda x: jnp.tanh(x) * x
        got = self.variant(lambda x, dx: xform.jvp(f, (x,), (dx,)))(X, X)
        chex.assert_trees_all_close(got, jax.jvp(f, (X,), (X,)), rtol=1e-6)


def test_jvp_ignores_a_dead_custom_vjp_call_in_a_loop() -> None:
    f = jax.custom_vjp(jnp.sin)
    f.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (ct * jnp.cos(x),))

    def dead(x):
        return lax.scan(lambda c, _: (c * x, jax.jit(f)(x)), x, None, length=2)[0]

    for way in (dead, lambda x: lax.fori_loop(0, 1, lambda _, c: dead(c), x)):
        got = jax.jit(lambda x: xform.jvp(way, (x,), (1.0,)))(0.5)  # noqa: B023
        np.testing.assert_allclose(got, (0.125, 0.75))


def test_named_scope_appears_once_in_the_name_stack_of_jvp() -> None:
    def f(x):
        with jax.named_scope("layer"):
            return lax.dot(lax.sin(x), x)

    made = jax.make_jaxpr(lambda x: xform.jvp(f, (x,), (x,)))(jnp.ones((2, 2)))
    scopes = {str(e.source_info.name_stack) for e in made.eqns}
    assert scopes == {"layer"}, scopes


def test_a_jitted_push_lives_where_its_jit_does() -> None:
    mesh = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.sharding.NamedSharding(mesh, jax.P("i"))
    f = jax.jit(lambda x: (jnp.sin(x), 2 * x), in_shardings=split, out_shardings=(split, None))
    x = jnp.arange(8.0)
    made = jax.make_jaxpr(lambda x: xform.jvp(f, (x,), (x,)))(x)
    (pushed,) = [e for e in made.eqns if e.primitive.name == "jit"]
    assert pushed.params["in_shardings"] == (split, split)
    assert [s == split for s in pushed.params["out_shardings"]] == [True, False, True, False]
    got = xform.jvp(f, (x,), (x,))
    np.testing.assert_allclose(got[1], jax.jvp(f, (x,), (x,))[1])
    assert got[1][0].sharding == split


def test_a_tangent_bears_no_name() -> None:
    f = lambda x: jax.ad_checkpoint.checkpoint_name(jnp.sin(x), "named")
    for lib in (xform, jax):
        made = jax.make_jaxpr(lambda x: lib.jvp(f, (x,), (x,)))(1.0)  # noqa: B023
        assert [e.primitive.name for e in made.eqns].count("name") == 1


def test_a_push_is_staged_once() -> None:
    def count(lib, f, x):
        return len(jax.make_jaxpr(lambda x: lib.jvp(f, (x,), (x,)))(x).eqns)

    for f in (jnp.sin, lambda x: x @ x, lambda x: x + x[0], jax.nn.silu, lambda x: x**2):
        x = jnp.ones((3, 3))
        assert count(xform, f, x) <= count(jax, f, x)


def test_a_refused_push_prints_nothing_twice() -> None:
    f = jax.custom_vjp(jnp.sin)
    f.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (ct * jnp.cos(x),))

    def dead(x):
        jax.debug.print("seen {}", x)
        return jax.lax.fori_loop(0, 2, lambda _, c: (c[0] * x, f(x)), (x, x))[0]

    with pytest.raises(NotDifferentiable, match="custom_vjp"):
        jax.jit(lambda x: xform.jvp(dead, (x,), (1.0,)))(0.5)


def test_only_values_with_tangents_are_instances_of_jvptracer() -> None:
    def f(x, y):
        inner = []
        xform.jvp(lambda z: inner.extend([moves(z), moves(x)]) or z * x, (y,), (y,))
        seen.append((moves(x), moves(y), *inner))
        return x * y

    moves = lambda x: isinstance(x, ad.JVPTracer)
    for how in (lambda f: f, jax.jit):
        seen: list[tuple[bool, ...]] = []
        y, dy = how(lambda x: xform.jvp(lambda x: f(x, 3.0), (x,), (x,)))(2.0)
        assert (float(y), float(dy), seen) == (6.0, 6.0, [(True, False, True, True)])


def test_whose_a_pushed_value_is_can_be_told() -> None:
    """By the tag, as in JAX's own trace: nested maps do not confuse their values."""
    for inner, outer in ((xform, jax), (jax, xform), (xform, xform)):
        f = lambda x: inner.jvp(lambda y: y * x * jnp.sin(x), (x,), (1.0,))[1]  # noqa: B023
        got = outer.jvp(f, (2.0,), (1.0,))
        np.testing.assert_allclose(got, jax.jvp(lambda x: x * jnp.sin(x), (2.0,), (1.0,)), 1e-6)


def test_a_python_number_reaches_a_primitive_as_an_array_in_a_trace() -> None:
    f = lambda x: lax.sin_p.bind(x, accuracy=None) * x
    got, want = (jax.jit(lambda: lib.jvp(f, (5.0,), (1.0,)))() for lib in (xform, jax))  # noqa: B023
    close(got, want)
