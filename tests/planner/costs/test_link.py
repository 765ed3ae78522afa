"""Values that a budget offloads: only with a link to the host, and back when they are read."""

import dataclasses
import functools
import itertools
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import xform
from tests.planner.cuts.test_fit import PROGRAMS, WS, X
from tests.planner.cuts.test_integer_program import joint_of, work
from tests.reference import close
from tests.sharding import mesh
from xform import policies
from xform.interpret.cost import aval_bytes
from xform.planner.costs.link import HostLink, link_of
from xform.planner.costs.outcome import offloaded_bytes, recompute_flops, saved_bytes
from xform.planner.costs.window import offloadable_values
from xform.planner.cuts.fit import propose_within
from xform.planner.decide import best_of_proposals, schedule
from xform.planner.device import current_device, planning_for
from xform.planner.plan_program import plan_program
from xform.planner.problem import Problem
from xform.planner.report.residuals import residuals_of
from xform.planner.simulate.liveness import liveness
from xform.planner.simulate.profiles import GPU
from xform.policies import MinCut, budget

FAST, SLOW = HostLink(1e3, 1e9), HostLink(1e3, 1.0)
SHORT = {
    "three layers": lambda w, x: jnp.sum(jnp.sin(jnp.sin(jnp.sin(x @ w) @ w) @ w)),
    "of two sizes": lambda w, x: jnp.sum(jnp.sin(jnp.sin(x @ w) @ w[:, :2]) @ w[:2]),
}


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set a fast link to the host, which a CPU lacks."""
    monkeypatch.setattr("xform.planner.problem.link_of", lambda device: FAST)


def within(joint, n: int, link: HostLink | None):
    return best_of_proposals(joint, propose_within(budget(n, of="saved"), link), "cpu")


def test_a_cpu_has_no_link() -> None:
    assert link_of(current_device()) is None
    half = budget(xform.residuals(PROGRAMS["unrolled"], WS, X).total_bytes // 2, of="saved")
    made = xform.plan(PROGRAMS["unrolled"], WS, X, policy=half, verify=False)
    assert made.offloaded_bytes == 0
    assert "OFFLOAD" not in {r.decision for r in made}
    assert made.recompute_flops > 0


@pytest.mark.parametrize(
    ("platform", "kind", "memory", "known"),
    [
        ("gpu", "NVIDIA H100 80GB HBM3", "pinned_host", True),
        ("tpu", "TPU v5 lite", "pinned_host", True),
        ("gpu", "NVIDIA H100 80GB HBM3", "device", False),
        ("gpu", "a new one", "pinned_host", False),
        ("cpu", "NVIDIA H100 80GB HBM3", "pinned_host", False),
    ],
)
def test_a_link_is_known_by_its_device(monkeypatch, platform, kind, memory, known) -> None:
    device = types.SimpleNamespace(
        platform=platform,
        device_kind=kind,
        addressable_memories=lambda: [types.SimpleNamespace(kind=memory)],
    )
    monkeypatch.setattr(jax, "local_devices", lambda backend: [device])
    with planning_for(platform):
        found = link_of(current_device())
    assert (found is not None) == known
    if found is not None:
        assert found.seconds(0) == found.latency_seconds
        assert found.seconds(found.bytes_per_second) == pytest.approx(1, rel=1e-3)


def test_a_link_of_a_device_that_is_not_here() -> None:
    with planning_for("tpu", "TPU v5e"):
        assert link_of(current_device()) is not None
    with planning_for("gpu", "a new one"):
        assert link_of(current_device()) is None
    with planning_for("cpu", "CPU"):
        assert link_of(current_device()) is None


@pytest.mark.parametrize("name", ["unrolled", "calls", "devices"])
def test_fast_link_offloads_values_instead_of_recomputing_them(name: str) -> None:
    joint = joint_of(PROGRAMS[name], WS, X)
    most = saved_bytes(schedule(joint, MinCut(), "cpu"))
    before = 0
    for part in (0.75, 0.5, 0.25):
        n = int(part * most)
        assert recompute_flops(within(joint, n, None)) > 0
        how = within(joint, n, FAST)
        assert recompute_flops(how) == 0
        # Values that fit are saved: no more is offloaded than exceeds the budget, up to one value.
        assert saved_bytes(how) <= n < saved_bytes(how) + aval_bytes(jax.typeof(jnp.asarray(X)))
        assert offloaded_bytes(how) > before
        before = offloaded_bytes(how)


def test_a_slow_link_takes_nothing() -> None:
    joint = joint_of(PROGRAMS["unrolled"], WS, X)
    n = saved_bytes(schedule(joint, MinCut(), "cpu")) // 2
    how = within(joint, n, SLOW)
    assert offloaded_bytes(how) == 0
    assert recompute_flops(how) == recompute_flops(within(joint, n, None))


def test_all_that_is_sent_shares_the_link() -> None:
    joint = joint_of(PROGRAMS["unrolled"], WS, X)
    one = X.astype("float32").nbytes
    seconds = offloadable_values(schedule(joint, MinCut(), "cpu"), HostLink(1.0, 1.0)).seconds
    before = recompute_flops(within(joint, 0, None))
    for values in (1, 2, 3):
        link = HostLink(1.0, (values + 0.5) * one / seconds, latency_seconds=0.0)
        may = offloadable_values(schedule(joint, MinCut(), "cpu"), link)
        assert len(may.values) > values
        how = within(joint, 0, link)
        assert offloaded_bytes(how) == values * one
        assert recompute_flops(how) < before
        before = recompute_flops(how)


@pytest.mark.parametrize("name", SHORT)
def test_no_sets_that_fit_need_less_work(name: str) -> None:
    """Compare with all choices of what to save, offload and recompute."""
    joint = joint_of(SHORT[name], jnp.ones((6, 6)), jnp.ones((4, 6)))
    values = [
        v
        for e in joint.forward
        for v in e.outvars
        if v not in joint.always_recomputed and v.aval.shape
    ]
    assert len(values) <= 9
    needs = functools.cache(lambda kept: work(joint, kept))
    most = schedule(joint, MinCut(), "cpu")
    size = lambda vs: sum(aval_bytes(v.aval) for v in vs)
    seconds = offloadable_values(most, HostLink(1.0, 1.0)).seconds
    seen = set()
    for total in (0, 50, 100, 150, 400):
        link = HostLink(1.0, (total + 1) / seconds, latency_seconds=0.0)
        may = offloadable_values(most, link)
        costs = set()
        for ways in itertools.product(("save", "send", "again"), repeat=len(values)):
            saved, sent = ([v for v, w in zip(values, ways, strict=True) if w == way]
                           for way in ("save", "send"))  # fmt: skip
            if may.values.issuperset(sent) and size(sent) <= total:
                costs.add((size(saved), needs(frozenset([*saved, *sent]))))
        for n in np.linspace(0, saved_bytes(most), 5).astype(int):
            best = min(cost for bytes_, cost in costs if bytes_ <= n)
            how = within(joint, int(n), link)
            assert recompute_flops(how) == best
            assert offloaded_bytes(how) <= total
            seen.add(offloaded_bytes(how))
    assert len(seen) > 1


@pytest.mark.usefixtures("x64", "fast")
@pytest.mark.parametrize(
    "name",
    ["unrolled", "scanned", "branches", pytest.param("devices", marks=pytest.mark.slow)],
)
def test_offloading_leaves_gradients_unchanged(name: str) -> None:
    f = PROGRAMS[name]
    most = xform.residuals(f, WS, X, policy=policies.min_cut)
    policy = budget(int(0.6 * most.total_bytes), of="saved")
    table = xform.residuals(f, WS, X, policy=policy)
    assert table.offloaded_bytes > 0
    assert table.total_bytes <= policy.bytes
    assert table.to_dict()["offloaded_bytes"] == table.offloaded_bytes
    assert "in pinned_host" in str(table)
    assert " offloaded" in str(table)
    close(jax.jit(xform.grad(f, policy=policy))(WS, X), jax.grad(f)(WS, X), 1e-9)


@pytest.mark.usefixtures("x64", "fast")
def test_a_batch_and_explicit_axes_are_sent_too() -> None:
    f = PROGRAMS["unrolled"]
    policy = budget(xform.residuals(f, WS, X).total_bytes // 2, of="saved")
    g, xs = xform.grad(f, policy=policy), np.stack([X, 2 * X])
    shared = dataclasses.replace(policy, batch_size=2)
    batched = jax.vmap(xform.grad(f, policy=shared), (None, 0))
    close(jax.jit(batched)(WS, xs), jax.vmap(jax.grad(f), (None, 0))(WS, xs), 1e-9)
    hessian = lambda grad: jax.jit(xform.jacfwd(lambda x: jnp.sum(grad(WS, x)[0])))(X)
    close(hessian(g), hessian(xform.grad(f)), 1e-9)
    placed = NamedSharding(mesh(AxisType.Explicit), P("i"))
    x, ws = jax.device_put(X, placed), jax.device_put(WS, NamedSharding(placed.mesh, P()))
    eighth = budget(policy.bytes // 8, of="saved")
    assert xform.residuals(f, ws, x, policy=eighth).offloaded_bytes > 0
    close(jax.jit(xform.grad(f, policy=eighth))(ws, x), jax.grad(f)(WS, X), 1e-9)


@pytest.mark.usefixtures("fast")
def test_residuals_of_branches_are_not_offloaded() -> None:
    f = PROGRAMS["branches"]
    most = xform.residuals(f, WS, X).total_bytes
    made = xform.plan(f, WS, X, policy=budget(most // 2, of="saved"), verify=False)
    assert made.offloaded_bytes > 0
    assert not [r for r in made if r.decision == "OFFLOAD" and "[" in r.value]


@pytest.mark.usefixtures("fast")
def test_plan_prints_explains_and_serializes_offloaded_values(tmp_path) -> None:
    def f(ws, x):
        for w in ws:
            x = jnp.sin(checkpoint_name(x @ w, "product"))
        return jnp.sum(x)

    made = xform.plan(f, WS, X, policy=budget(400, of="saved"))
    sent = [r for r in made if r.decision == "OFFLOAD"]
    assert made.offloaded_bytes == sum(r.marginal_bytes for r in sent) > 0
    assert made.saved_bytes <= 400
    assert made.recompute_flops == 0
    assert "OFFLOAD" in str(made)
    assert "idle for longer than the transfer to pinned_host and back" in str(made)
    assert " offloaded, peak" in str(made)
    assert "saving it would take" in made.explain(sent[0].value)
    made.save(tmp_path / "plan.json")
    read = xform.Plan.load(tmp_path / "plan.json")
    assert json.dumps(read.to_dict()) == json.dumps(made.to_dict())
    kept = xform.residuals(f, WS, X, policy=read, argnums=0)
    assert kept.offloaded_bytes == made.offloaded_bytes
    assert kept.total_bytes == made.saved_bytes
    close(jax.jit(xform.grad(f, policy=read))(WS, X), jax.grad(f)(WS, X), 1e-4)


def test_offloaded_values_count_in_the_peak_only_on_a_cpu() -> None:
    joint = joint_of(PROGRAMS["unrolled"], WS, X)
    n = saved_bytes(schedule(joint, MinCut(), "cpu")) // 4
    saved, sent = schedule(joint, MinCut(), "cpu"), within(joint, n, FAST)
    assert liveness(sent, "gpu").temp_bytes < liveness(saved, "gpu").temp_bytes
    assert liveness(sent, "cpu").temp_bytes >= liveness(sent, "gpu").temp_bytes


@pytest.mark.usefixtures("fast")
def test_offloading_meets_a_peak_budget_with_less_recompute(monkeypatch) -> None:
    """The target is a GPU, whose plans may offload."""
    f = PROGRAMS["unrolled"]
    joint = joint_of(f, WS, X)
    peak = lambda how: liveness(how, "gpu").total_bytes
    asked = budget(int(0.93 * peak(schedule(joint, policies.min_cut, "cpu")) / (1 - GPU.margin)))
    prog = xform.program.ir.trace(lambda *xs: [f(xs[:6], xs[6])], *map(jnp.asarray, (*WS, X)))
    args = prog, (True,) * 7, (True,)
    with planning_for("gpu"):
        found = plan_program(Problem(*args), asked).schedule
    assert offloaded_bytes(found) > 0
    assert peak(found) <= asked.bytes
    monkeypatch.setattr("xform.planner.problem.link_of", lambda device: None)
    with planning_for("gpu"):
        without = plan_program(Problem(*args), asked).schedule
    assert recompute_flops(found) < recompute_flops(without)


def test_a_policy_by_name_and_its_record_send_the_same() -> None:
    joint = joint_of(PROGRAMS["unrolled"], WS, X)
    policy = policies.offload_dots_with_no_batch_dims("device", "pinned_host")
    how = schedule(joint, policy, "cpu")
    again = schedule(joint, xform.planner.plan.decision.decision_of(how), "cpu")
    assert again.offloaded == how.offloaded
    assert saved_bytes(again) == saved_bytes(how) == 0
    table = residuals_of(again, [""] * len(joint.inputs), "")
    assert table.offloaded_bytes == offloaded_bytes(how) > 0


def recurrent(ws, x):
    """A loop whose states the backward pass reads, and whose last state is an output."""
    step = lambda x, w: (x + jnp.tanh(jnp.sin(x @ w) @ w.T), None)
    return jnp.sum(lax.scan(step, x, jnp.stack(ws))[0] ** 2)


@pytest.mark.usefixtures("x64", "fast")
def test_states_of_loops_wait_on_the_host(tmp_path) -> None:
    nothing = budget(0, of="saved")
    made = xform.plan(recurrent, WS, X, policy=nothing, verify=False)
    assert made.saved_bytes == made.recompute_flops == 0
    assert next(r for r in made if "carry" in r.value).decision == "OFFLOAD"
    kept = xform.residuals(recurrent, WS, X, policy=nothing)
    assert kept.total_bytes == 0
    assert kept.offloaded_bytes == made.offloaded_bytes
    made.save(tmp_path / "plan.json")
    grad = jax.jit(xform.grad(recurrent, policy=xform.Plan.load(tmp_path / "plan.json")))
    close(grad(WS, X), jax.grad(recurrent)(WS, X), 1e-12)
    for platform in ("cuda", "tpu"):
        text = str(jax.export.export(grad, platforms=[platform])(WS, X).mlir_module())
        assert 'buffer_placement = "pinned_host"' in text


@pytest.mark.usefixtures("fast")
def test_loop_residuals_are_offloaded_and_fetched_in_each_iteration() -> None:
    grad = xform.grad(recurrent, policy=budget(0, of="saved"))
    whole = jax.make_jaxpr(grad)(WS, X)
    stacks = {e.invars[0].aval.shape for e in whole.eqns if e.primitive.name == "device_put"}
    assert (len(WS), *X.shape) not in stacks
    forward, back = (e for e in whole.eqns if e.primitive.name == "scan")
    spaces = lambda loop: {
        str(e.params["devices"][0])
        for e in loop.params["jaxpr"].eqns if e.primitive.name == "device_put"
    }  # fmt: skip
    assert spaces(forward) == {"MemorySpace.Host"}
    assert spaces(back) == {"MemorySpace.Device"}
