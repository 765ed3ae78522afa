"""Scans with carries and options of every kind, compared with JAX's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import xform
from tests.reference import close, grads_agree
from tests.rules.programs import KEY, POLICIES, X, bend, loop, named
from xform.rules import loop as scan_rule

pytestmark = pytest.mark.usefixtures("x64")

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


@pytest.mark.parametrize("reverse", [False, True])
def test_scan_offloads_loop_invariant_and_per_step_values_to_host(reverse: bool) -> None:
    """The forward part reads it in the memory where it was made, not where it is offloaded."""
    sent = xform.policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["same", "each"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def loss(ws, x, s):
        def step(h, w):
            same = checkpoint_name(jnp.sin(s), "same")
            each = checkpoint_name(jnp.tanh(h @ w), "each")
            return jnp.sin(same * each), jnp.cos(each) * same

        h, ys = lax.scan(step, x, ws, reverse=reverse)
        return jnp.sum(h**2) + jnp.sum(ys)

    args = jnp.cos(jnp.arange(27.0)).reshape(3, 3, 3), X, 1 + X
    grads = xform.grad(loss, argnums=(0, 1, 2), policy=sent)
    close(jax.jit(grads)(*args), jax.grad(loss, argnums=(0, 1, 2))(*args))
    moved = str(jax.make_jaxpr(grads)(*args))
    assert moved.count("<host>[3]") > 0  # the loop-invariant one
    assert moved.count("<host>[3,3]") > 0  # one for each iteration


@pytest.mark.parametrize("reverse", [False, True])
def test_the_gradients_of_an_inner_loop_are_added_in_place(
    reverse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step of the outer loop reads the weights, and no stack of their gradients is made."""
    random = np.random.default_rng(0)
    ws = jnp.asarray(random.normal(size=(12, 64, 64)) / 8, np.float32)
    xs = jnp.asarray(random.normal(size=(5, 4, 64)), np.float32)

    def loss(ws, xs):
        def one(h, x):
            h = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h + x, ws, reverse=reverse)[0]
            return h, jnp.sum(h**2)

        return jnp.sum(lax.scan(one, jnp.zeros_like(xs[0]), xs)[1])

    def compiled():
        return jax.jit(xform.grad(loss, (0, 1))).lower(ws, xs).compile()

    in_place = compiled()
    close(in_place(ws, xs), jax.grad(loss, (0, 1))(ws, xs), 1e-5)
    monkeypatch.setattr(scan_rule, "SumInLoops", lambda: lambda step: step)
    jax.clear_caches()
    stacked = compiled()
    less = [c.memory_analysis().temp_size_in_bytes for c in (stacked, in_place)]
    assert less[0] - less[1] >= 0.9 * ws.nbytes
    jax.tree.map(np.testing.assert_array_equal, in_place(ws, xs), stacked(ws, xs))
