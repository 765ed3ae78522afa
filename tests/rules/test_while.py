"""Reverse mode through `lax.while_loop`, compared with a scan of the same length."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import xform
from tests.parameters import slow
from tests.reference import close
from xform import errors

pytestmark = pytest.mark.usefixtures("x64")

X = np.array([0.3, 0.7, 1.1])
LENGTHS = (0, 1, 2, 3, 5, 31, 32, 33, 63, 64, 65, 100, 1000, 5000)


def loop(step, x, n):
    """Run `n` steps, where `n` is known only at run time."""
    return lax.fori_loop(0, n, step, x)


def scan(step, x, n):
    """Run `n` steps, where `n` is known in advance."""
    return lax.scan(lambda c, i: (step(i, c), None), x, jnp.arange(n))[0]


def bend(i, c):
    """A step that is nonlinear, depends on its number, and keeps its scale."""
    return c / (1 + 0.1 * c * c) + 0.05 + 0.01 * (i % 3)


def turned(w):
    return lambda i, c: c + 0.01 * jnp.tanh(w @ c) - 0.001 * i / (1.0 + i) * c * c


def same_as_scan(f, *args, lengths=(0, 1, 5), tolerance=1e-12, allow_int=False):
    """Check that `f(loop or scan, n, *args)` has the same value and gradients with both."""
    every = tuple(range(1, len(args) + 1))
    ours = jax.jit(
        lambda n, *args: xform.value_and_grad(
            lambda n, *args: f(loop, n, *args), every, allow_int=allow_int
        )(n, *args)
    )
    for n in lengths:
        theirs = jax.value_and_grad(lambda n, *args: f(scan, n, *args), every, allow_int=allow_int)
        close(ours(n, *args), jax.jit(theirs, static_argnums=0)(n, *args), tolerance)


# The number of steps and of checkpoints.


def many(run, steps):
    return lambda x, w: jnp.sum(run(turned(w), x, steps) ** 2)


@functools.cache
def of_scans(w):
    gradients = [jax.jit(jax.value_and_grad(many(scan, n), (0, 1))) for n in LENGTHS]
    return [gradient(X, np.reshape(w, (3, 3))) for gradient in gradients]


@pytest.mark.parametrize("n", [1, 3, 4, 7, 32, 100])
def test_gradients_equal_a_scans_for_any_number_of_steps(n) -> None:
    w = np.random.default_rng(0).standard_normal((3, 3))
    with xform.policies.checkpoints_per_while_loop(n):
        ours = jax.jit(lambda n, x, w: xform.value_and_grad(many(loop, n), (0, 1))(x, w))
        for length, want in zip(LENGTHS, of_scans(tuple(w.flat)), strict=True):
            if n > 1 or length <= 1000:  # with one checkpoint, work grows quadratically
                close(ours(length, X, w), want, 1e-12)


def test_memory_does_not_grow_with_the_number_of_steps_but_with_that_of_checkpoints() -> None:
    x = jnp.zeros(500)

    def temp(steps, n):
        f = lambda x: jnp.sum(loop(bend, x, lax.optimization_barrier(steps)))
        with xform.policies.checkpoints_per_while_loop(n):
            return xform.memory_analysis(xform.grad(f), x).temp_bytes

    few, many = temp(10, 32), temp(100_000, 32)
    assert few == many
    assert 28 * x.nbytes < many - temp(10, 4) < 32 * x.nbytes


def test_no_step_copies_the_stored_states() -> None:
    compiled = jax.jit(xform.grad(lambda x, n: jnp.sum(loop(bend, x, n)))).lower(X, 9).compile()
    assert "f64[33,3]" in compiled.as_text()
    assert not re.search(r"= f64\[33,3\]\S* copy\(", compiled.as_text())
    f = jax.vmap(xform.grad(lambda x, n: jnp.sum(loop(bend, x, n))))
    batched = jax.jit(f).lower(np.stack([X, X]), np.array([3, 9])).compile().as_text()
    assert "f64[2,33,3]" in batched
    assert not re.search(r"= f64\[2,33,3\]\S* (copy|select)\(", batched)


def test_only_carries_that_the_backward_pass_reads_are_stored() -> None:
    def stored(step, x):
        table = xform.residuals(lambda x, n: jnp.sum(loop(step, x, n)), x, np.int64(3))
        return [(row.type, row.trips) for row in table if row.kind == "carry"]

    vector = ("float64[3]", 33)
    assert stored(lambda i, c: 2.0 * c, X) == []
    assert stored(lambda i, c: c * i, X) == [("int64[]", 33)]
    assert stored(lambda i, c: c * c, X) == [vector]
    assert stored(lambda i, c: jnp.exp(c), X) == [("float64[3]", 34)]  # and the state after it


def test_changing_the_checkpoint_count_retraces_a_cached_while_loop() -> None:
    layer = jax.jit(lambda x, n: jnp.sum(loop(bend, x, n)))
    texts = []
    for n in (3, 5, 3):
        with xform.policies.checkpoints_per_while_loop(n):
            texts.append(str(jax.make_jaxpr(xform.grad(layer))(X, 4)))
    assert "f64[4,3]" in texts[0]
    assert "f64[6,3]" in texts[1]
    assert "f64[4,3]" in texts[2]
    assert "f64[33,3]" in str(jax.make_jaxpr(xform.grad(layer))(X, 4))


@pytest.mark.parametrize("n", [0, -1, 2.5, "all", None])
def test_a_number_of_checkpoints_that_is_none(n) -> None:
    with pytest.raises(errors.WrongArgument, match="at least one"):
        xform.policies.checkpoints_per_while_loop(n)


# Types of states.


def x_if(on, n):
    return jnp.where(on, 0.5, 0.25) * n


CARRIES = {
    "tree": (
        lambda i, c: {"a": c["a"] * jnp.sin(c["b"]) + i, "b": 0.9 * c["b"] + 0.1 * c["a"].sum()},
        lambda x: {"a": x, "b": 2 * x},
    ),
    "integers and bools": (
        lambda i, c: (jnp.where(c[1], bend(i, c[0]), c[0] ** 2 * c[2]), ~c[1], (c[2] * 2 + 1) % 5),
        lambda x: (x, True, jnp.arange(3)),
    ),
    "random keys": (
        lambda i, c: (c[0] * jax.random.normal(c[1], c[0].shape), jax.random.split(c[1])[0]),
        lambda x: (x, jax.random.key(3)),
    ),
    "nothing": (lambda i, c: (c[0] + c[1].sum(), jnp.sin(c[1])), lambda x: (x, jnp.ones((0, 3)))),
    "weak types": (lambda i, c: (c[0] * c[1], c[1] + 0.25), lambda x: (x, 1.0)),
    "a constant that becomes active": (
        lambda i, c: (c[1], bend(i, c[1]) + c[2], c[2]),
        lambda x: (jnp.ones(3), jnp.full(3, 0.3), x),
    ),
    "what is set anew in each step": (lambda i, c: (jnp.zeros(3), c[1] + c[0]), lambda x: (x, x)),
    "what becomes a number": (
        lambda i, c: (2.0, c[1] * c[0] + x_if(c[2], c[3]), False, 3),
        lambda x: (1.5, x, True, 1),
    ),
    "what is exchanged": (lambda i, c: (c[1], c[0] * c[1]), lambda x: (x, bend(0, x))),
    "complex numbers": (lambda i, c: c * c * (0.5 + 0.2j) + 0.1, lambda x: x + 0.3j * x),
    "a custom rule": (lambda i, c: jax.nn.silu(c) + jax.nn.relu(c), lambda x: x),
    "a linear step": (lambda i, c: 1.1 * c + i, lambda x: x),
}


@pytest.mark.parametrize("name", slow(CARRIES, *list(CARRIES)[1::2]))
def test_carries(name) -> None:
    step, start = CARRIES[name]

    def f(run, n, x):
        out = jax.tree.leaves(run(step, start(x), n))
        return sum(jnp.sum(jnp.abs(v) ** 2) for v in out if jnp.issubdtype(v.dtype, np.inexact))

    with xform.policies.checkpoints_per_while_loop(3):
        same_as_scan(f, X)


def test_integer_inputs_have_float0_cotangents() -> None:
    def f(run, n, x, k):
        return jnp.sum(run(lambda i, c: (c[0] * c[1] + k[0], c[1]), (x, k), n)[0])

    same_as_scan(f, X, np.array([1, 2, 3]), allow_int=True)


# The predicate.


def newton(a):
    """Return the square root, and the number of steps."""
    step = lambda s: (s[0] + 1, 0.5 * (s[1] + a / s[1]))
    return lax.while_loop(lambda s: abs(s[1] * s[1] - a) > 1e-13 * a, step, (0, a))


@pytest.mark.parametrize("way", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_vjp_of_while_loop_whose_predicate_reads_carry_and_closure(way) -> None:
    with xform.policies.checkpoints_per_while_loop(4):
        (root, steps), pull = way(lambda a: xform.vjp(lambda a: newton(a)[::-1], a))(2e6)
        (slope,) = pull((1.0, np.zeros((), jax.dtypes.float0)))
    assert int(steps) == 15
    np.testing.assert_allclose((root, slope), (np.sqrt(2e6), 0.5 / np.sqrt(2e6)), rtol=1e-12)


def test_a_loop_that_takes_no_step() -> None:
    f = lambda x: jnp.sum(lax.while_loop(lambda c: False, jnp.exp, x) * x)
    close(xform.grad(f)(X), 2 * X)


# Nesting.


def inner(run, n):
    return lambda x: run(bend, x, n)


WRAPPED = {
    "jit": lambda run, n: jax.jit(inner(run, n)),
    "remat": lambda run, n: xform.remat(lambda x: inner(run, n)(jnp.sin(x)) ** 2),
    "cond": lambda run, n: lambda x: lax.cond(x[0] > 0, inner(run, n), jnp.sin, x),
    "scan": lambda run, n: (
        lambda x: lax.scan(lambda c, y: (inner(run, n)(c) * y, c), x, x)[1].sum(0)
    ),
    "while": lambda run, n: lambda x: run(lambda i, c: inner(run, n)(c) * x, x, 4),
    "while of changing length": lambda run, n: (
        lambda x: run(lambda i, c: loop(bend, c, i) if run is loop else masked(c, i, n), x, n)
    ),
}


def masked(c, i, n):
    return lax.scan(lambda c, j: (jnp.where(j < i, bend(j, c), c), None), c, jnp.arange(n))[0]


POLICIES = (None, xform.policies.save_nothing, xform.policies.save_dots)


@pytest.mark.parametrize("name", slow(WRAPPED, *list(WRAPPED)[1::2]))
def test_nested(name) -> None:
    f = lambda run, n, x: jnp.sum(WRAPPED[name](run, n)(x))
    want = jax.grad(lambda x: f(scan, 5, x))(X)
    for policy in POLICIES:
        with xform.policies.checkpoints_per_while_loop(3):
            ours = lambda n: xform.grad(lambda x: f(loop, n, x), policy=policy)  # noqa: B023
            close(jax.jit(lambda x, n: ours(n)(x))(X, 5), want, 1e-12)  # noqa: B023


def squares(run, n):
    return lambda x: jnp.sum(run(lambda i, c: bend(i, c) * c.sum() + 0.1 * i, x, n) ** 2)


HESSIANS = {
    "forward over reverse": lambda f: xform.jacfwd(xform.grad(f)),
    "reverse over reverse": lambda f: xform.jacrev(xform.grad(f)),
    "reverse over forward": lambda f: xform.jacrev(xform.jacfwd(f)),
    "linearize": lambda f: lambda x: jax.vmap(xform.linearize(xform.grad(f), x)[1])(np.eye(3)),
    "jax.jacfwd": lambda f: jax.jacfwd(xform.grad(f)),
}


@pytest.mark.parametrize("name", slow(HESSIANS, *list(HESSIANS)[1:]))
def test_second_derivatives(name) -> None:
    with xform.policies.checkpoints_per_while_loop(3):
        ours = jax.jit(lambda x, n: HESSIANS[name](squares(loop, n))(x))
        for n in (0, 1, 5):
            close(ours(X, n), jax.jacfwd(jax.grad(squares(scan, n)))(X))


@pytest.mark.slow
def test_third_derivatives() -> None:
    third = jax.jacfwd(jax.jacfwd(jax.grad(squares(scan, 4))))(X)
    with xform.policies.checkpoints_per_while_loop(2):
        f = lambda n: xform.jacfwd(xform.jacrev(xform.grad(squares(loop, n))))
        close(jax.jit(lambda x, n: f(n)(x))(X, 4), third)


# Batches.

XS, NS = np.stack([X, 2 * X, 0.5 * X]), np.array([2, 40, 0])


def end(run, w):
    return lambda x, n: run(lambda i, c: bend(i, w @ c), x, n)


W = np.eye(3) + 0.1


def one_by_one(f):
    return [f(x, int(n)) for x, n in zip(XS, NS, strict=True)]


def test_lanes_of_different_length() -> None:
    got = jax.jit(jax.vmap(lambda x, n: xform.vjp(lambda x: end(loop, W)(x, n), x)[1](x)[0]))
    want = one_by_one(lambda x, n: jax.vjp(lambda x: end(scan, W)(x, n), x)[1](x)[0])
    close(got(XS, NS), jnp.stack(want), 1e-12)
    twice = jax.jit(jax.vmap(jax.vmap(got, (None, 0)), (0, None)))(XS[:, None], NS[:, None])
    close(jnp.stack([twice[i, i, 0] for i in range(3)]), jnp.stack(want), 1e-12)


@pytest.mark.slow
def test_lanes_within_the_function_that_is_differentiated() -> None:
    f = lambda xs, w: jnp.sum(jax.vmap(end(loop, w))(xs, NS) ** 2)
    theirs = lambda xs, w: sum(
        jnp.sum(end(scan, w)(x, n) ** 2) for x, n in zip(xs, [2, 40, 0], strict=True)
    )
    close(jax.jit(xform.grad(f, (0, 1)))(XS, W), jax.grad(theirs, (0, 1))(XS, W), 1e-12)
    dxs = np.cos(XS), np.sin(W)
    close(xform.jvp(f, (XS, W), dxs), jax.jvp(theirs, (XS, W), dxs))
    hvp = jax.jit(lambda xs, w: xform.jvp(xform.grad(f, (0, 1)), (xs, w), dxs)[1])
    close(hvp(XS, W), jax.jvp(jax.grad(theirs, (0, 1)), (XS, W), dxs)[1])


@pytest.mark.parametrize(
    "name", slow(["forward over reverse", "reverse over reverse"], "reverse over reverse")
)
def test_second_derivatives_of_lanes(name) -> None:
    want = one_by_one(lambda x, n: jax.jacfwd(jax.grad(squares(scan, min(n, 6))))(x))
    with xform.policies.checkpoints_per_while_loop(3):
        got = jax.jit(jax.vmap(lambda x, n: HESSIANS[name](squares(loop, n))(x)))
        close(got(XS, np.minimum(NS, 6)), jnp.stack(want))


def test_a_step_that_is_singular_where_a_lane_ends() -> None:
    def f(x, w):
        return lax.while_loop(lambda x: x > 0, lambda x: x - w * jnp.sqrt(x) - 0.1, x)

    xs = np.array([1.0, 2.0, 0.7, -1.0])
    want = sum(xform.grad(f, 1)(x, 0.3) for x in xs)
    assert np.isfinite(want)
    close(xform.grad(lambda w: jnp.sum(jax.vmap(f, (0, None))(xs, w)))(0.3), want)
    close(jnp.sum(jax.vmap(xform.grad(f, 1), (0, None))(xs, 0.3)), want)


def test_pullbacks_of_different_length_may_be_batched_afterwards() -> None:
    one = lambda x, n: xform.vjp(lambda x: end(loop, W)(x, n), x)[1]
    want = one_by_one(lambda x, n: jax.vjp(lambda x: end(scan, W)(x, n), x)[1](x)[0])
    for pulls in (jax.vmap(one)(XS, NS), lax.map(lambda a: one(*a), (XS, NS))):
        close(jax.vmap(lambda pull, ct: pull(ct)[0])(pulls, XS), jnp.stack(want), 1e-12)


# Meshes.


def on_devices(f, *specs, check_vma=True):
    mesh = jax.make_mesh((4,), ("d",), devices=jax.devices()[:4], axis_types=(AUTO,))
    return jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)


AUTO = jax.sharding.AxisType.Auto
ROWS = np.linspace(0.1, 2.0, 12).reshape(4, 3)


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(check_vma) -> None:
    def f(w, x, n):
        y = loop(lambda i, c: bend(i, c @ w) + 0.01 * lax.psum(c.sum(), "d"), x, n)
        return lax.psum(jnp.sum(y**2), "d")

    def plain(w, x):
        return jnp.sum(scan(lambda i, c: bend(i, c @ w) + 0.01 * c.sum(), x, 5) ** 2)

    mapped = on_devices(f, P(), P("d"), P(), check_vma=check_vma)
    got = jax.jit(lambda w, x, n: xform.grad(lambda w, x: mapped(w, x, n), (0, 1))(w, x))
    close(got(W, ROWS, 5), jax.grad(plain, (0, 1))(W, ROWS))


def varying(w, x, n):
    """A loop whose length differs between devices, and which sums nothing inside."""
    first = lax.pcast(jnp.int64(0), ("d",), to="varying")
    w = lax.pcast(w, ("d",), to="varying")
    y = lax.fori_loop(first, n[0], lambda i, c: bend(i, c @ w), x)
    return lax.psum(jnp.sum(y**2), "d")


def test_a_length_that_differs_between_devices() -> None:
    mapped = on_devices(varying, P(), P("d"), P("d"))
    lengths = np.array([3, 0, 40, 7])

    def plain(w, x):
        each = zip(x, [3, 0, 40, 7], strict=True)
        return sum(jnp.sum(scan(lambda i, c: bend(i, c @ w), x, n) ** 2) for x, n in each)

    got = jax.jit(lambda w, x, n: xform.grad(lambda w, x: mapped(w, x, n), (0, 1))(w, x))
    close(got(W, ROWS, lengths), jax.grad(plain, (0, 1))(W, ROWS))


def test_unvarying_values_in_a_loop_of_device_dependent_length_raise() -> None:
    def f(w, x, n):
        return lax.psum(jnp.sum(loop(lambda i, c: bend(0, c @ w), x, n[0])), "d")

    mapped = on_devices(f, P(), P("d"), P("d"))
    with pytest.raises(errors.NotDifferentiable, match=r"pcast\(x, \('d',\), to='varying'\)"):
        jax.jit(xform.grad(mapped))(W, ROWS, np.array([3, 0, 40, 7]))


# Effects, transposition, and JAX's own reverse mode.


def test_debug_print_in_a_recomputed_step_prints_once_per_step(capfd) -> None:
    def step(i, c):
        jax.debug.print("step {}", i)
        return bend(i, c)

    with xform.policies.checkpoints_per_while_loop(2):
        g = jax.jit(xform.grad(lambda x, n: jnp.sum(loop(step, x, n))))(X, 7)
    jax.block_until_ready(g)
    jax.effects_barrier()
    assert sorted(capfd.readouterr().out.split("\n")) == ["", *(f"step {i}" for i in range(7))]
    close(g, jax.grad(lambda x: jnp.sum(scan(bend, x, 7)))(X))


@pytest.mark.parametrize("wrap", [
    lambda f: f, lambda f: lambda i, c: loop(lambda _, c: f(i, c), c, 2),
], ids=["step", "loop"])  # fmt: skip
def test_a_step_that_must_not_be_run_again(wrap) -> None:
    def draw(i, c):
        return c * jax.experimental.io_callback(lambda: np.float64(2), X[0], ordered=False)

    with pytest.raises(
        errors.NotDifferentiable, match=r"must happen once \(IOEffect\), and the backward pass"
    ):
        jax.jit(xform.grad(lambda x, n: jnp.sum(loop(wrap(draw), x, n))))(X, 3)


def test_a_linear_loop_is_transposed_and_no_other() -> None:
    def f(step):
        return lambda x: lax.while_loop(
            lambda s: s[0] < 3, lambda s: (s[0] + 1, step(s[1])), (0, x)
        )[1]

    close(xform.linear_transpose(f(lambda c: 2 * c), X)(X)[0], 8 * X)
    with pytest.raises(errors.NotLinear, match="mul needs the value"):
        xform.linear_transpose(f(lambda c: c * c), X)
    with pytest.raises(errors.NotLinear, match="how many iterations"):
        xform.linear_transpose(lambda x: lax.while_loop(lambda c: c < 3, lambda c: 2 * c, x), 1.0)


@pytest.mark.parametrize("f", [
    xform.grad(lambda x: newton(x[0])[1]),
    lambda x: xform.vjp(lambda x: newton(x[0])[1], x)[0],
], ids=["gradient", "output"])  # fmt: skip
def test_jax_grad_over_xform_while_gradient_raises_and_jax_jvp_works(f) -> None:
    with pytest.raises(errors.NotDifferentiable, match=r"let xform\.grad or xform\.vjp be"):
        jax.grad(lambda x: jnp.sum(f(x)))(X)
    dx = np.cos(X)
    g = lambda x: xform.jvp(f, (x,), (dx,))[1]
    close(jax.jvp(f, (X,), (dx,))[1], g(X))
