"""`grad`, `value_and_grad`, `vjp`, `fwd_and_bwd`."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import xform
from tests.reference import close, grads_agree
from tests.versions import fwd_and_bwd
from xform.errors import WrongArgument

X = np.array([0.3, -0.7, 1.1], np.float32)
F0 = jax.dtypes.float0


def mixed(a, b, c, d):
    """Elementwise, contraction, gather, loop, branch and reduction; four inputs."""
    h = jnp.tanh(a @ b) * c[1]
    h, ys = lax.scan(lambda h, t: (jnp.sin(h) + t * d["u"], h * t), h, c)
    picked = jnp.take(ys, jnp.array([2, 0, 2]), axis=0)
    y = lax.cond(c[0] > 0, lambda: jnp.cumsum(h) / (1.0 + d["v"] ** 2), lambda: jnp.sort(h))
    return jnp.sum(y) + jnp.max(picked) + jnp.sum(jax.nn.softmax(picked, axis=1)[:, 0] * d["v"])


def mixed_args():
    a = np.linspace(-1.0, 0.8, 3)
    b = np.linspace(-0.4, 0.9, 9).reshape(3, 3)
    return a, b, np.array([0.5, -0.2, 1.3]), {"u": np.float64(0.7), "v": np.array([0.1, 0.5, -2.0])}


SUBSETS = [s for n in range(1, 5) for s in itertools.combinations(range(4), n)]


@pytest.mark.usefixtures("x64")
def test_every_subset_of_active_inputs() -> None:
    args = mixed_args()

    @jax.jit
    def both(*args):
        return [[t.grad(mixed, s)(*args) for s in SUBSETS] for t in (xform, jax)]

    close(*both(*args))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("policy", [None, xform.policies.save_nothing])
def test_a_mixed_program_alone_and_under_jit_and_vmap(policy) -> None:
    a, b, c, d = mixed_args()
    grads_agree(
        lambda a, b, c, u, v: mixed(a, b, c, {"u": u, "v": v}),
        *(a, b, c, d["u"], d["v"]),
        argnums=(0, 1, 2, 3, 4),
        policies=(policy,),
    )


@pytest.mark.parametrize("argnums", [0, 1, -1, -2, (0,), (1, 0), (-1, 0), (0, -1), np.int64(1)])
def test_argnums(argnums) -> None:
    f = lambda x, y: jnp.sum(x * jnp.sin(y))
    close(xform.grad(f, argnums)(X, X + 1), jax.grad(f, argnums)(X, X + 1), 1e-6)
    got = xform.value_and_grad(f, argnums)(X, X + 1)
    close(got, jax.value_and_grad(f, argnums)(X, X + 1), 1e-6)


def test_no_argnums_no_gradient() -> None:
    assert xform.grad(lambda x: jnp.sum(x), ())(X) == ()


@pytest.mark.parametrize("argnums", [(0, 0), (1, -1)])
def test_an_argument_named_twice_is_refused(argnums) -> None:
    with pytest.raises(WrongArgument, match="twice"):
        xform.grad(lambda x, y: jnp.sum(x * y), argnums)(X, X)
    with pytest.raises(TypeError):
        jax.grad(lambda x, y: jnp.sum(x * y), argnums)(X, X)


def test_other_arguments_may_be_anything() -> None:
    def f(x, mode, *, scale, table=None):
        y = jnp.sin(x) if mode == "sin" else x
        return jnp.sum(y) * scale["by"] + (0 if table is None else table(x))

    got = xform.grad(f)(X, "sin", scale={"by": 2, "text": "?"}, table=jnp.sum)
    close(got, jax.grad(f)(X, "sin", scale={"by": 2, "text": "?"}, table=jnp.sum), 1e-6)


class Auxiliary:
    """A leaf that is not an array."""


def test_auxiliary_output_with_leaves_that_are_no_arrays() -> None:
    marker = Auxiliary()

    def f(x):
        y = jnp.sin(x)
        aux = {"y": y, "x": x, "n": 3, "s": "text", "o": marker, "none": None, "c": np.ones(2)}
        return jnp.sum(y), (aux, (), jnp.arange(2))

    for way in (lambda t: t.grad, lambda t: t.value_and_grad):
        got, want = way(xform)(f, has_aux=True)(X), way(jax)(f, has_aux=True)(X)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert a is b or a == b if isinstance(a, str | Auxiliary) else np.allclose(a, b)
    y, pull, (aux, _, _) = xform.vjp(f, X, has_aux=True)
    assert aux["o"] is marker
    close(pull(jnp.ones_like(y))[0], jnp.cos(X), 1e-6)
    assert not isinstance(aux["y"], jax.core.Tracer)


def test_auxiliary_output_under_jit_and_vmap() -> None:
    f = lambda x: (jnp.sum(x**3), (x * 2, 7, jnp.int32(4)))
    for way in (jax.jit, jax.vmap):
        x = X if way is jax.jit else np.stack([X, X])
        close(way(xform.grad(f, has_aux=True))(x), way(jax.grad(f, has_aux=True))(x), 1e-6)


@pytest.mark.usefixtures("x64")
def test_closures_over_outer_tracers() -> None:
    def outer(t, s):
        inner = lambda x: jnp.sum(jnp.sin(x * s["a"]) * t.grad(lambda y: jnp.sum(s["a"] * y**2))(x))
        return jnp.sum(t.grad(inner)(s["a"] * 2) * s["b"])

    s = {"a": X.astype(np.float64), "b": np.float64(1.5)}
    for way in (lambda g: g, jax.jit):
        close(
            way(xform.grad(functools.partial(outer, xform)))(s),
            jax.grad(functools.partial(outer, jax))(s),
        )
        close(
            way(jax.grad(functools.partial(outer, xform)))(s),
            jax.grad(functools.partial(outer, jax))(s),
        )
    got = jax.vmap(lambda a: outer(xform, {**s, "a": a}))(np.stack([s["a"], s["a"] + 1]))
    close(got, jax.vmap(lambda a: outer(jax, {**s, "a": a}))(np.stack([s["a"], s["a"] + 1])))


def test_a_closed_over_array_is_a_constant() -> None:
    w = jnp.asarray(X)
    close(xform.grad(lambda x: jnp.sum(w * x * x))(X), 2 * X * X, 1e-6)


OUTPUTS = {
    "the input": lambda x: x,
    "the input twice": lambda x: (x, x),
    "one value twice": lambda x: (y := jnp.sin(x), y, y * 2),
    "a constant": lambda x: (jnp.ones(2), x),
    "a literal": lambda x: (1.0, 2, x),
    "nothing": lambda x: (),
    "only constants": lambda x: (1.0, jnp.zeros(3)),
    "none": lambda x: {"a": None, "b": x * 2},
    "integers": lambda x: (jnp.argmax(x), x * 2),
    "a closure": lambda x: (CONSTANT, x * CONSTANT),
    "cut": lambda x: (lax.stop_gradient(x), x),
}
CONSTANT = jnp.arange(3.0)


@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.parametrize("jitted", [False, True])
def test_outputs_of_every_kind(name: str, jitted: bool) -> None:
    f = jax.jit(OUTPUTS[name]) if jitted else OUTPUTS[name]
    (y, pull), (want, jax_pull) = (t.vjp(f, X) for t in (xform, jax))
    close(y, want, 1e-6)
    cts = jax.tree.map(
        lambda y: (
            np.zeros(np.shape(y), F0) if jax.typeof(y).dtype.kind in "ib" else jnp.ones_like(y)
        ),
        y,
    )
    close(pull(cts), jax_pull(cts), 1e-6)
    dx = np.cos(X)
    close(xform.jvp(f, (X,), (dx,)), jax.jvp(f, (X,), (dx,)), 1e-6)
    close(xform.linearize(f, X)[1](dx), jax.linearize(f, X)[1](dx), 1e-6)


INPUTS = {
    "none": {"a": None, "b": X},
    "empty": ((), {}, [X]),
    "numbers": (1.0, X, 2.0),
    "unused": {"used": X, "unused": X},
}


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_of_every_kind(name: str) -> None:
    def f(tree):
        leaves = [tree["used"]] if name == "unused" else jax.tree.leaves(tree)
        return sum(jnp.sum(x * x) for x in leaves)

    close(xform.grad(f)(INPUTS[name]), jax.grad(f)(INPUTS[name]), 1e-6)


def test_no_differentiable_input_at_all() -> None:
    close(xform.grad(lambda t: 1.0)({}), {})
    close(xform.vjp(lambda: jnp.ones(2))[1](jnp.ones(2)), ())


def test_a_pullback_may_leave_a_jitted_function_and_be_called_often() -> None:
    f = lambda x, y: jnp.sin(x) * y
    y, pull = jax.jit(functools.partial(xform.vjp, f))(X, X + 1)
    for ct in (X, X * 2):
        want = jax.vjp(f, X, X + 1)[1](ct)
        close(pull(ct), want, 1e-6)
        close(jax.jit(lambda p, ct: p(ct))(pull, ct), want, 1e-6)
    eye = jnp.eye(3)
    close(jax.vmap(pull)(eye), jax.vmap(jax.vjp(f, X, X + 1)[1])(eye), 1e-6)
    chex.assert_trees_all_close(y, f(X, X + 1), rtol=1e-6)


def test_pullbacks_of_a_vmapped_function() -> None:
    xs = np.stack([X, X + 1])
    _, pulls = jax.vmap(lambda x: xform.vjp(jnp.sin, x))(xs)
    got = jax.vmap(lambda p, ct: p(ct)[0])(pulls, xs)
    close(got, np.cos(xs) * xs, 1e-6)


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("argnums", [0, (0,), (1, 0), -1])
def test_fwd_and_bwd(argnums, jitted: bool) -> None:
    f = lambda x, y: {"s": jnp.sin(x) * y, "n": 3}
    fwd, bwd = xform.fwd_and_bwd(f, argnums, jitted=jitted)
    jax_fwd, jax_bwd = (
        jax.api.fwd_and_bwd(f, argnums) if hasattr(jax, "api") else _jax_fwd_and_bwd(f, argnums)
    )
    y, residuals = fwd(X, X + 1)
    want, jax_residuals = jax_fwd(X, X + 1)
    chex.assert_trees_all_close(y, want, rtol=1e-6)
    ct = {"s": X, "n": np.zeros((), F0)}
    chex.assert_trees_all_close(bwd(residuals, ct), jax_bwd(jax_residuals, ct), rtol=1e-6)


def _jax_fwd_and_bwd(f, argnums):
    return fwd_and_bwd(f, argnums, jitted=False)


def test_fwd_and_bwd_with_auxiliary_output_and_policy() -> None:
    f = lambda x: (jnp.sin(jnp.sin(x)), x * 2)
    fwd, bwd = xform.fwd_and_bwd(f, 0, has_aux=True, policy=xform.policies.save_nothing)
    y, residuals, aux = fwd(X)
    close(aux, X * 2, 1e-6)
    close(bwd(residuals, X), jax.vjp(lambda x: f(x)[0], X)[1](X)[0], 1e-6)
    assert len(jax.tree.leaves(residuals)) == 1
    chex.assert_shape(y, (3,))


def test_fwd_and_bwd_are_traced_once() -> None:
    f = chex.assert_max_traces(lambda x: jnp.sin(x) ** 2, n=1)
    fwd, bwd = xform.fwd_and_bwd(f, 0)
    for x in (X, X + 1, X + 2):
        y, residuals = fwd(x)
        close(bwd(residuals, y), jax.vjp(lambda x: jnp.sin(x) ** 2, x)[1](y)[0], 1e-5)


def test_a_jitted_gradient_is_traced_once() -> None:
    chex.clear_trace_counter()
    g = jax.jit(xform.grad(chex.assert_max_traces(lambda x: jnp.sum(jnp.sin(x)), n=1)))
    for x in (X, X + 1, X + 2):
        g(x)
    with pytest.raises(AssertionError):
        g(np.ones(4, np.float32))


@pytest.mark.usefixtures("x64")
def test_sharded_arrays_on_eight_devices() -> None:
    if jax.device_count() < 8:
        pytest.skip("needs eight devices")
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    at = lambda *spec: jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    w = np.linspace(-1, 1, 64).reshape(8, 8)
    x = np.sin(np.arange(64.0)).reshape(8, 8)

    def loss(w, x):
        layer = xform.remat(lambda h: jnp.tanh(h @ w))
        h, _ = lax.scan(lambda h, _: (layer(h), None), x, None, length=2)
        return jnp.mean(layer(lax.with_sharding_constraint(h, at("data", None))) ** 2)

    want = jax.value_and_grad(loss, (0, 1))(w, x)
    ws, xs = jax.device_put(w, at(None, "model")), jax.device_put(x, at("data", None))
    for policy in (None, xform.policies.save_dots):
        step = jax.jit(
            xform.value_and_grad(loss, (0, 1), policy=policy),
            out_shardings=(at(), (at(None, "model"), at("data", None))),
        )
        close(step(ws, xs), want)
    eager = xform.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w)))(ws, xs)
    close(eager, jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w)))(w, x))
    assert eager.sharding.is_equivalent_to(ws.sharding, 2)


class Variants(chex.TestCase):
    """Run with and without jit, and on one device or many, by chex."""

    @chex.variants(with_jit=True, without_jit=True, with_device=True, without_device=True)
    def test_value_and_grad(self) -> None:
        f = lambda p, x: jnp.mean((jnp.tanh(x @ p["w"]) + p["b"]) ** 2)
        p = {
            "w": jnp.asarray(np.linspace(-1, 1, 6, dtype=np.float32).reshape(3, 2)),
            "b": jnp.ones(2),
        }
        got = self.variant(xform.value_and_grad(f))(p, X)
        chex.assert_trees_all_close(got, jax.value_and_grad(f)(p, X), rtol=1e-5)

    @chex.variants(with_jit=True, without_jit=True)
    def test_hvp(self) -> None:
        f = lambda x: jnp.sum(jnp.sin(x) * x**2)
        got = self.variant(lambda x, v: xform.hvp(f, (x,), (v,)))(X, X)
        chex.assert_trees_all_close(got, jax.hessian(f)(X) @ X, rtol=1e-5)


@pytest.mark.parametrize("extremum", [jnp.max, jnp.min])
def test_the_derivative_of_an_extremum_that_is_nan_is_nan(extremum) -> None:
    x = jnp.array([[np.nan, 1.0, 2.0], [3.0, 5.0, 5.0]])
    f = lambda x: jnp.sum(extremum(x, 1))
    for t in (lambda f: f, jax.jit):
        np.testing.assert_array_equal(t(xform.grad(f))(x), jax.grad(f)(x))
        (_, mine), (_, theirs) = xform.jvp(t(f), (x,), (x,)), jax.jvp(f, (x,), (x,))
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("jitted", [False, True])
def test_linear_transpose_of_a_transposed_pullback_is_correct(jitted) -> None:
    """In a trace, a barrier ties the saved values to the cotangent, on which they do not depend."""
    b = jnp.arange(9.0).reshape(3, 3)
    f = jax.custom_vjp(lambda x: b @ x**2)
    f.defvjp(lambda x: (b @ x**2, x), lambda x, ct: (2 * (b.T @ ct) * x,))
    x = jnp.arange(1.0, 4.0)

    def push(v):
        pull = xform.vjp(f, x)[1]
        return xform.linear_transpose(pull, x)((v,))[0]

    g = lambda ct: xform.linear_transpose(push, x)(ct)[0]
    got = (jax.jit(g) if jitted else g)(jnp.ones(3))
    np.testing.assert_allclose(got, 2 * b.T @ jnp.ones(3) * x, rtol=1e-6)
