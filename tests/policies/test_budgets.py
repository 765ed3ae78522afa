"""`policy="auto"`: a budget that is the memory of the planned device."""

import re
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import xform
from tests.reference import close
from xform import commands, errors, policies
from xform.commands.shared import function
from xform.planner import planning
from xform.planner.device import Device, current_device, planning_for, resolve_fit
from xform.planner.plan_program import plan_program

X = np.sin(np.arange(48.0, dtype=np.float32)).reshape(8, 6)
WS = np.cos(np.arange(6 * 36.0, dtype=np.float32)).reshape(6, 6, 6)


def loss(ws, x):
    for w in ws:
        x = x + jnp.tanh(jnp.sin(x @ w) @ w)
    return jnp.sum(x**2)


def looped(ws, x):
    return jnp.sum(lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0])


def inputs():
    """Arguments of `looped` on the command line."""
    return jnp.ones((12, 64, 64)) / 64, jnp.ones((32, 64))


@pytest.fixture
def peaks() -> Iterator[list[int]]:
    """Record the simulated peaks of the plans made in a test."""
    seen: list[int] = []

    def watched(*problem):
        whole = plan_program(*problem)
        seen.append(problem[0].peak(whole.schedule))
        return whole

    with planning.use_planner(watched):
        yield seen


def device(monkeypatch: pytest.MonkeyPatch, capacity: int | None) -> None:
    """Set the memory of the process's own device."""
    monkeypatch.setattr(Device, "memory", lambda self: ("a chip", capacity))


def free() -> int:
    return xform.plan(loss, WS, X, verify=False).predicted_bytes


@pytest.mark.parametrize("policy", ["auto", policies.fit()])
def test_auto_plans_fit_into_the_memory_of_the_device(
    policy, monkeypatch: pytest.MonkeyPatch, peaks: list[int]
) -> None:
    capacity = int(0.95 * free())
    device(monkeypatch, capacity)
    got = jax.jit(xform.grad(loss, policy=policy))(WS, X)
    assert peaks[-1] <= capacity < free()
    close(got, jax.grad(loss)(WS, X), 1e-5)
    with xform.install(policy=policy):
        jax.jit(lambda ws, x: jax.grad(loss)(ws, x)).trace(WS, X)
    assert peaks[-1] <= capacity
    made = xform.plan(loss, WS, X, policy=policy, verify=False)
    assert made.predicted_bytes <= capacity
    assert made.recompute_flops > 0
    assert re.fullmatch(r"auto, \d+\.\d KiB of a chip", made.policy)


def test_auto_is_the_default_plan_if_it_fits_or_memory_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    default = xform.plan(loss, WS, X, verify=False)
    for capacity in (int(1.02 * default.predicted_bytes), None):
        device(monkeypatch, capacity)
        made = xform.plan(loss, WS, X, policy="auto", verify=False)
        assert made.rows == default.rows
    assert made.policy == "auto, min_cut"


def test_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    device(monkeypatch, 100)
    refused = pytest.raises(errors.BudgetInfeasible, match=r"auto, 100 B of a chip\n")
    with refused as caught:
        jax.jit(xform.grad(loss, policy="auto")).trace(WS, X)
    assert caught.value.floor_bytes > WS.nbytes + X.nbytes
    with refused:
        xform.plan(loss, WS, X, policy="auto", verify=False)
    device(monkeypatch, caught.value.floor_bytes)
    jax.jit(xform.grad(loss, policy=policies.fit())).trace(WS, X)


def test_some_memory_can_be_left(monkeypatch: pytest.MonkeyPatch) -> None:
    device(monkeypatch, 10_000)
    assert resolve_fit(policies.fit("4 kB")) == policies.Budget(6000, device="a chip")
    assert resolve_fit(policies.fit("40 kB")) == policies.Budget(0, device="a chip")
    assert resolve_fit(policies.fit("4 kB", batch_size=3)) == policies.Budget(
        2000, batch_size=3, device="a chip"
    )
    for wrong in (lambda: policies.fit("much"), lambda: policies.fit(batch_size=0)):
        with pytest.raises(errors.WrongArgument, match="fit"):
            wrong()
    with pytest.raises(errors.WrongArgument, match=r"call it, such as policy=fit\(\)"):
        xform.grad(loss, policy=policies.fit)


def test_auto_uses_the_memory_of_the_planned_device() -> None:
    assert current_device().memory() == ("cpu", None)
    assert resolve_fit(policies.fit()) == policies.min_cut
    with planning_for("tpu", "TPU v5e"):
        assert resolve_fit(policies.fit()).bytes == 15.75 * 2**30
    with planning_for("gpu", "NVIDIA L4"):
        assert repr(resolve_fit(policies.fit())) == "auto, 22.0 GiB of NVIDIA L4"
    with planning_for("gpu", "some other"):
        assert resolve_fit(policies.fit()) == policies.min_cut


def test_memory_of_a_local_device_is_its_reported_bytes_limit(monkeypatch) -> None:
    class Chip:
        device_kind = "chip"

        @staticmethod
        def memory_stats():
            return {"bytes_limit": 1234}

    monkeypatch.setattr(jax, "local_devices", lambda backend: [Chip])
    assert current_device().memory() == ("chip", 1234)


def test_auto_under_vmap_warns_to_pass_batch_size(monkeypatch: pytest.MonkeyPatch) -> None:
    device(monkeypatch, 2 * free())
    xs = np.stack([X, X])
    asks = r"under vmap, auto limits .* pass fit\(..., batch_size=n\)"
    with pytest.warns(UserWarning, match=asks):
        jax.jit(jax.vmap(xform.grad(loss, policy="auto"), (None, 0))).trace(WS, xs)
    jax.jit(jax.vmap(xform.grad(loss, policy=policies.fit(batch_size=2)), (None, 0))).trace(WS, xs)


def test_a_region_is_refused() -> None:
    with pytest.raises(errors.WrongArgument, match="no peak of its own"):
        xform.remat(loss, policy="auto")
    with pytest.raises(errors.WrongArgument, match="decides about a whole program"):
        policies.save_from_both_policies(policies.save_dots, "auto")


def test_on_the_command_line() -> None:
    assert function.read_policy("auto") == policies.fit()
    words = [f"{__name__}:looped", "--target", "cpu"]
    assert "auto, min_cut, on cpu" in commands.run(["plan", *words, "--policy", "auto"])
    (entry,) = xform.compare(looped, *inputs(), policies=[None])
    default = entry.report.total_bytes
    text = commands.run(["compare", *words, "--policy", "min_cut,auto", "--capacity",
                         str(default - 1)])  # fmt: skip
    assert text.splitlines()[-1].split()[:2] == ["auto", "cpu"]
    (fitted,) = xform.compare(looped, *inputs(), policies=["auto"], capacity=default - 1)
    assert fitted.report.total_bytes < default
    (same,) = xform.compare(looped, *inputs(), policies=["auto"], capacity=default)
    assert same.report.total_bytes == default
    (over,) = xform.compare(looped, *inputs(), policies=["auto"], capacity=100)
    assert over.report is None


@pytest.mark.parametrize("verify", [True, False])
def test_the_code_of_a_budget_makes_it(verify: bool) -> None:
    policy = policies.budget(1000, verify=verify)
    assert eval(policies.as_code(policy), {"xform": xform}) == policy
    assert ("verify=False" in repr(policy)) != verify
