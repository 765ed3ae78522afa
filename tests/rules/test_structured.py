"""Loops, branches, calls and custom rules: nested, with every saved set, equal to JAX's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import batching

import xform
from tests.parameters import slow
from tests.reference import close, grads_agree

pytestmark = pytest.mark.usefixtures("x64")

X = np.array([0.3, -0.7, 1.1])
POLICIES = (
    xform.policies.save_everything,
    xform.policies.save_only_these_names("h"),
    xform.policies.save_nothing,
)


# Cheap to compile, unlike sines in 64 bits.
def bend(x):
    return x / (1.0 + x * x)


def bowl(x):
    return 1.0 / (2.0 + x * x)


def named(x):
    return checkpoint_name(x, "h")


@jax.custom_jvp
def softened(x, y):
    return x * x * y


@softened.defjvp
def _(primals, tangents):
    (x, y), (dx, dy) = primals, tangents
    return softened(x, y), 2 * x * y * dx + x * x * dy


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def powered(n, x, y):
    return x**n * y


def _powered_bwd(n, res, ct):
    x, y = res
    return n * x ** (n - 1) * y * ct, x**n * ct


powered.defvjp(lambda n, x, y: (powered(n, x, y), (x, y)), _powered_bwd)


@jax.custom_vjp
def two_results(x, y):
    return x * y, x + y


def _two_fwd(x, y):
    return (x.value * y.value, x.value + y.value), (x.value, y.value)


def _two_bwd(res, cts):
    zero = jax.custom_derivatives.SymbolicZero
    a, b = (jnp.zeros_like(res[0]) if isinstance(ct, zero) else ct for ct in cts)
    return a * res[1] + b, a * res[0] + b


two_results.defvjp(_two_fwd, _two_bwd, symbolic_zeros=True)


@jax.custom_vjp
def optimized(x):
    return x * x


optimized.defvjp(lambda x: (x * x, 2 * x), lambda r, ct: (r * ct,), optimize_remat=True)

small = jax.jit(lambda c, x: bend(c) * x)


@jax.jit
def large(c, x):
    for _ in range(25):
        c = c * x + c
    return named(c) * x


def loop(step, init, xs=None, length=3, **options):
    """The sum of a scan's last carry and of all it gave out."""
    carry, ys = lax.scan(step, init, xs, length=length, **options)
    floats = [y for y in jax.tree.leaves((carry, ys)) if jnp.issubdtype(y.dtype, jnp.floating)]
    return sum(jnp.sum(y * y) for y in floats)


def scan_in_scan(x):
    def inner(c, t):
        h = named(bend(c * x))
        return h * t, h * h

    def outer(c, t):
        c, ys = lax.scan(inner, c * t, jnp.arange(1.0, 3.0))
        return bowl(c) * x, ys.sum(0)

    return loop(outer, x, jnp.array([0.5, 1.5, 2.0]))


def cond_in_scan(x):
    def step(c, i):
        branches = (lambda c: named(bend(c)) * x, lambda c: bowl(-c * c), lambda c: 2.0 * x)
        return lax.switch(i, branches, c), lax.cond(i > 0, lambda: c * x, lambda: x)

    return loop(step, x, jnp.array([0, 1, 2, 0]), length=4)


def scan_in_cond(x):
    def long(x):
        return lax.scan(lambda c, _: (named(bend(c)) * x, c), x, None, length=3)

    def short(x):
        return x * x, jnp.zeros((3, *x.shape))

    return sum(
        jnp.sum(y * x) for p in (True, False) for y in lax.cond(x[0] > 0, long, short, p * x)
    )


def remat_in_scan(x):
    policy = xform.policies.save_only_these_names("h")
    layer = xform.remat(lambda c: bend(named(bend(c) * x)) ** 2, policy=policy)
    bare = jax.checkpoint(lambda c: bowl(named(bowl(c))) * x)
    return loop(lambda c, _: (bare(layer(c)), layer(c * x)), x)


def scan_in_remat(x):
    def run(x):
        return loop(lambda c, t: (named(bend(c * t)) * x, c), x, jnp.arange(1.0, 4.0))

    kept = jax.checkpoint(run, policy=jax.checkpoint_policies.save_only_these_names("h"))
    return xform.remat(run)(x) + kept(bowl(x))


NESTED = {
    "scan in scan": scan_in_scan,
    "cond in scan": cond_in_scan,
    "scan in cond": scan_in_cond,
    "remat in scan": remat_in_scan,
    "scan in remat": scan_in_remat,
    "remat in remat": lambda x: jnp.sum(
        xform.remat(lambda x: xform.remat(lambda x: named(bend(x)) * x)(bowl(x)))(x)
    ),
    "cond in cond": lambda x: jnp.sum(
        lax.cond(
            x[0] > 0,
            lambda x: lax.cond(x[1] > 0, bend, lambda x: named(bowl(x)) * x, x),
            lambda x: x * x,
            x,
        )
    ),
    "small jit in scan": lambda x: loop(lambda c, _: (small(named(c * x), x), c), x),
    "large jit in scan": lambda x: loop(lambda c, _: (large(c, x), c), x),
    "scan in large jit": lambda x: jnp.sum(
        jax.jit(lambda x: large(x, x) * loop(lambda c, _: (bend(c) * x, c), x))(x)
    ),
    "large jit twice": lambda x: jnp.sum(large(large(x, x), bowl(x))),
    "custom_jvp in scan": lambda x: loop(lambda c, _: (softened(named(c * x), x), c), x),
    "custom_vjp in scan": lambda x: loop(lambda c, _: (powered(3, named(c * x), x), c), x),
    "custom_vjp with symbolic zeros in scan": lambda x: loop(
        lambda c, _: (two_results(bend(c), x)[0], None), x
    ),
    "custom_vjp with optimize_remat in remat in scan": lambda x: loop(
        lambda c, _: (xform.remat(lambda c: optimized(optimized(c) * x))(c), c), x
    ),
    "custom_vjp in cond": lambda x: jnp.sum(
        lax.cond(x[0] > 0, lambda x: powered(2, x, x), lambda x: softened(x, x), x)
    ),
    "solve in scan": lambda x: loop(
        lambda c, _: (jnp.linalg.solve(jnp.diag(2 + bowl(c)) + jnp.outer(x, x) / 9, c), c), x
    ),
}


@pytest.mark.parametrize("name", slow(NESTED, *list(NESTED)[1::2]))
def test_nested_programs_at_every_saved_set(name: str) -> None:
    grads_agree(NESTED[name], X, policies=POLICIES, ways=("jit", "vmap"))


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize("name", NESTED)
def test_nested_programs_run_eagerly(name: str, policy) -> None:
    grads_agree(NESTED[name], X, policies=(policy,), ways=("alone",))


def dots_in_scan_in_scan(x, w):
    def inner(c, _):
        return bend(c @ w), c

    def outer(c, t):
        c, ys = lax.scan(inner, c + t, None, length=2)
        return c @ w, ys.sum(0)

    return loop(outer, x, jnp.arange(3.0))


@pytest.mark.parametrize(
    "policy", [xform.policies.save_dots, jax.checkpoint_policies.dots_with_no_batch_dims_saveable]
)
def test_nested_scans_that_save_dots(policy) -> None:
    w = np.linspace(-0.5, 0.7, 9).reshape(3, 3)
    grads_agree(dots_in_scan_in_scan, X, w, argnums=(0, 1), policies=(policy,))


KEY = jax.random.key(7)

CARRIES = {
    "0-d": lambda x: loop(lambda c, _: (bend(c) * x[0], c), x[1]),
    "empty": lambda x: loop(
        lambda c, _: ((bend(c[0]) * x, c[1] * x), c[1]), (x, jnp.zeros((0, 3)))
    ),
    "integer": lambda x: loop(lambda c, _: ((c[0] * x / (c[1] + 1), c[1] + 1), c[1]), (x, 0)),
    "bool": lambda x: loop(
        lambda c, _: ((jnp.where(c[1], bend(c[0]), x * c[0]), ~c[1]), c[1]), (x, False)
    ),
    "key": lambda x: loop(
        lambda c, _: (
            (c[0] * x * jax.random.uniform(c[1], x.shape), jax.random.split(c[1])[0]),
            None,
        ),
        (x, KEY),
    ),
    "keys scanned": lambda x: loop(
        lambda c, k: (bend(c * x) * jax.random.bernoulli(k, 0.6, x.shape), None),
        x,
        jax.random.split(KEY, 3),
    ),
    "constant start that becomes active": lambda x: loop(
        lambda c, _: ((c[0] + x * c[1], bend(c[0])), None), (jnp.zeros(3), jnp.ones(3))
    ),
    "constant start, active late through another carry": lambda x: loop(
        lambda c, _: ((c[1], c[2], bend(c[2]) + x), c[0]), (jnp.zeros(3),) * 3, length=4
    ),
    "constant": lambda x: loop(lambda c, _: ((c[0] * c[1], c[1]), None), (x, jnp.full(3, 0.5))),
    "passthrough, active": lambda x: loop(lambda c, _: ((bend(c[0] * c[1]), c[1]), None), (x, x)),
    "swapped": lambda x: loop(lambda c, _: ((c[1], bend(c[0])), None), (x, x * x)),
    "reset": lambda x: loop(lambda c, _: (jnp.zeros_like(c) + 0.1, bend(c)), x),
    "cut": lambda x: loop(lambda c, _: (lax.stop_gradient(c) * x, bend(c)), x),
    "only its first value is read": lambda x: loop(lambda c, _: (jnp.ones_like(x), c * x), x),
    "unused": lambda x: jnp.sum(
        lax.scan(lambda c, _: ((bend(c[0]), c[1] * x), c[1]), (x, x), None, length=3)[0][0]
    ),
    "unused outputs": lambda x: jnp.sum(
        lax.scan(lambda c, t: (c * t, (c, c * x, t * x)), x, jnp.arange(3.0))[1][2]
    ),
    "none of the outputs": lambda x: jnp.sum(x)
    + 0 * loop(lambda c, _: (lax.stop_gradient(c), 1), x),
    "complex": lambda x: loop(
        lambda c, _: (c * (x + 0.5j), jnp.real(c)), x + 0j
    ),
    "float32 beside float64": lambda x: loop(
        lambda c, _: ((bend(c[0]), c[1] * c[0].astype(c[1].dtype)), None),
        (x.astype(jnp.float32), x),
    ),
    "nothing": lambda x: loop(lambda c, t: (c, bend(t) * x), (), x),
    "dict and None": lambda x: loop(
        lambda c, _: ({"a": c["a"] * x, "b": None}, None), {"a": x, "b": None}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CARRIES)
def test_carries_of_every_kind(name: str) -> None:
    single = {"tolerance": 1e-6} if "float32" in name else {}
    grads_agree(CARRIES[name], X, policies=POLICIES[::2], ways=("vmap",), **single)


@pytest.mark.parametrize("name", CARRIES)
def test_carries_of_every_kind_in_forward_mode(name: str) -> None:
    f = CARRIES[name]

    @jax.jit
    def pushed(x, dx):
        return (
            xform.jvp(f, (x,), (dx,)),
            (f(x), xform.linearize(f, x)[1](dx)),
        ), (
            jax.jvp(f, (x,), (dx,)),
            jax.jvp(f, (x,), (dx,)),
        )

    close(*pushed(X, np.cos(X)), tolerance=1e-6 if "float32" in name else 1e-10)


OPTIONS = {
    "length 0": {"length": 0},
    "length 1": {"length": 1},
    "reverse": {"reverse": True},
    "unroll 2": {"unroll": 2},
    "unroll 2 of 3 in reverse": {"unroll": 2, "reverse": True},
    "unrolled": {"unroll": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_scan(name: str) -> None:
    options = {"length": 3, **OPTIONS[name]}

    def f(x, ts):
        def step(c, t):
            return (named(bend(c[0] * t)) * x, c[1] * 2.0), (c[0], t * x[0])

        return loop(step, (x, 1.0), ts[: options["length"]], **options)

    ts = np.array([0.4, -0.9, 1.3])
    grads_agree(f, X, ts, argnums=(0, 1), policies=POLICIES[::2], ways=("vmap",))


def test_scan_with_everything_stacked_and_nothing_carried() -> None:
    grads_agree(lambda x: jnp.sum(lax.map(lambda t: bend(t) * x, x)), X)


def test_associative_scan() -> None:
    grads_agree(lambda x: jnp.sum(lax.associative_scan(jnp.multiply, bend(x)) ** 2), X)


# Branches.

SWITCHES = {
    "a branch that is constant": lambda x, i: lax.switch(i, [bend, lambda x: jnp.ones(3)], x),
    "branches that use different operands": lambda x, i: lax.switch(
        i, [lambda a, b: a * 2, lambda a, b: bend(b)], x, x * x
    ),
    "an operand passed through": lambda x, i: lax.switch(i, [lambda x: x, bend], x),
    "integer results": lambda x, i: lax.switch(
        i, [lambda x: (x * x, 1), lambda x: (bend(x), 2)], x
    )[0],
    "one branch": lambda x, i: lax.switch(0 * i, [bend], x),
    "index out of range": lambda x, i: lax.switch(i + 5, [bend, bowl], x),
    "residuals of many types, float32 among them": lambda x, i: lax.switch(
        i,
        [
            lambda x: bend(bend(x).astype(jnp.float32)).astype(x.dtype) * jnp.sum(bowl(x)),
            lambda x: bowl(jnp.sum(x) ** 2) * jnp.where(x > 0, x, bend(x)),
        ],
        x,
    ),
    "a nan in the branch not taken": lambda x, i: (
        lax.switch(i, [lambda x: jnp.log(x * x), lambda x: jnp.log(-jnp.abs(x))], x) * (1 - i)
    ),
    "loops of different lengths": lambda x, i: lax.switch(
        i,
        [
            lambda x: lax.scan(lambda c, _: (bend(c) * x, None), x, None, length=2)[0],
            lambda x: lax.scan(lambda c, _: (bowl(c) * x, None), x, None, length=4)[0],
        ],
        x,
    ),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_branches(name: str) -> None:
    f = SWITCHES[name]
    indices = (0,) if "nan" in name else (0, 1)
    for i in indices:
        grads_agree(
            lambda x, i: jnp.sum(f(x, i) * x),
            X,
            np.int32(i),
            policies=POLICIES[::2],
            ways=("vmap",) if "nan" not in name else ("jit",),
            tolerance=1e-6 if "float32" in name else 1e-10,
        )


def test_a_switch_whose_index_is_batched() -> None:
    def f(x, i):
        return jnp.sum(lax.switch(i, [bend, lambda x: named(bowl(x)) * x, jnp.square], x))

    xs, at = jnp.stack([X, X + 1, X - 1]), jnp.arange(3)
    for policy in POLICIES:
        close(jax.vmap(xform.grad(f, policy=policy))(xs, at), jax.vmap(jax.grad(f))(xs, at))


def test_a_predicate_that_depends_on_the_input() -> None:
    grads_agree(lambda x: jnp.sum(lax.cond(jnp.sum(x) > 0, bend, jnp.square, x) * x), X)


# While loops: forward mode.


def newton(x):
    return lax.while_loop(
        lambda s: s[0] < 5, lambda s: (s[0] + 1, 0.5 * (s[1] + x / s[1]), s[2]), (0, 1.0 + x, 2.0)
    )[1]


def late(x):
    """A carry that starts from a constant and becomes active."""
    return lax.while_loop(
        lambda s: s[0] < 3, lambda s: (s[0] + 1, s[2], bend(s[2]) + x), (0, x * 0 + 1, 0.3 + 0 * x)
    )[1]


@pytest.mark.parametrize(
    "f", [newton, late, lambda x: lax.fori_loop(0, jnp.int32(x[0] + 2), lambda i, c: c * x, x)]
)
def test_while_in_forward_mode(f) -> None:
    x, dx = abs(X), np.cos(X)
    want = jax.jvp(f, (x,), (dx,))
    for way in (lambda f: f, jax.jit):
        close(way(lambda x: xform.jvp(f, (x,), (dx,)))(x), want)
        close(way(lambda x: xform.linearize(f, x)[1](dx))(x), want[1])
    close(jax.jit(xform.jacfwd(xform.jacfwd(f)))(x), jax.jit(jax.jacfwd(jax.jacfwd(f)))(x))
    close(
        jax.vmap(lambda s: xform.jvp(f, (x * s,), (dx,))[1])(jnp.array([1.0, 2.0])),
        jax.vmap(lambda s: jax.jvp(f, (x * s,), (dx,))[1])(jnp.array([1.0, 2.0])),
    )


def test_a_while_that_carries_no_derivative_may_stand_in_reverse_mode() -> None:
    def f(x, n):
        steps = lax.while_loop(lambda i: i < n, lambda i: i + 1, 0)
        frozen = lax.while_loop(
            lambda y: jnp.sum(y) < 9, lambda y: y * 2, lax.stop_gradient(abs(x))
        )
        return jnp.sum(x * steps * frozen)

    grads_agree(f, X, np.int32(4))


def test_fori_loop_with_static_bounds_is_reversed() -> None:
    grads_agree(lambda x: jnp.sum(lax.fori_loop(0, 4, lambda i, c: bend(c) * x + i, x)), X)


# Calls and custom rules.


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


def test_a_large_jit_is_compiled_once_however_often_it_is_called() -> None:
    def f(x):
        for _ in range(4):
            x = large(x, x)
        return jnp.sum(x)

    jaxpr = jax.make_jaxpr(xform.grad(f))(X)
    calls = [e for e in jaxpr.eqns if e.params.get("name", "").startswith("large")]
    assert len(calls) == 8
    assert len({id(e.params["jaxpr"]) for e in calls}) == 2


@pytest.mark.parametrize("inline", [True, False])
def test_donation_and_other_options_of_jit_do_not_reach_the_derivative(inline: bool) -> None:
    f = jax.jit(lambda x, n: jnp.sin(x) * n, static_argnums=1, donate_argnums=0, inline=inline)
    x = jnp.asarray(X)
    close(xform.grad(lambda x: jnp.sum(f(x, 3)))(x), 3 * jnp.cos(X))
    x.block_until_ready()


def test_named_calls_and_named_scopes() -> None:
    def f(x):
        with jax.named_scope("outer"):
            return jnp.sum(jax.named_call(bend, name="inner")(x) * x)

    grads_agree(f, X)


def test_effects_run_once_in_the_forward_pass(capfd) -> None:
    def f(x):
        jax.debug.print("seen {}", x[0])
        return jnp.sum(x * x)

    for way in (f, lambda x: lax.cond(True, f, jnp.sum, x), xform.remat(f)):
        close(jax.jit(xform.grad(way))(X), 2 * X)
        jax.effects_barrier()
        assert capfd.readouterr().out.count("seen") == 1


SHORT = ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]


@pytest.mark.parametrize("dtype", SHORT)
def test_a_custom_vjp_of_a_short_float_returns_any_float(dtype: str) -> None:
    for cotangent in [*SHORT, "float32"]:
        double = jax.custom_vjp(lambda x: x * 2)
        double.defvjp(lambda x: (x * 2, None), lambda _, ct, to=cotangent: ((ct * 2).astype(to),))
        f, x = lambda x, f=double: jnp.sum(f(x).astype("float32")), jnp.ones(2, dtype)
        close(xform.grad(f)(x), jax.grad(f)(x))


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
def test_what_a_custom_jvp_returns_as_a_symbolic_zero_does_not_move(way: str, jitted: bool) -> None:
    def f(x):
        a, b = _both(x, lax.stop_gradient(x))
        return a * _held(b)

    ways = {"plain": f, "jit": jax.jit(f)}
    ways["scan"] = lambda x: lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0]
    g = xform.grad(ways[way])
    np.testing.assert_allclose((jax.jit(g) if jitted else g)(2.0), jax.grad(ways[way])(2.0))
    with pytest.raises(RuntimeError, match="it moves"):
        xform.grad(lambda x: _held(ways[way](x)))(2.0)


def only_elsewhere(x):
    """A kernel of another platform, which has no lowering here."""
    return elsewhere_p.bind(x)


elsewhere_p = Primitive("test_elsewhere")
elsewhere_p.def_abstract_eval(lambda x: x)
batching.primitive_batchers[elsewhere_p] = lambda xs, axes: (elsewhere_p.bind(*xs), axes[0])


@pytest.mark.parametrize("jitted", [False, True])
def test_a_branch_of_another_platform_is_never_compiled(jitted: bool) -> None:
    xform.extend.linear(elsewhere_p, lambda ct, x: elsewhere_p.bind(ct))

    def f(x):
        branches = {"cpu": lambda x: jnp.sin(x) * x, "tpu": only_elsewhere}
        return lax.platform_dependent(x, default=only_elsewhere, **branches)

    how = jax.jit if jitted else lambda f: f
    g = lambda x: jnp.sin(x) * x
    ways = (
        lambda f: xform.grad(f)(2.0),
        lambda f: xform.jvp(f, (2.0,), (1.0,)),
        lambda f: xform.linearize(f, 2.0)[1](1.0),
        lambda f: jax.vmap(xform.grad(f))(jnp.arange(2.0)),
        lambda f: xform.grad(xform.grad(f))(2.0),
        lambda f: xform.grad(lambda x: xform.passes.Pipeline([xform.passes.Cse()])(f)(x))(2.0),
    )
    for way in ways:
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6),
            how(lambda: way(jax.jit(f)))(),  # noqa: B023
            way(g),
        )
