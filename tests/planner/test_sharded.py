"""Bytes on each device, of values whose types say how they are sharded."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import xform
from tests.planner.cuts.test_integer_program import joint_of
from tests.sharding import mesh, shard
from xform import policies
from xform.errors import BudgetInfeasible
from xform.interpret.cost import aval_bytes, device_flops
from xform.planner.costs.link import HostLink
from xform.planner.costs.outcome import recompute_flops, saved_bytes
from xform.planner.costs.window import offloadable_values
from xform.planner.decide import schedule
from xform.policies import MinCut

N, ROWS = 32, 4096
WS, X = np.ones((6, N, N), np.float32) / N, np.ones((ROWS, N), np.float32)


def layers(ws, x):
    for w in ws:
        x = jnp.tanh(jnp.sin(x @ w) @ w)
    return jnp.mean(x**2)


def scanned(ws, x):
    return jnp.mean(lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, ws)[0] ** 2)


def on(kind: AxisType, x, spec, as_types: bool = False):
    sharding = NamedSharding(mesh(kind), spec)
    if as_types:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return jax.device_put(x, sharding)


@pytest.mark.parametrize(
    ("spec", "sizes", "parts"),
    [
        (P("i"), {"i": 8}, 8),
        (P(None, "i"), {"i": 8}, 8),
        (P(("i", "j")), {"i": 4, "j": 2}, 8),
        (P("i", "j"), {"i": 4, "j": 2}, 8),
        (P("j"), {"i": 4, "j": 2}, 2),
        (P(), {"i": 8}, 1),
    ],
)
def test_a_type_has_the_bytes_of_one_shard(spec, sizes, parts) -> None:
    x = np.ones((16, 8), np.float32)
    explicit = jax.device_put(x, NamedSharding(mesh(AxisType.Explicit, **sizes), spec))
    assert aval_bytes(jax.typeof(explicit)) == x.nbytes // parts
    assert aval_bytes(jax.typeof(explicit)) == explicit.addressable_shards[0].data.nbytes
    auto = jax.device_put(x, NamedSharding(mesh(AxisType.Auto, **sizes), spec))
    assert aval_bytes(jax.typeof(auto)) == x.nbytes


def test_keys_are_sharded_too() -> None:
    keys = jax.random.split(jax.random.key(0), 16)
    sharded = jax.device_put(keys, NamedSharding(mesh(AxisType.Explicit), P("i")))
    assert aval_bytes(jax.typeof(sharded)) * 8 == aval_bytes(jax.typeof(keys))


@pytest.mark.parametrize("f", [layers, scanned])
@pytest.mark.parametrize("policy", [policies.min_cut, policies.save_dots])
def test_residuals_of_an_explicit_mesh_are_an_eighth(f, policy) -> None:
    alone = xform.residuals(f, WS, X, policy=policy)
    ws, x = on(AxisType.Explicit, WS, P()), on(AxisType.Explicit, X, P("i"))
    shared = xform.residuals(f, ws, x, policy=policy)
    assert alone.total_bytes == 8 * shared.total_bytes > 0
    whole = {"ws": WS.nbytes, "x": X.nbytes // 8}
    for r in shared:
        if r.kind == "argument":
            assert r.total_bytes == whole[r.operation]
    auto = xform.residuals(f, on(AxisType.Auto, WS, P()), on(AxisType.Auto, X, P("i")),
                           policy=policy)  # fmt: skip
    assert auto.total_bytes == alone.total_bytes


@pytest.mark.parametrize("f", [layers, scanned])
def test_a_budget_is_one_for_each_device(f) -> None:
    most = 8 * (xform.residuals(f, WS, X, policy=MinCut()).total_bytes // 8)
    ws, x = on(AxisType.Explicit, WS, P(), True), on(AxisType.Explicit, X, P("i"), True)
    for part in (1, 0.75):
        one, eighth = (policies.budget(int(part * most) // n, of="saved") for n in (1, 8))
        alone = xform.plan(f, WS, X, policy=one, verify=False)
        shared = xform.plan(f, ws, x, policy=eighth, verify=False)
        # Replicated weights are the small part that is not shared.
        assert shared.saved_bytes <= eighth.bytes
        assert shared.saved_bytes * 8 == pytest.approx(alone.saved_bytes, rel=0.1)
        assert shared.forward_flops == alone.forward_flops
        assert shared.recompute_flops == alone.recompute_flops
        size = lambda made: {r.trip_bytes for r in made if r.shape[0] == ROWS}
        assert size(shared) == {n // 8 for n in size(alone)} != set()


@pytest.mark.parametrize("as_types", [False, True])
@pytest.mark.parametrize("f", [layers, scanned])
def test_predicted_bytes_are_the_compilers_on_each_device(f, as_types: bool) -> None:
    ws = on(AxisType.Explicit, WS, P(), as_types)
    x = on(AxisType.Explicit, X, P("i"), as_types)
    made = xform.plan(f, ws, x, argnums=(0, 1), policy=policies.min_cut)
    assert made.compiled_bytes is not None
    assert made.predicted_bytes == pytest.approx(made.compiled_bytes, rel=0.15)
    assert made.compiled_bytes < X.nbytes * 3 + 4 * WS.nbytes


def test_outputs_and_their_cotangents_stay_sharded() -> None:
    f = lambda w, x: jnp.sin(jnp.sin(x @ w) @ w)
    w, x = on(AxisType.Explicit, WS[0], P(), True), on(AxisType.Explicit, X, P("i"), True)
    made = xform.plan(f, w, x, argnums=None)
    assert made.compiled_bytes is not None
    assert made.predicted_bytes == pytest.approx(made.compiled_bytes, rel=0.15)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_a_peak_is_met_on_each_device(kind: AxisType) -> None:
    """For Auto axes types do not give the sharding; the compiler does."""
    ws, x = on(kind, WS, P(), True), on(kind, X, P("i"), True)
    first = xform.plan(layers, ws, x)
    assert first.compiled_bytes is not None
    assert first.compiled_bytes < X.nbytes * len(WS)
    budget = policies.budget(int(0.9 * first.compiled_bytes))
    made = xform.plan(layers, ws, x, policy=budget)
    assert made.compiled_bytes is not None
    assert made.compiled_bytes <= budget.bytes
    with pytest.raises(BudgetInfeasible) as refused:
        xform.plan(layers, ws, x, policy="budget:1KiB")
    assert ("all devices together" in str(refused.value)) == (kind is AxisType.Auto)


def test_work_inside_shard_map_is_over_all_devices_and_bytes_on_each() -> None:
    x, w = jnp.ones((8, 6, 6)), jnp.ones((6, 6))
    body = lambda x, w: lax.psum(jnp.sum(jnp.sin(jnp.sin(x[0] @ w) @ w)), "i")
    joint = joint_of(shard(body), x, w)
    most, least = (schedule(joint, MinCut(price, price), "cpu") for price in (math.inf, 0.0))
    alone = joint_of(lambda x, w: jnp.sum(jnp.sin(jnp.sin(x @ w) @ w)), x[0], w)
    assert saved_bytes(most) == saved_bytes(schedule(alone, MinCut(), "cpu"))
    assert (
        recompute_flops(least) == 8 * recompute_flops(schedule(alone, MinCut(0.0, 0.0), "cpu")) > 0
    )


def test_time_is_that_of_one_device() -> None:
    w, x = on(AxisType.Explicit, WS[0], P()), on(AxisType.Explicit, X, P("i"))
    f = lambda w, x: jnp.sum(jnp.sin(jnp.sin(x @ w) @ w))
    seconds = {}
    for name, args in (("alone", (WS[0], X)), ("shared", (w, x))):
        joint = joint_of(f, *args)
        seconds[name] = offloadable_values(
            schedule(joint, MinCut(), "cpu"), HostLink(1.0, 1.0)
        ).seconds
        (dot, *_) = [e for e in joint.forward if e.primitive.name == "dot_general"]
        assert device_flops(dot) == 2 * N * N * ROWS / (1 if name == "alone" else 8)
    assert seconds["alone"] == pytest.approx(8 * seconds["shared"], rel=1e-3)
