"""An operation whose second run may give another value runs once, whatever the policy.

`lax.rng_uniform` is such an operation: it draws random numbers without a key.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback, pallas
from jax.experimental.pallas import tpu
from jax.extend.core import Primitive, jaxprs_in_params
from jax.sharding import PartitionSpec as P

import xform
from tests.reference import close
from xform import errors, extend, passes, policies
from xform.planner.candidates.nested import nested_candidates
from xform.planner.candidates.snapshots import snapshot_candidates
from xform.planner.problem import Problem
from xform.program.ir import trace
from xform.registry.repeatable import repeat_obstacles
from xform.slices.slicing import may_be_sliced

X = np.array([0.3, -0.7, 1.1], np.float32)


def draw():
    return lax.rng_uniform(0.5, 1.5, (3,))


def use(x, n):
    """Return a function of `x` whose derivative needs `n`."""
    return jnp.sin(x * n) ** 2 + jnp.cos(n @ jnp.outer(x, n))


# Each program returns a loss and its random numbers. It draws them itself if `n` is None.


def plain(x, n):
    n = draw() if n is None else n
    return jnp.sum(use(x, n)), n


def named(x, n):
    n = checkpoint_name(draw(), "n") if n is None else n
    return jnp.sum(use(x, n)), n


def viewed(x, n):
    n = draw() if n is None else n
    wide = jnp.broadcast_to(n[None], (2, 3))
    return jnp.sum(use(x, wide[0]) * wide), n


def called(x, n):
    @jax.jit
    def f(x, n):
        n = draw() if n is None else n
        y = x
        for _ in range(8):  # enough equations that the call stays a call
            y = use(y, n)
        return y, n

    y, n = f(x, n)
    return jnp.sum(y * x), n


def scanned(x, n):
    def body(c, n):
        n = draw() if n is None else n
        return use(c, n), n

    c, n = lax.scan(body, x, n, length=3)
    return jnp.sum(c * x), n


def scan_of_scans(x, n):
    def outer(c, n):
        def body(c, n):
            n = draw() if n is None else n
            return use(c, n), n

        return lax.scan(body, c, n, length=3)

    c, n = lax.scan(outer, x, n, length=2)
    return jnp.sum(c * x), n


def drawn_by_scan(x, n):
    if n is None:
        n = lax.scan(lambda c, _: (c * draw(), None), jnp.ones(3), None, length=3)[0]
    return jnp.sum(use(x, n)), n


def drawn_by_while(x, n):
    if n is None:
        step = lambda s: (s[0] + 1, s[1] * draw())
        n = lax.while_loop(lambda s: s[0] < 3, step, (0, jnp.ones(3)))[1]
    return jnp.sum(use(x, n)), n


def drawn_by_cond(x, n):
    n = lax.cond(x[0] > 0, draw, lambda: jnp.ones(3)) if n is None else n
    return jnp.sum(use(x, n)), n


def chosen(x, n):
    def branch(x):
        m = draw() if n is None else n
        return use(x, m), m

    y, n = lax.cond(x[0] > 0, branch, lambda x: (x, x), x)
    return jnp.sum(y * x), n


def region(x, n, policy=None):
    @functools.partial(jax.checkpoint, policy=policy)
    def f(x, n):
        n = draw() if n is None else n
        return use(use(x, n), n), n

    y, n = f(x, n)
    return jnp.sum(y * x), n


def region_of_scan(x, n):
    y, n = jax.checkpoint(scanned)(x, n)
    return jnp.sin(y), n


def scan_of_regions(x, n):
    @jax.checkpoint
    def body(c, n):
        n = draw() if n is None else n
        return use(use(c, n), n), n

    c, n = lax.scan(body, x, n, length=3)
    return jnp.sum(c * x), n


def forward_rule(x, n):
    """Return a loss whose custom_vjp draws in its forward rule alone."""
    if n is not None:
        return plain(x, n)
    f = jax.custom_vjp(lambda x: (jnp.sum(x), jnp.ones(3)))

    def forward(x):
        y, pull, n = jax.vjp(lambda x: plain(x, None), x, has_aux=True)
        return (y, n), pull

    f.defvjp(forward, lambda pull, ct: pull(ct[0]))
    return f(x)


def mapped(x, n):
    def f(x):
        m = draw() if n is None else n
        return jnp.sum(use(x, m)), m

    y, n = jax.vmap(f, out_axes=(0, None))(jnp.stack([x, 2 * x]))
    return jnp.sum(y), n


def on_devices(x, n):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    def f(x, *n):
        m = n[0] if n else lax.pcast(draw(), ("d",), to="varying")
        return use(x, m), m

    args = (x,) if n is None else (x, n)
    y, n = jax.shard_map(f, mesh=mesh, in_specs=P("d"), out_specs=P("d"))(*args)
    return jnp.sum(y * x), n


# How often each program draws.
PROGRAMS: dict[Callable[..., Any], int] = {
    plain: 1, named: 1, viewed: 1, called: 1, scanned: 3, scan_of_scans: 6, drawn_by_scan: 3,
    drawn_by_while: 1, drawn_by_cond: 1, chosen: 1, region: 1, region_of_scan: 3,
    scan_of_regions: 3, forward_rule: 1, mapped: 1, on_devices: 1,
}  # fmt: skip
POLICIES = {
    "default": None,
    "open regions": policies.open_regions(),
    "nothing": policies.save_nothing,
    "dots": policies.save_dots,
    "everything": policies.save_everything,
    "lowest": policies.MinCut(0.0, 0.0),
    "budget of saved bytes": policies.parse("saved:1KiB"),
}


def count(jaxpr: Any, name: str = "rng_uniform") -> int:
    """Return how often a program runs a primitive, counting a while loop as one iteration."""
    total = 0
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        inner = [count(j, name) for j in jaxprs_in_params(eqn.params)]
        trips = eqn.params["length"] if eqn.primitive is lax.scan_p else 1
        ran = max(inner, default=0) if eqn.primitive is lax.cond_p else sum(inner)
        total += (eqn.primitive.name == name) + trips * ran
    return total


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
def test_each_policy_draws_as_often_as_the_function(f, policy: str) -> None:
    derivative = xform.value_and_grad(lambda x: f(x, None), has_aux=True, policy=POLICIES[policy])
    assert count(jax.make_jaxpr(derivative)(X)) == PROGRAMS[f]


FORWARD_MODE = [f for f in PROGRAMS if f is not forward_rule]


@pytest.mark.parametrize("f", FORWARD_MODE, ids=lambda f: f.__name__)
def test_the_derivative_is_that_of_the_numbers_that_were_drawn(f) -> None:
    v = np.cos(X)

    @jax.jit
    def all_of_them(x):
        loss = lambda x: f(x, None)
        (y, n), g = xform.value_and_grad(loss, has_aux=True, policy=policies.save_nothing)(x)
        _, push, m = xform.linearize(loss, x, has_aux=True)
        return y, n, g, m, push(v)

    y, n, g, m, dy = all_of_them(X)
    loss = jax.jit(jax.value_and_grad(lambda x, n: f(x, n)[0]))
    close((y, g), loss(X, n), 1e-4)
    close(dy, jnp.vdot(loss(X, m)[1], v), 1e-4)
    numbers = np.reshape(n, (-1, 3))
    assert len(np.unique(numbers)) == numbers.size  # each iteration draws its own


@pytest.mark.parametrize("f", [plain, scanned, region, chosen], ids=lambda f: f.__name__)
def test_outside_jit(f) -> None:
    for policy in (None, policies.save_nothing):
        derivative = xform.value_and_grad(lambda x: f(x, None), has_aux=True, policy=policy)
        (y, n), g = derivative(X)
        close((y, g), jax.value_and_grad(lambda x: f(x, n)[0])(X), 1e-4)  # noqa: B023


@pytest.mark.parametrize("f", [plain, scanned], ids=lambda f: f.__name__)
def test_a_second_derivative(f) -> None:
    def slope(f, x):
        g, n = f(x)
        return jnp.sum(g * np.cos(X)), n

    first = xform.grad(lambda x: f(x, None), has_aux=True)
    second = xform.grad(lambda x: slope(first, x), has_aux=True, policy=policies.save_nothing)
    g, n = jax.jit(second)(X)
    given = jax.grad(lambda x: f(x, n), has_aux=True)
    close(g, jax.grad(lambda x: slope(given, x)[0])(X), 1e-3)


# While loops, and other derivatives that run a function again.


def loop(step, x):
    return lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, *step(*s[1:])), (0, *x))[1]


@jax.custom_batching.custom_vmap
def with_own_vmap(x):
    return x * draw()


with_own_vmap.def_vmap(lambda size, batched, x: (x * draw(), True))
CANNOT_SAVE = {
    "while_loop": lambda x: jnp.sum(loop(lambda c: (use(c, draw()),), (x,))),
    "custom_vmap": lambda x: jnp.sum(with_own_vmap(x)),
}


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "alone"])
@pytest.mark.parametrize("name", CANNOT_SAVE)
def test_draws_in_while_loops_and_custom_vmap_are_not_differentiable(name: str, jit) -> None:
    f = CANNOT_SAVE[name]
    text = rf"{name}\n.*must happen once \(rng_uniform\), and .* again\n"
    for policy in (None, policies.save_nothing):
        with pytest.raises(errors.NotDifferentiable, match=f"reverse-mode derivative of {text}"):
            jit(xform.grad(f, policy=policy))(X)
    with pytest.raises(errors.NotDifferentiable, match=f"linearize of {text}"):
        jit(lambda x: xform.linearize(f, x)[1](x))(X)


STEPS_THAT_MAY_RUN_AGAIN = {
    "only added": (lambda c, d: (2 * c + draw(), d), lambda c: 2 * c),
    "not differentiated": (lambda c, d: (jnp.sin(c), d + draw()), jnp.sin),
}


@pytest.mark.parametrize("name", STEPS_THAT_MAY_RUN_AGAIN)
def test_a_draw_that_no_derivative_reads_is_allowed_in_a_while_loop(name: str) -> None:
    step, same_derivative = STEPS_THAT_MAY_RUN_AGAIN[name]
    want = lambda x: same_derivative(same_derivative(same_derivative(x)))
    got = xform.grad(lambda x: jnp.sum(loop(step, (x, jnp.zeros(3)))))(X)
    close(got, jax.grad(lambda x: jnp.sum(want(x)))(X), 1e-5)


def test_a_backward_rule_draws_at_each_call() -> None:
    f = jax.custom_vjp(jnp.sin)
    f.defvjp(lambda x: (jnp.sin(x), None), lambda _, ct: (ct * draw(),))

    @jax.jit
    def twice(x):
        _, pull = xform.vjp(lambda x: jnp.sum(f(x)), x)
        return pull(np.float32(1))[0], pull(np.float32(1))[0]

    a, b = twice(X)
    assert (np.asarray(a) != np.asarray(b)).all()
    scan = lambda x: jnp.sum(lax.scan(lambda c, _: (f(c), None), x, None, length=3)[0])
    assert count(jax.make_jaxpr(xform.grad(scan))(X)) == 3


# Plans.


def long_loop(draws: bool):
    def body(c, _):
        n = draw() if draws else jnp.ones(3)
        return use(use(c, n), n), None

    return lambda x: [jnp.sum(lax.scan(body, x, None, length=64)[0])]


@pytest.mark.parametrize("draws", [False, True])
def test_no_plan_runs_the_iterations_of_a_loop_that_draws_again(draws: bool) -> None:
    problem = Problem(trace(long_loop(draws), X), (True,), (True,))
    found = [*nested_candidates(problem), *itertools.chain(*snapshot_candidates(problem))]
    assert bool(found) != draws


def test_a_plan_that_a_file_changed_to_run_iterations_again_is_refused() -> None:
    f = lambda x: long_loop(True)(x)[0]
    made = xform.plan(f, X, policy=policies.save_nothing, verify=False)
    inner, whole = made.record.decisions
    assert count(jax.make_jaxpr(xform.grad(f, policy=made))(X)) == 64
    edited = dataclasses.replace(made.record, decisions=({**inner, "saved": []}, whole))
    saved_anyway = dataclasses.replace(made, record=edited)
    assert count(jax.make_jaxpr(xform.grad(f, policy=saved_anyway))(X)) == 64
    edited = dataclasses.replace(made.record, decisions=({**inner, "snapshots": 2}, whole))
    with pytest.raises(
        errors.NotDifferentiable, match=r"\(rng_uniform\), and the plan stores only"
    ):
        jax.make_jaxpr(xform.grad(f, policy=dataclasses.replace(made, record=edited)))(X)


# What else must not run twice.


def host_values(x):
    return io_callback(lambda x: np.asarray(np.random.random(3), np.float32), x, x)


def kernel(x, kernel_body, **params):
    call = pallas.pallas_call(kernel_body, x, compiler_params=tpu.CompilerParams(**params))
    return call(x)


def copy(x_ref, y_ref):
    y_ref[...] = x_ref[...]


def draws_bits(x_ref, y_ref):
    y_ref[...] = tpu.prng_random_bits((8, 128)).astype(jnp.float32)


def draws_seeded_bits(x_ref, y_ref):
    tpu.prng_seed(0)
    draws_bits(x_ref, y_ref)


def exported(f):
    return export.export(jax.jit(f))(WIDE).call


WIDE = jax.ShapeDtypeStruct((8, 128), np.float32)
OBSTACLES: dict[str, tuple[Callable[..., Any], set[str]]] = {
    "draw": (lambda x: x * lax.rng_uniform(0, 1, ()), {"rng_uniform"}),
    "draw in a call": (jax.jit(lambda x: x * lax.rng_uniform(0, 1, ())), {"rng_uniform"}),
    "key": (lambda x: jax.random.uniform(jax.random.key(0)), set()),
    "keyed bits": (lambda x: lax.rng_bit_generator(jnp.zeros(4, "uint32"), (3,))[1], set()),
    "host": (host_values, {"IOEffect"}),
    "pure host": (lambda x: jax.pure_callback(np.sin, x, x), set()),
    "print": (lambda x: jax.debug.print("{}", x), {"DebugEffect"}),
    "ffi": (jax.ffi.ffi_call("f", WIDE), set()),
    "ffi with effects": (jax.ffi.ffi_call("f", WIDE, has_side_effect=True), {"FfiEffect"}),
    "kernel": (lambda x: kernel(x, copy), set()),
    "kernel with effects": (lambda x: kernel(x, copy, has_side_effects=True), {"pallas_call"}),
    "kernel without a seed": (lambda x: kernel(x, draws_bits), {"pallas_call"}),
    "kernel with a seed": (lambda x: kernel(x, draws_seeded_bits), set()),
    "exported": (exported(jnp.sin), set()),
    "exported draw": (exported(lambda x: x * lax.rng_uniform(0.0, 1.0, ())), {"call_exported"}),
    "local reference": (lambda x: lax.scan(lambda c, _: (reference(c), None), x, None, 2), set()),
    "composite": (lax.composite(host_values, name="tests.host"), {"IOEffect"}),
    "linear call": (lambda x: linear_call(host_values, x), {"IOEffect"}),
}


def linear_call(f, x):
    call = jax.custom_derivatives.linear_call
    return call(lambda _, x: f(x), lambda _, ct: ct, (), x)


@jax.jit
def reference(x):
    ref = jax.new_ref(x)
    ref[...] = 2 * ref[...]
    return ref[...]


@pytest.mark.parametrize("name", OBSTACLES)
def test_why_an_operation_must_not_run_twice(name: str) -> None:
    f, want = OBSTACLES[name]
    found = map(repeat_obstacles, trace(lambda x: jax.tree.leaves(f(x)), WIDE).equations)
    assert frozenset[str]().union(*found) == want


@functools.cache
def noisy_p() -> Primitive:
    """Return a primitive with a rule. It is declared in a test, not when tests are collected."""
    p = Primitive("noisy")
    p.def_impl(lambda x: x * np.random.random(x.shape).astype(np.float32))
    p.def_abstract_eval(lambda x: x)
    extend.pointwise(p, lambda y, x: y / x, traits=extend.Traits("elementwise", repeatable=False))
    return p


def noisy(x):
    return noisy_p().bind(x)


@pytest.mark.parametrize("draw", [noisy, host_values], ids=["trait", "effect"])
@pytest.mark.parametrize("policy", POLICIES)
def test_unrepeatable_traits_and_effects_run_once_under_every_policy(policy: str, draw) -> None:
    def f(x):
        y = draw(lax.stop_gradient(x))
        return jnp.sum(jnp.sin(x * y) * y), y

    g, y = xform.grad(f, has_aux=True, policy=POLICIES[policy])(X)
    close(g, np.cos(X * y) * y * y, 1e-5)


def test_slices_do_not_draw() -> None:
    for f in (noisy, jax.jit(noisy), lambda x: x * lax.rng_uniform(0.0, 1.0, ())):
        first, *_ = trace(lambda x: [f(x)], WIDE).equations  # noqa: B023
        assert not may_be_sliced(first)


def test_passes_neither_merge_nor_move_draws() -> None:
    def f(x):
        a, b = draw(), draw()
        c = lax.scan(lambda c, _: (c + draw(), None), x, None, length=3)[0]
        return jax.jit(lambda: draw())() * a * b * c

    pipeline = passes.Pipeline([passes.Inline(), passes.Fold(), passes.Cse(), passes.Dce()])
    assert count(jax.make_jaxpr(pipeline(f))(X)) == 6


def test_a_drawn_value_is_not_known_to_a_sparsity_pattern() -> None:
    def f(x):
        return jnp.where(lax.rng_uniform(0.0, 1.0, (3,)) < 0.5, x, 0.0)

    for at_point in (False, True):
        assert xform.sparse.sparsity(f, X, at_point=at_point).nonzeros == 3
