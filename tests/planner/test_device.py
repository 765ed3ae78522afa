"""The device that is planned for, where a program is lowered for another one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xform
from xform.planner.device import current_device, planning_for
from xform.planner.simulate.liveness import liveness

X = np.ones((64, 64), np.float32)


def test_is_the_default_unless_another_is_set() -> None:
    assert current_device().backend == jax.default_backend()
    with planning_for("tpu"):
        assert current_device().backend == "tpu"
        with planning_for("gpu"):
            assert current_device().backend == "gpu"
        assert current_device().backend == "tpu"
    assert current_device().backend == jax.default_backend()


def test_a_function_is_traced_again_for_another() -> None:
    seen = []

    @jax.jit
    def f(x):
        seen.append(current_device().backend)
        return x

    for name in ("cpu", "tpu", "cpu", "tpu"):
        with planning_for(name):
            f.trace(X)
    assert seen == ["cpu", "tpu"]


def test_a_budget_of_the_peak_is_simulated_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()

    def simulated(how, name):
        seen.add(name)
        return liveness(how, name)

    monkeypatch.setattr("xform.planner.problem.liveness", simulated)
    policy = xform.policies.budget("1 MiB", verify=False)
    loss = lambda x: jnp.sum(jnp.sin(x @ x) @ x)
    step = jax.jit(xform.grad(loss, policy=policy))
    for name in ("cpu", "tpu", "gpu"):
        with planning_for(name, f"a {name}"):
            step.trace(X)
        assert seen == {name}
        seen.clear()
