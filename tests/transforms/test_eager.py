"""Python control flow on differentiated values."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import xform
from tests.parameters import slow
from tests.reference import close
from tests.versions import STRONG, Box

X = np.array([0.5, 1.5, 2.5], np.float32)


def newton(x):
    y = x
    while abs(y * y - x) > 1e-6:
        y = 0.5 * (y + x / y)
    return y


@jax.custom_jvp
def bent(x):
    return jnp.sin(x) if x > 0 else jnp.cos(x)


@bent.defjvp
def _(primals, tangents):
    (x,), (dx,) = primals, tangents
    return bent(x), (2.0 * dx if x > 1 else 3.0 * dx)


@jax.custom_vjp
def turned(x):
    return jnp.sin(x) if x > 0 else jnp.cos(x)


turned.defvjp(
    lambda x: (turned(x), x if x > 0 else -x),
    lambda x, ct: (2.0 * ct if x > 1 else 3.0 * ct * jnp.cos(x),),
)

# Branches that JAX's own grad allows, on a scalar.
BRANCHES = {
    "if": lambda x: x * x if x > 0 else -x,
    "not": lambda x: -x if not x else x * 3,
    "while": newton,
    "int": lambda x: x * int(x),
    "index": lambda x: x * X[int(x)],
    "range": lambda x: sum((x**k for k in range(int(x))), 0.0),
    "comparison chain": lambda x: x if 0 < x < 1 else x * x,
    "min of Python": lambda x: min(x, 2.0) * max(x, 2.0),
    "custom_jvp": lambda x: bent(x) * x,
    "closure": lambda x: (lambda y: y * x if y > 1 else y)(x * 2),
    "scan and if": lambda x: (lambda y: y if y > 0 else -y)(
        lax.scan(lambda c, _: (jnp.sin(c) * x, None), x, None, length=3)[0]
    ),
    "concrete cond": lambda x: lax.cond(x > 0, jnp.sin, jnp.cos, x),
    "remat": lambda x: jax.checkpoint(lambda y: jnp.sin(y) * y)(x) if x > 0 else x,
}


@pytest.mark.parametrize("name", BRANCHES)
def test_python_branches_on_values(name: str) -> None:
    f, x = BRANCHES[name], 1.7
    close(xform.value_and_grad(f)(x), jax.value_and_grad(f)(x), 1e-5)
    close(xform.jvp(f, (x,), (2.0,)), jax.jvp(f, (x,), (2.0,)), 1e-5)
    close(xform.linearize(f, x)[1](2.0), jax.linearize(f, x)[1](2.0), 1e-5)
    close(xform.grad(xform.grad(f))(x), jax.grad(jax.grad(f))(x), 1e-4)
    close(xform.jvp(xform.grad(f), (x,), (1.0,)), jax.jvp(jax.grad(f), (x,), (1.0,)), 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", BRANCHES)
def test_python_branches_under_jax_grad(name: str) -> None:
    f = BRANCHES[name]
    close(jax.grad(xform.grad(f))(1.7), jax.grad(jax.grad(f))(1.7), 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["if", "while", "custom_jvp", "remat"])
def test_python_branches_in_third_order(name: str) -> None:
    f = BRANCHES[name]
    close(xform.grad(xform.grad(xform.grad(f)))(1.7), jax.grad(jax.grad(jax.grad(f)))(1.7), 1e-3)


def test_the_other_branch() -> None:
    close(xform.value_and_grad(BRANCHES["if"])(-0.3), jax.value_and_grad(BRANCHES["if"])(-0.3))


@pytest.mark.parametrize("x", [1.7, 0.3, -0.3])
def test_python_branches_in_a_custom_vjp(x: float) -> None:
    f = lambda x: turned(x) * x
    close(xform.value_and_grad(f)(x), jax.value_and_grad(f)(x), 1e-6)
    close(xform.grad(xform.grad(f))(x), jax.grad(jax.grad(f))(x), 1e-5)


def test_values_without_tangents_are_plain_arrays_not_tracers() -> None:
    def f(x, n):
        plain = (x > 1, jnp.argmax(x), x.astype(int), lax.stop_gradient(x), n, jnp.round(x))
        assert not any(isinstance(p, jax.core.Tracer) for p in plain)
        assert isinstance(x, jax.core.Tracer)
        return jnp.sum(x[x > 1] ** n) + jnp.sum(x[jnp.nonzero(x > 2)])

    close(
        xform.grad(f)(X, np.int32(3)), np.array([0, 3 * 1.5**2, 3 * 2.5**2 + 1], np.float32), 1e-6
    )


def test_unknown_values_raise_jaxs_own_error() -> None:
    """It names the function that the user wrote."""
    f = BRANCHES["if"]
    line = f.__code__.co_firstlineno
    with pytest.raises(jax.errors.TracerBoolConversionError, match=rf"test_eager\.py:{line}"):
        jax.jit(xform.grad(f))(3.0)
    with pytest.raises(jax.errors.TracerBoolConversionError, match=rf"test_eager\.py:{line}"):
        xform.residuals(f, 3.0)
    with pytest.raises(jax.errors.TracerBoolConversionError):
        jax.vmap(xform.grad(f))(X)
    with pytest.raises(jax.errors.ConcretizationTypeError):
        jax.vmap(xform.grad(lambda x: x * float(x)))(X)
    with pytest.raises(jax.errors.TracerBoolConversionError):
        xform.grad(lambda x: lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0])(3.0)


def test_values_that_are_not_batched_are_known_under_vmap() -> None:
    def f(x, w):
        return x * w if w > 1 else x

    close(jax.vmap(xform.grad(f, 1), (0, None))(X, 2.0), X)
    hessian = xform.hessian(lambda x: x[0] * x[1] if x[0] < 1 else x[0])(X[:2])
    close(hessian, np.array([[0, 1], [1, 0]], np.float32))


def test_the_maps_are_trees_that_trace() -> None:
    f = lambda x: (jnp.sin(x) * x if x[0] > 0 else x) * jax.nn.relu(x)
    y, pull = xform.vjp(f, X)
    want = jax.vjp(f, X)[1](y)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(pull))
    close(pull(y), want, 1e-6)
    close(jax.jit(lambda pull, ct: pull(ct))(pull, y), want, 1e-6)
    close(jax.vmap(pull)(jnp.stack([y, y]))[0][1], want[0], 1e-6)
    push = xform.linearize(f, X)[1]
    close(jax.jit(lambda push, dx: push(dx))(push, X), jax.jvp(f, (X,), (X,))[1], 1e-6)


def test_an_escaped_value_is_an_error() -> None:
    kept = []
    xform.grad(lambda x: (kept.append(x), x * x)[1])(3.0)
    with pytest.raises(jax.errors.UnexpectedTracerError):
        kept[0] + 1.0


def test_prints_and_callbacks_run_once_in_order(capfd) -> None:
    def f(x):
        print("a", x)
        jax.debug.print("b {}", x)
        y = lax.scan(lambda c, _: (jax.debug.print("c {}", c), (jnp.sin(c), None))[1], x, None, 2)
        return y[0] if y[0] > 0 else x

    xform.grad(f)(np.float32(1.0))
    jax.effects_barrier()
    assert [line.split()[0] for line in capfd.readouterr().out.splitlines()] == list("abcc")


CHAINS = {
    "add": lambda x: x + 1.0,
    "transposes": lambda x: x.T.reshape(x.shape) * 2.0,
    "sin": jnp.sin,
    "jit": jax.jit(lambda x: jnp.tanh(x) + 1.0),
    "scan": lambda x: lax.scan(lambda c, _: (c * 2.0, None), x, None, 2)[0],
}


@pytest.mark.parametrize("name", slow(CHAINS, "add", "sin", "jit"))
def test_no_more_is_kept_than_jax_keeps(name: str) -> None:
    def chain(x):
        for _ in range(5):
            x = CHAINS[name](x)
        return x

    def live(t):
        gc.collect()
        before = sum(a.nbytes for a in jax.live_arrays())
        result = t.vjp(chain, jnp.ones((64, 64)))
        gc.collect()
        return sum(a.nbytes for a in jax.live_arrays()) - before, result

    assert live(xform)[0] <= live(jax)[0] + 4096


def test_a_jitted_function_is_compiled_once(caplog) -> None:
    @jax.jit
    def layer(x):
        return jnp.tanh(jnp.sin(x) * jnp.cos(x) + jnp.exp(x)) * x

    f = lambda x: jnp.sum(layer(layer(x)))
    xform.grad(f)(X)
    with jax.log_compiles():
        close(xform.grad(f)(X), jax.grad(f)(X), 1e-5)
    compiled = [r.getMessage() for r in caplog.records if "Compiling" in r.getMessage()]
    assert not [m for m in compiled if "layer_forward" in m or "layer_backward" in m]


def test_the_leaves_of_a_map_run_no_code_of_the_users() -> None:
    """As in JAX, a custom_vjp's backward function runs when the map is called, not before."""
    calls: list[int] = []

    @jax.custom_vjp
    def scaled(x, y):
        return jnp.sin(x) * y

    def bwd(residuals, ct):
        calls.append(1)
        x, y = residuals
        return ct * jnp.cos(x) * y, None

    scaled.defvjp(lambda x, y: (scaled(x, y), (x, y)), bwd)
    f = lambda x: jnp.sum(jnp.sin(scaled(2 * x, x + 1)) ** 2)

    def turned(x, vjp):
        """Return the gradient by a map that was flattened and rebuilt."""
        _, pull = vjp(f, x)
        leaves, tree = jax.tree.flatten(pull)
        n = len(calls)
        assert n == before
        return jax.tree.unflatten(tree, leaves)(1.0)[0]

    x = jnp.arange(3.0) + 0.3
    before = 0
    expected = jax.grad(f)(x)
    before = len(calls)
    np.testing.assert_allclose(turned(x, xform.vjp), expected, rtol=1e-6)
    assert len(calls) == before + 1
    before = len(calls)
    push = lambda x: jnp.sum(jax.vjp(f, x)[1](1.0)[0])
    second = jax.grad(push)(x)
    before = len(calls)
    np.testing.assert_allclose(xform.grad(lambda x: jnp.sum(turned(x, xform.vjp)))(x), second,
                               rtol=1e-5)  # fmt: skip
    # The contents of the map can be batched, and leave a compiled function.
    pulls = jax.vmap(lambda x: xform.vjp(f, x)[1])(jnp.stack([x, x]))
    np.testing.assert_allclose(jax.vmap(lambda p: p(1.0)[0])(pulls)[1], expected, rtol=1e-6)


def test_a_wrong_cotangent_is_refused_in_a_map_that_was_taken_apart() -> None:
    bad = jax.custom_vjp(lambda x: x * 1.0)
    bad.defvjp(lambda x: (x * 1.0, None), lambda _, ct: (ct[:1],))
    _, pull = xform.vjp(bad, jnp.ones(3))
    tree = jax.tree.structure(pull)
    with pytest.raises(ValueError, match=r"float32\[1\]"):
        jax.tree.unflatten(tree, jax.tree.leaves(pull))(jnp.ones(3))


# 64-bit NumPy numbers as users have them, where JAX has 32 bits: no warning.
WIDE = np.arange(4.0).reshape(2, 2) / 5 + 0.3
WIDE_OPERANDS = {
    "matmul": lambda x: x @ WIDE,
    "matmul from the left": lambda x: WIDE @ x,
    "add": lambda x: WIDE + x * np.float64(2),
    "power": lambda x: WIDE**x,
    "divide": lambda x: WIDE / x,
    "select": lambda x: lax.select(WIDE > 0.5, x, WIDE),
    "clamp": lambda x: lax.clamp(np.float64(0.4), x, np.float64(0.8)),
    "pad": lambda x: lax.pad(x, np.float64(2), ((1, 0, 0), (0, 0, 0))),
    "concatenate": lambda x: lax.concatenate([x, WIDE], 0),
    "update": lambda x: x.at[0].set(WIDE[1]) * x.at[np.array([0, 1])].add(WIDE),
    "convolve": lambda x: lax.conv(x[None, None], WIDE[None, None], (1, 1), "SAME"),
    "solve": lambda x: jnp.linalg.solve(x @ x.T + np.eye(2), WIDE),
    "triangular solve": lambda x: lax.linalg.triangular_solve(x, WIDE, lower=True),
    "complex": lambda x: jnp.abs(x * (WIDE + 1j * WIDE)),
    "scan": lambda x: lax.scan(lambda c, a: (c * a, c), x, WIDE)[1],
    "cond": lambda x: lax.cond(x[0, 0] > 0, lambda x, y: x * y, lambda x, y: x, x, WIDE),
    "checkpoint": lambda x: jax.checkpoint(lambda x, y: jnp.sin(x) @ y)(x, WIDE),
    "relu6": lambda x: jax.nn.relu6(WIDE * x),
}


@pytest.mark.parametrize("name", slow(WIDE_OPERANDS, *list(WIDE_OPERANDS)[6:]))
def test_numpy_in_64_bits(name: str) -> None:
    f = WIDE_OPERANDS[name]
    y, pull = xform.vjp(f, WIDE)
    assert jax.typeof(y).dtype == np.float32
    ct = np.full(y.shape, 0.5)
    close(pull(ct), jax.vjp(f, WIDE)[1](jnp.asarray(ct)), 1e-4)
    close(xform.jvp(f, (WIDE,), (WIDE,)), jax.jvp(f, (WIDE,), (WIDE,)), 1e-4)


def test_every_transform_of_numpy_in_64_bits() -> None:
    f = lambda x: jnp.sum(jnp.sin(x @ WIDE) ** 2)
    for name in ("grad", "jacfwd", "jacrev", "hessian"):
        close(getattr(xform, name)(f)(WIDE), getattr(jax, name)(f)(WIDE), 1e-4)
    twice = lambda t: t.grad(lambda x: jnp.sum(t.grad(f)(x) * WIDE))
    close(twice(xform)(WIDE), twice(jax)(WIDE), 1e-4)
    many = np.stack([WIDE, 2 * WIDE])
    close(jax.vmap(xform.grad(f))(many), jax.vmap(jax.grad(f))(many), 1e-4)
    assert all(jax.typeof(x).dtype == np.float32 for x in xform.value_and_grad(f)(WIDE))
    fwd, bwd = xform.fwd_and_bwd(f, 0, jitted=False)
    close(bwd(fwd(WIDE)[1], np.float64(2)), 2 * jax.grad(f)(WIDE), 1e-4)
    close(xform.hvp(f, (WIDE,), (WIDE,)), twice(jax)(WIDE), 1e-4)
    transpose = xform.linear_transpose(lambda x: x @ WIDE, WIDE)
    close(transpose(WIDE)[0], jnp.asarray(WIDE @ WIDE.T, np.float32), 1e-6)


def test_a_rule_of_the_users_is_given_arrays() -> None:
    # For a Python number `(x > 0) & (x < 6)` would be a plain bool.
    for x in (7.0, 1.0, np.float64(1), WIDE):
        f = lambda x: jnp.sum(jax.nn.relu6(x))
        close(xform.grad(f)(x), jax.grad(f)(x))
    close(xform.grad(xform.grad(jax.nn.relu6))(1.0), jax.grad(jax.grad(jax.nn.relu6))(1.0))


def test_acosh_outside_of_its_domain_is_as_in_jax() -> None:
    def derivatives(lib, x):
        f, values = jnp.arccosh, []
        for _ in range(4):
            f = lib.grad(f)
            values.append(f(x))
        return values

    for x in (1.5, -1.5):
        theirs = derivatives(jax, x)
        if np.isfinite(theirs[0]):  # JAX 0.12 has no derivative there
            close(derivatives(xform, x), theirs, 1e-5)


@pytest.mark.skipif(Box is None, reason="this JAX has none")
def test_a_box_that_is_closed_over_can_be_read_and_set() -> None:
    """JAX's mutable values ask the trace for their contents."""
    box = Box(0.0)

    def f(x):
        box.set(lax.stop_gradient(x))
        return x * 3.0

    assert float(xform.grad(f)(2.0)) == 3.0
    assert float(box.get()) == 2.0
    assert float(xform.jvp(f, (4.0,), (1.0,))[1]) == 3.0
    assert float(box.get()) == 4.0
    assert float(xform.linearize(f, 5.0)[1](1.0)) == 3.0
    assert float(box.get()) == 5.0


@pytest.mark.parametrize("f", [lax.rsqrt, lax.square, lax.log1p, lax.atan, lax.erf, lax.acosh])
def test_a_weakly_typed_scalar_has_weakly_typed_derivatives(f) -> None:
    """As under JAX: a Python number times a constant of a rule is not a float32 array."""
    for own, theirs in (
        (xform.jvp(f, (1.3,), (0.7,)), jax.jvp(f, (1.3,), (0.7,))),
        ((xform.grad(f)(1.3),), (jax.grad(f)(1.3),)),
    ):
        wanted = [x.weak_type or f in STRONG for x in theirs]
        assert [x.weak_type for x in own] == wanted


def test_a_rule_may_return_a_number_as_tangent() -> None:
    @jax.custom_jvp
    def doubled(x):
        return 2.0 * x

    doubled.defjvp(lambda xs, dxs: (doubled(*xs), 7.0))
    for x in (3.0, np.float32(3)):
        y, push = xform.linearize(doubled, x)
        assert (float(y), float(push(1.0))) == (6.0, 7.0)
