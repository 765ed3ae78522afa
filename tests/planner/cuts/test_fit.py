"""Budgets: kept, met with less work than what fits less, and refused with the floor."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import xform
from experiments.planner.run import block, inputs
from tests.reference import close
from xform import errors, policies
from xform.planner import planning
from xform.planner.plan_program import plan_program
from xform.planner.simulate.liveness import liveness

X = np.sin(np.arange(48.0)).reshape(8, 6)
WS = [np.cos(np.arange(36.0) + i).reshape(6, 6) for i in range(6)]


def layer(x, w):
    return x + jnp.tanh(jnp.sin(x @ w) @ w)


def unrolled(ws, x):
    for w in ws:
        x = layer(x, w)
    return jnp.sum(x**2)


def scanned(ws, x):
    return jnp.sum(lax.scan(lambda x, w: (layer(x, w), None), x, jnp.stack(ws))[0] ** 2)


def calls(ws, x):
    @jax.jit
    def block(x, w):
        for _ in range(20):
            x = jnp.sin(x) * 1.1
        return layer(x, w)

    for w in ws:
        x = block(x, w)
    return jnp.sum(x**2)


def nested(ws, x):
    def outer(x, w):
        return lax.scan(lambda x, _: (layer(x, w), None), x, None, length=3)[0], None

    return jnp.sum(lax.scan(outer, x, jnp.stack(ws))[0] ** 2)


def branches(ws, x):
    for w in ws:
        x = lax.cond(jnp.sum(x) > 0, layer, lambda x, w: jnp.exp(-jnp.square(x @ w)), x, w)
    return jnp.sum(x**2)


def devices(ws, x):
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((4,), ("i",), axis_types=auto, devices=jax.devices()[:4])
    p = jax.sharding.PartitionSpec
    f = jax.shard_map(
        lambda ws, x: lax.psum(unrolled(ws, x), "i"),
        mesh=mesh, in_specs=(p(), p("i")), out_specs=p(),
    )  # fmt: skip
    return f(ws, x)


PROGRAMS = {f.__name__: f for f in (unrolled, scanned, calls, nested, branches, devices)}


LONG = ("devices", "branches", "nested", "calls")


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in LONG else []) for n in PROGRAMS]
)
def test_a_budget_is_kept_and_changes_no_value(name: str) -> None:
    f = PROGRAMS[name]
    most = xform.residuals(f, WS, X).total_bytes
    try:
        floor = xform.residuals(f, WS, X, policy=policies.budget(0, of="saved")).total_bytes
    except errors.BudgetInfeasible as e:
        floor = e.floor_bytes
    assert floor < most
    want = jax.value_and_grad(f)(WS, X)
    before, gradients = None, {}
    for part in (0.0, 0.3, 0.6, 1.0):
        policy = policies.budget(floor + int(part * (most - floor)), of="saved")
        kept = xform.residuals(f, WS, X, policy=policy).total_bytes
        gradients[part] = xform.value_and_grad(f, policy=policy)
        work = xform.plan(f, WS, X, policy=policy, verify=False).recompute_flops
        assert kept <= policy.bytes
        if before is not None:
            assert kept >= before[0]
            assert work <= before[1]
        before = kept, work
    found = jax.jit(lambda ws, x: {part: g(ws, x) for part, g in gradients.items()})(WS, X)
    for g in found.values():
        close(g, want, 1e-9)


@pytest.mark.usefixtures("x64")
def test_equal_layers_are_told_apart() -> None:
    """All six layers change at one price; a budget between still lets some of them stay."""
    most = xform.residuals(unrolled, WS, X).total_bytes
    budgets = [policies.budget(int(part * most), of="saved") for part in np.linspace(0.4, 1.0, 7)]
    kept = [xform.residuals(unrolled, WS, X, policy=policy).total_bytes for policy in budgets]
    assert len(set(kept)) >= 5
    for part, n in zip(np.linspace(0.4, 1.0, 7), kept, strict=True):
        assert n >= 0.8 * part * most


@pytest.mark.usefixtures("x64")
def test_a_region_has_a_budget_of_its_own() -> None:
    def f(ws, x):
        block = xform.remat(unrolled, policy=policies.budget(1200, of="saved"))
        return block(ws[:3], x) + unrolled(ws[3:], x)

    rows = xform.residuals(f, WS, X, policy=policies.save_everything)
    alone = xform.residuals(
        lambda ws, x: unrolled(ws[3:], x), WS, X, policy=policies.save_everything
    )
    assert 0 < rows.total_bytes - alone.total_bytes <= 1200
    close(jax.jit(xform.grad(f))(WS, X), jax.grad(lambda ws, x: f(ws, x))(WS, X), 1e-9)


def test_random_numbers_are_drawn_again_only_if_they_have_a_key() -> None:
    def f(x, key, draw):
        return jnp.sum(jnp.sin(x @ draw(key)))

    x, key = jnp.asarray(X, np.float32), jax.random.key(0)
    tiny = policies.budget(10, of="saved")
    keyed = functools.partial(f, draw=lambda key: jax.random.normal(key, (6, 6)))
    assert xform.residuals(keyed, x, key, argnums=0, policy=tiny).total_bytes <= 10
    keyless = functools.partial(f, draw=lambda key: lax.rng_uniform(0.0, 1.0, (6, 6)))
    with pytest.raises(errors.BudgetInfeasible, match="rng_uniform"):
        xform.residuals(keyless, x, key, argnums=0, policy=tiny)


@pytest.mark.usefixtures("x64")
def test_a_batch_shares_its_bytes_or_is_warned_of() -> None:
    most = xform.residuals(unrolled, WS, X).total_bytes
    xs = np.stack([X, 2 * X, 3 * X])
    want = jax.vmap(jax.grad(unrolled), (None, 0))(WS, xs)
    alone = xform.grad(unrolled, policy=policies.budget(most // 2, of="saved"))
    with pytest.warns(UserWarning, match="limits the bytes of one example"):
        close(jax.jit(jax.vmap(alone, (None, 0)))(WS, xs), want, 1e-9)
    shared = policies.budget(3 * most // 2, of="saved", batch_size=3)
    assert shared.bytes == most // 2
    close(jax.jit(jax.vmap(xform.grad(unrolled, policy=shared), (None, 0)))(WS, xs), want, 1e-9)


@pytest.mark.parametrize("policy", [policies.budget("1 MiB"), policies.budget(10)])
def test_a_region_has_no_peak_of_its_own(policy) -> None:
    """What all regions save waits at once: a bound of each one's peak would bound nothing."""
    refused = pytest.raises(errors.WrongArgument, match=r"no peak of its own(.|\n)*of='saved'")
    with refused:
        xform.remat(layer, policy=policy)
    block = jax.checkpoint(layer, policy=policy)
    f = lambda x, w: jnp.sum(block(x, w))
    with refused as caught:
        jax.jit(xform.grad(f)).trace(X, WS[0])
    assert "test_fit.py" in caught.value.where
    with refused:
        xform.grad(f)(X, WS[0])
    with refused:
        xform.plan(f, X, WS[0], policy=policies.save_dots)


@pytest.mark.parametrize("other", [policies.save_dots, policies.budget(1)])
def test_a_budget_is_not_asked_for_one_value_after_the_other(other) -> None:
    with pytest.raises(errors.WrongArgument, match="decides about a whole program"):
        policies.save_from_both_policies(other, policies.budget("1 MiB", of="saved"))


@pytest.mark.usefixtures("x64")
def test_a_budget_bounds_the_peak_in_any_trace() -> None:
    """By simulation: of `grad` under `jit`, within `scan`, twice differentiated, and in `vjp`."""
    free = xform.plan(unrolled, WS, X, verify=False).predicted_bytes
    policy = policies.budget(int(0.9 * free))
    seen = []

    def watched(*problem):
        whole = plan_program(*problem)
        seen.append(liveness(whole.schedule, "cpu").total_bytes)
        return whole

    g = xform.grad(unrolled, policy=policy)
    loop = lambda ws, x: lax.scan(lambda c, _: (g(c, x), None), ws, None, length=2)[0]
    twice = xform.grad(lambda ws, x: sum(map(jnp.sum, g(ws, x))))
    pulled = lambda ws, x: xform.vjp(unrolled, ws, x, policy=policy)[1](1.0)
    with planning.use_planner(watched):
        for f in (g, loop, twice, pulled):
            seen.clear()
            jax.jit(f).trace(WS, X)
            assert 0 < seen[0] <= policy.bytes
    close(jax.jit(g)(WS, X), jax.grad(unrolled)(WS, X), 1e-9)


@pytest.mark.parametrize("how", [{"of": "sum"}, {"solver": "guess"}, {"batch_size": 0}])
def test_other_arguments_that_are_none(how) -> None:
    with pytest.raises(errors.WrongArgument, match="budget"):
        policies.budget(1, **how)


@pytest.mark.usefixtures("x64")
def test_the_exact_solver_can_be_asked_for() -> None:
    most = xform.residuals(unrolled, WS, X).total_bytes
    auto, exact = (
        xform.plan(
            unrolled, WS, X, policy=policies.budget(most // 2, of="saved", solver=s), verify=False
        )
        for s in ("auto", "exact")
    )
    assert exact.recompute_flops <= auto.recompute_flops
    assert exact.saved_bytes <= most // 2


@pytest.mark.parametrize("amount", [-1, "-3 GiB", "much", "3 bananas", 1.5, None, float("nan")])
def test_amounts_that_are_none(amount) -> None:
    with pytest.raises(errors.WrongArgument, match="not a number of bytes"):
        policies.budget(amount)


def test_amounts() -> None:
    assert policies.budget("6 GiB") == policies.budget(6 * 2**30)
    assert policies.budget("1.5kb").bytes == 1500
    assert policies.budget(" 12 ").bytes == 12
    assert repr(policies.budget("6 GiB")) == "budget('6 GiB')"
    assert repr(policies.budget("6 GiB", of="saved")) == "budget('6 GiB', of='saved')"
    assert hash(policies.budget(3)) == hash(policies.budget("3"))


def test_zero_sizes_scalars_and_nothing_to_keep() -> None:
    f = lambda x: jnp.sum(jnp.sin(x) * x)
    for x in (np.float32(2.0), np.zeros((0, 3), np.float32), np.ones(4, np.float32)):
        got = jax.jit(xform.grad(f, policy=policies.budget(0, of="saved")))(x)
        np.testing.assert_allclose(got, jax.grad(f)(x), rtol=1e-6)


@pytest.mark.slow
def test_less_saved_is_less_live() -> None:
    """What PyTorch's budgets are known to fail at: its peak rises where its budget falls."""
    params, x = inputs(4)
    params, x = jax.eval_shape(lambda: (params, x))

    def loss(params, x):
        for i in range(4):
            x = block(x, {name: p[i] for name, p in params.items()})
        return jnp.sum(x)

    most = xform.residuals(loss, params, x).total_bytes
    live = []
    for part in (1.0, 0.85, 0.7, 0.5, 0.3, 0.1):
        g = jax.jit(xform.grad(loss, policy=policies.budget(int(part * most), of="saved")))
        live.append(g.lower(params, x).compile().memory_analysis().temp_size_in_bytes)
    assert live == sorted(live, reverse=True)
