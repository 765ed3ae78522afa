"""`xform.install` with a budget: each outermost jitted step keeps it, unmodified."""

import functools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import xform
from xform.errors import BudgetInfeasible
from xform.policies import budget
from xform.steps.jit import JitStep

OPTIMIZER = optax.adam(1e-2)
X = jax.random.normal(jax.random.key(1), (512, 32))
LAYERS = 8


@pytest.fixture
def installed() -> Iterator[Callable[[str], None]]:
    """A function that installs xform with a budget; it is uninstalled after the test."""
    yield lambda size: xform.install(policy=f"budget:{size}") and None
    xform.uninstall()


def nnx_losses() -> tuple[Any, list[float]]:
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.layers = nnx.List([nnx.Linear(32, 32, rngs=rngs) for _ in range(LAYERS)])

        def __call__(self, x: jax.Array) -> jax.Array:
            for layer in self.layers:
                x = jnp.sin(layer(x))
            return x

    net = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(net, OPTIMIZER, wrt=nnx.Param)

    @nnx.jit
    def step(net: Net, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
        value, grads = nnx.value_and_grad(lambda net: jnp.mean(net(x) ** 2))(net)
        optimizer.update(net, grads)
        return value

    return step, [float(step(net, optimizer, X)) for _ in range(3)]


def linen_losses() -> tuple[Any, list[float]]:
    import flax.linen as nn
    from flax.training.train_state import TrainState

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            for _ in range(LAYERS):
                x = nn.tanh(nn.Dense(32)(x))
            return x

    net = Net()
    params = net.init(jax.random.key(0), X)["params"]
    state = TrainState.create(apply_fn=net.apply, params=params, tx=OPTIMIZER)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: TrainState, x: jax.Array) -> tuple[TrainState, jax.Array]:
        loss = lambda params: jnp.mean(state.apply_fn({"params": params}, x) ** 2)
        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    values: list[float] = []
    for _ in range(3):
        state, value = step(state, X)
        values.append(float(value))
    return step, values


def equinox_losses() -> tuple[Any, list[float]]:
    eqx = pytest.importorskip("equinox")
    net = eqx.nn.MLP(32, 32, 32, LAYERS, activation=jnp.sin, key=jax.random.key(0))
    state = OPTIMIZER.init(eqx.filter(net, eqx.is_array))

    @eqx.filter_jit
    def step(net: Any, state: Any, x: jax.Array) -> Any:
        loss = lambda net: jnp.mean(jax.vmap(net)(x) ** 2)
        value, grads = eqx.filter_value_and_grad(loss)(net)
        updates, state = OPTIMIZER.update(grads, state)
        return eqx.apply_updates(net, updates), state, value

    values: list[float] = []
    for _ in range(3):
        net, state, value = step(net, state, X)
        values.append(float(value))
    return step, values


TRAINERS = [nnx_losses, linen_losses, equinox_losses]


@pytest.mark.parametrize("losses", TRAINERS)
def test_a_trainer_keeps_a_budget_unmodified(losses: Any, monkeypatch: Any) -> None:
    _, want = losses()
    plans: list[Any] = []
    plan_for = JitStep._plan_for

    def planned(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = plan_for(self, *args, **kwargs)
        plans.append(result.plan)
        return result

    monkeypatch.setattr(JitStep, "_plan_for", planned)
    with xform.install(policy="budget:100MiB"):
        losses()
    roomy = max(plan.compiled_bytes for plan in plans if plan.plans)
    size = int(0.93 * roomy)
    plans.clear()
    with xform.install(policy=budget(size)):
        _, got = losses()
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert any(plan.plans for plan in plans)
    assert all(plan.compiled_bytes <= size for plan in plans if plan.plans)


def test_step_that_cannot_keep_the_budget_raises_with_the_lowest_peak(installed: Any) -> None:
    installed("1KiB")
    step = jax.jit(jax.grad(lambda w: jnp.sum(jnp.sin(X @ w))))
    with pytest.raises(BudgetInfeasible, match="lowest peak found"):
        step(jnp.ones((32, 32)))


def test_jitted_functions_without_a_derivative_ignore_the_budget(installed: Any) -> None:
    installed("1KiB")
    np.testing.assert_array_equal(jax.jit(lambda x: x + 1)(X), X + 1)


def test_the_replacement_can_be_used_as_jax_jit(installed: Any) -> None:
    plain_jit = jax.jit
    installed("100MiB")
    assert jax.jit is not plain_jit
    assert pickle.loads(pickle.dumps(jax.jit)) is jax.jit

    class Trainer:
        scale = 3.0

        @functools.partial(jax.jit, static_argnums=0)
        def by_partial(self, x: jax.Array) -> jax.Array:
            return jax.grad(lambda x: jnp.sum(jnp.sin(self.scale * x)))(x)

        @jax.jit(static_argnums=0)
        def by_options(self, x: jax.Array) -> jax.Array:
            return self.scale * x

    trainer, x = Trainer(), jnp.arange(3.0)
    np.testing.assert_allclose(trainer.by_partial(x), 3 * jnp.cos(3 * x), rtol=1e-6)
    np.testing.assert_allclose(trainer.by_options(x), 3 * x)
    step = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(x))))
    np.testing.assert_allclose(jax.vmap(step)(x[:, None]), jnp.cos(x)[:, None], rtol=1e-6)
    np.testing.assert_allclose(jax.jit(step)(x), jnp.cos(x), rtol=1e-6)
    np.testing.assert_allclose(step.lower(x).compile()(x), jnp.cos(x), rtol=1e-6)
    assert step.eval_shape(x).shape == (3,)
    assert isinstance(step, jax.stages.Wrapped)
    step.clear_cache()
    np.testing.assert_allclose(step(x), jnp.cos(x), rtol=1e-6)


def test_another_policy_leaves_jit_alone(installed: Any) -> None:
    plain_jit = jax.jit
    with xform.install(policy="save_dots"):
        assert jax.jit is plain_jit
    installed("1MiB")
    with xform.install(policy="save_dots"):
        assert jax.jit is plain_jit
    assert jax.jit is not plain_jit
    xform.uninstall()
    assert jax.jit is plain_jit


def test_a_derivative_outside_of_jit_has_the_budget_itself(installed: Any) -> None:
    installed("100MiB")
    np.testing.assert_allclose(jax.grad(jnp.sin)(1.0), jnp.cos(1.0), rtol=1e-6)
