"""Derivatives of `shard_map` and inside it, against JAX's and against unsharded ones."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import xform
from tests.sharding import (
    BATCH,
    agree,
    checked,
    inputs,
    mesh,
    placed,
    same,
    shard,
    total,
    types,
    unchecked_is_slow,
    vary,
)
from xform import policies

pytestmark = pytest.mark.usefixtures("x64")

POLICIES = (policies.save_everything, policies.save_dots, policies.save_nothing)


def _layer(h: Any, w: Any) -> Any:
    return jnp.sin(jnp.tanh(h @ w) @ w)


def _scan(f: Callable[[Any], Any], x: Any, n: int = 3) -> Any:
    return lax.scan(lambda c, _: (f(c), None), x, None, length=n)[0]


@jax.jit
def _large(c: Any, w: Any) -> Any:
    for _ in range(26):  # too large to be inlined
        c = jnp.sin(c @ w)
    return c


@jax.custom_vjp
def _twice(a: Any, b: Any) -> Any:
    return jnp.sin(a) * b


_twice.defvjp(
    lambda a, b: (_twice(a, b), (a, b)),
    lambda r, ct: (2 * ct * jnp.cos(r[0]) * r[1], ct * jnp.sin(r[0])),
)


def _branches(x: Any, w: Any) -> Any:
    w = vary(w, x)  # a sum over devices hangs in one branch of a condition that varies over devices
    step = lambda c: lax.cond(c[0, 0] > 0, lambda c: jnp.sin(c @ w), lambda c: jnp.cos(c) * x, c)
    return total(_scan(step, x))


def _random(x: Any, w: Any) -> Any:
    """A function with keys, integers and booleans among the residuals."""
    key = jax.random.fold_in(jax.random.key(0), lax.axis_index("i"))

    def step(state: Any, _: Any) -> Any:
        c, key = state
        key, sub = jax.random.split(key)
        return (jnp.sin(c @ w) * jax.random.bernoulli(sub, 0.7, c.shape), key), None

    (c, _), _ = lax.scan(step, (x, key), None, length=2)
    return total(c * jax.random.uniform(key, c.shape, x.dtype))


BODIES: dict[str, Callable[[Any, Any], Any]] = {
    "scan": lambda x, w: total(_scan(lambda c: jnp.sin(c @ w), x)),
    "scan_of_psum": lambda x, w: total(
        _scan(lambda c: jnp.sin(lax.psum(c, "i") @ jnp.sin(w)) * x, x)
    ),
    "scan_in_scan": lambda x, w: total(
        _scan(lambda c: _scan(lambda c: jnp.sin(c @ w) * x, c, 2) + jnp.cos(c), x)
    ),
    "cond_in_scan": _branches,
    "jit_in_scan": lambda x, w: total(_scan(lambda c: _large(c, w), x, 2)),
    "custom_vjp_in_scan": lambda x, w: total(_scan(lambda c: _twice(c @ w, x), x)),
    "remat_in_scan": lambda x, w: total(_scan(lambda c: xform.remat(_layer)(c, w), x)),
    "remat": lambda x, w: total(xform.remat(_layer)(x, w) * x),
    "remat_of_psum": lambda x, w: total(
        xform.remat(lambda c, w: jnp.sin(lax.psum(jnp.sin(c @ w), "i") @ w) * c)(x, w)
    ),
    "random": _random,
}
SLOW = ("jit_in_scan", "random")


def _bodies(check_vma: bool) -> list[Any]:
    slow = BODIES if not check_vma else SLOW
    return [
        pytest.param(n, check_vma, marks=[pytest.mark.slow] if n in slow else []) for n in BODIES
    ]


@pytest.mark.parametrize(("name", "check_vma"), [*_bodies(True), *_bodies(False)])
def test_plans_change_no_value(name: str, check_vma: bool) -> None:
    """Three sets of saved values, for `shard_map` and inside it."""
    body = BODIES[name]
    f = shard(body, check_vma)

    def inside(grad: Any, **options: Any) -> Any:
        return shard(grad(body, (0, 1), **options), check_vma, BATCH, BATCH)

    mine = [xform.grad(f, (0, 1), policy=p) for p in POLICIES]
    ours = [inside(xform.grad, policy=POLICIES[1]), inside(jax.grad)]
    run = jax.jit(lambda *a: [g(*a) for g in (*mine, jax.grad(f, (0, 1)), *ours)])
    *got, wanted, got_inside, wanted_inside = run(*inputs())
    for grads in got:
        same(grads, wanted)
    same(got_inside, wanted_inside)


def test_collective_of_a_scanned_row() -> None:
    """A value that a scan saves once is computed before it, without the collectives of its body."""

    def body(x: Any, w: Any) -> Any:
        def step(c: Any, a: Any) -> Any:
            return jnp.sin(lax.psum(c @ a, "i") @ (jnp.sin(w) @ w)) * x, None

        return total(lax.scan(step, x, jnp.stack([w, w * 2]))[0])

    agree(shard(body), *inputs())


def _tanh(x: Any, w: Any) -> Any:
    return total(jnp.sin(jnp.tanh(x @ w) * x))


ORDERS = {
    "xform of xform and of jax": [(xform.grad, xform.grad), (xform.grad, jax.grad)],
    "jax of xform": [(jax.grad, xform.grad)],
}


@checked
@pytest.mark.parametrize(
    "order",
    ["xform of xform and of jax", "jax of xform"],
)
def test_second_order(order: str, check_vma: bool) -> None:
    pairs = [*ORDERS[order], (jax.grad, jax.grad)]
    f = shard(_tanh, check_vma)

    def over(outer: Any, inner: Any) -> Any:
        return outer(lambda x, w: jnp.sum(jnp.sin(inner(f, 1)(x, w))), (0, 1))

    run = jax.jit(lambda *a: [over(*p)(*a) for p in pairs])
    *got, wanted = run(*inputs())
    for grads in got:
        same(grads, wanted)


@unchecked_is_slow
def test_forward_over_reverse(check_vma: bool) -> None:
    f, (x, w) = shard(_tanh, check_vma), inputs()
    run = lambda jvp, grad: jvp(grad(f, (0, 1)), (x, w), (w[0] * x, w))
    same(*jax.jit(lambda: (run(xform.jvp, xform.grad), run(jax.jvp, jax.grad)))())


@unchecked_is_slow
def test_vmap(check_vma: bool) -> None:
    f, (x, w) = shard(_tanh, check_vma), inputs()
    xs = jnp.stack([x, x * 2])
    run = lambda grad: jax.vmap(grad(f, (0, 1)), (0, None))(xs, w)
    same(*jax.jit(lambda: (run(xform.grad), run(jax.grad)))())
    agree(lambda xs, w: jnp.sum(jax.vmap(f, (0, None))(xs, w) ** 2), xs, w)


@unchecked_is_slow
def test_around(check_vma: bool) -> None:
    """A scan, a remat region and a policy around a `shard_map`."""
    f = shard(lambda x, w: jnp.tanh(jnp.sin(x @ w)), check_vma, out_specs=P("i"))
    around = lambda x, w: jnp.sum(_scan(lambda c: xform.remat(f)(c, w) + f(c, w), x))
    agree(around, *inputs(), policy=policies.save_nothing)


@checked
def test_outputs(check_vma: bool) -> None:
    """Outputs that are sharded, replicated, integer, held by the pullback, and unused."""

    def body(x: Any, w: Any, n: Any) -> Any:
        h = jnp.tanh(x @ w)
        return h, total(h * n), n + 1, lax.pmean(jnp.sin(h), "i"), jnp.sin(w), jnp.exp(h)

    specs = (P("i"), P(), P("i"), P(), P(), P("i"))
    f = shard(body, check_vma, (P("i"), P(), P("i")), specs)

    def loss(x: Any, w: Any) -> Any:
        a, b, n, c, d, _ = f(x, w, jnp.arange(8)[:, None])
        return jnp.sum(a**2) + b * jnp.sum(n) + jnp.sum(c**3) + jnp.sum(d**2)

    agree(loss, *inputs())
    agree(lambda w: loss(inputs()[0], w), inputs()[1])


@checked
def test_residuals_leave_a_jitted_function(check_vma: bool) -> None:
    f = shard(lambda x, w: (jnp.sin(x @ w), w), check_vma, out_specs=(P("i"), P()))
    x, w = inputs()
    ct = x * w[0], w
    pull = jax.jit(lambda x, w: xform.vjp(f, x, w)[1])(x, w)
    same(*jax.jit(lambda pull: (pull(ct), jax.vjp(f, x, w)[1](ct)))(pull))


@checked
def test_an_output_that_is_kept_is_not_held_twice(check_vma: bool) -> None:
    f = shard(lambda x, w: jnp.tanh(x @ w), check_vma, out_specs=P("i"))
    y, pull = jax.jit(lambda x, w: xform.vjp(f, x, w))(*inputs())
    held = [v for v in jax.tree.leaves(pull) if v.shape[-2:] in ((8, 4), (1, 4))]
    assert len(held) == 2  # x and y
    same(*jax.jit(lambda y: (pull(y), jax.vjp(f, *inputs())[1](y)))(y))


@checked
def test_replicated_value_of_sharded_output(check_vma: bool) -> None:
    """All devices hold the value, and the output concatenates the copies: cotangents add up."""
    f = shard(lambda x, w: jnp.sin(w), check_vma, out_specs=P("i"))
    agree(lambda w: jnp.sum(f(inputs()[0], w) ** 2 * jnp.arange(32.0)[:, None]), inputs()[1])


@checked
def test_closed_over_value(check_vma: bool) -> None:
    agree(lambda x, w: shard(lambda x: total(jnp.sin(x @ w)), check_vma, (P("i"),))(x), *inputs())


# Meshes of several axes.


@unchecked_is_slow
def test_two_axes(check_vma: bool) -> None:
    """Residuals that vary over one axis, over the other and over both."""

    def body(x: Any, w: Any) -> Any:
        h = jnp.tanh(x @ w)
        s = jnp.sin(lax.psum(jnp.sum(h), "j")) + jnp.sum(jnp.cos(x))
        return h, lax.psum(jnp.sin(s) * jnp.sum(h) * jnp.sum(jnp.exp(w)), ("i", "j"))

    f = jax.shard_map(
        body,
        mesh=mesh(i=4, j=2),
        in_specs=(P("i"), P(None, "j")),
        out_specs=(P("i", "j"), P()),
        check_vma=check_vma,
    )

    def loss(x: Any, w: Any) -> Any:
        h, s = f(x, w)
        return jnp.sum(h**2) * s

    agree(loss, *inputs())


@unchecked_is_slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_partly_manual(kind: AxisType, check_vma: bool) -> None:
    with jax.set_mesh(mesh(kind, i=4, j=2)):
        f = jax.shard_map(
            lambda x, w: (jnp.sin(jnp.tanh(x @ w)), total(jnp.cos(x @ w))),
            in_specs=(P("i"), P()),
            out_specs=(P("i"), P()),
            axis_names={"i"},
            check_vma=check_vma,
        )
        x, w = inputs()
        args = jax.device_put(x, P("i")), jax.device_put(w, P(None, "j"))
        agree(lambda x, w: jnp.sum(f(x, w)[0] ** 2) * f(x, w)[1], *args)


def test_shard_map_in_shard_map() -> None:
    """JAX 0.10.2 does not compile its own gradient of this, so the reference is not sharded."""

    def inner(h: Any) -> Any:
        f = lambda h: lax.psum(jnp.sin(h) * h, "j")
        return jax.shard_map(f, in_specs=P(None, "j"), out_specs=P(), axis_names={"j"})(h)

    def body(x: Any, w: Any) -> Any:
        h = jnp.tanh(x @ w)
        return total(inner(h) * h[:, :2])

    def whole(x: Any, w: Any) -> Any:
        h = jnp.tanh(x @ w)
        s = jnp.sin(h) * h
        return jnp.sum((s[:, :2] + s[:, 2:]) * h[:, :2])

    with jax.set_mesh(mesh(i=4, j=2)):
        f = jax.shard_map(body, in_specs=(P("i"), P()), out_specs=P(), axis_names={"i"})
        same(jax.jit(xform.grad(f, (0, 1)))(*inputs()), jax.grad(whole, (0, 1))(*inputs()))


# Explicit axes: types say how values are sharded.


@unchecked_is_slow
def test_explicit_mesh(check_vma: bool) -> None:
    with jax.set_mesh(mesh(AxisType.Explicit)):
        x, w = placed(AxisType.Explicit)
        f = jax.shard_map(
            lambda x, w: (jnp.sin(jnp.tanh(x @ w)), total(jnp.cos(x @ w)), jnp.sin(w)),
            in_specs=(P("i"), P()),
            out_specs=(P("i"), P(), P()),
            check_vma=check_vma,
        )

        def loss(x: Any, w: Any) -> Any:
            a, b, c = f(x, w)
            return jnp.sum(a**2) * b + jnp.sum(c)

        agree(loss, x, w)
        agree(lambda x, w: jnp.sum(_scan(lambda c: f(c, w)[0], x)), x, w)
        run = lambda jvp: jvp(loss, (x, w), (x, w))
        same(*jax.jit(lambda: (run(xform.jvp), run(jax.jvp)))())
        pull = jax.jit(lambda ct: xform.vjp(lambda x: f(x, w)[0], x)[1](ct)[0])
        same(pull(jnp.ones((8, 4))), pull(jax.reshard(jnp.ones((8, 4)), P("i"))))


def test_a_table_that_is_read_twice_on_an_explicit_mesh() -> None:
    """Its cotangents are summed on the mesh of the trace: a gather's own mesh has `Auto` axes."""
    with jax.set_mesh(mesh(AxisType.Explicit)):
        rows = jax.device_put(jnp.arange(8) % 4, P("i"))

        def loss(table: Any) -> Any:
            found = table.at[rows].get(out_sharding=P("i", None))
            return jnp.sum(jnp.sin(found @ table.T))

        agree(loss, jnp.sin(jnp.arange(12.0)).reshape(4, 3))


# Data parallel training steps.


def _mlp(params: Any, x: Any, layer: Any = _layer) -> Any:
    for w in params:
        x = x + layer(x, w)
    return x


def _mlp_loss(params: Any, x: Any) -> Any:
    return jnp.mean(_mlp(params, x, xform.remat(_layer)) ** 2)


@pytest.mark.parametrize("how", ["shard_map", "Auto", "Explicit"])
def test_data_parallel(how: str) -> None:
    """Gradients of a sharded batch equal those on one device."""
    x, w = inputs()
    params = [w, w * 0.9, w * 1.1]
    wanted = jax.jit(jax.grad(_mlp_loss))(params, x)
    if how == "shard_map":
        mean = lambda params, x: lax.pmean(_mlp_loss(params, x), "i")
        same(jax.jit(xform.grad(shard(mean, True, (P(), P("i")))))(params, x), wanted)
        return
    kind = AxisType[how]
    with jax.set_mesh(mesh(kind)):
        params, x = jax.device_put((params, x), (P(), P("i")))
        got = jax.jit(xform.grad(_mlp_loss))(params, x)
        same(got, wanted)
        if kind is AxisType.Explicit:
            assert types(got) == types(params)


@unchecked_is_slow
def test_remat_saves_memory(check_vma: bool) -> None:
    """Unrolled on CPU, where XLA merges `jax.checkpoint`'s recompute with the forward pass."""
    params = [(jnp.zeros((64, 256)), jnp.zeros((256, 64))) for _ in range(6)]
    x = jnp.zeros((8192, 64))

    def layer(x: Any, w: Any) -> Any:
        return x + jnp.tanh(jnp.sin(x @ w[0])) @ w[1]

    def peak(layer: Any, policy: Any = None, inside: bool = False) -> int:
        loss = lambda params, x: lax.pmean(jnp.mean(functools.reduce(layer, params, x) ** 2), "i")
        specs = P(), P("i")
        if inside:
            step = shard(xform.grad(loss, policy=policy), check_vma, specs)
        else:
            step = xform.grad(shard(loss, check_vma, specs), policy=policy)
        compiled = jax.jit(step).lower(params, x).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    for inside in (False, True):
        plain = peak(layer, xform.policies.save_everything, inside)
        assert peak(xform.remat(layer), inside=inside) < 0.4 * plain
        assert peak(layer, policies.save_dots, inside=inside) < 0.75 * plain
