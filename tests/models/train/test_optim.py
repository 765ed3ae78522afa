"""Every optimizer reduces a loss, decays only matrices, and starts by the schedule."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from models.train.optim import OPTIMIZERS, OptimConfig, optimizer, schedule

PARAMS = {
    "layers": {
        "attention": {
            "query": {"kernel": jnp.ones((2, 8, 2, 3))},
            "out": {"kernel": jnp.ones((2, 2, 3, 8))},
        },
        "mixture": {"up": jnp.ones((2, 3, 8, 4))},
        "mlp": {"kernel": jnp.ones((2, 8, 4))},
        "scale": jnp.ones((2, 4)),
    },
    "embed": {"embedding": jnp.ones((8, 4))},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_loss_falls(name: str) -> None:
    config = OptimConfig(
        optimizer=name, steps=100, warmup_steps=5, learning_rate=0.1, clip_norm=10.0
    )
    waves = lambda x: jnp.sin(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)
    goal = jax.tree.map(waves, PARAMS)
    loss = lambda p: optax.tree.norm(jax.tree.map(jnp.subtract, p, goal)) ** 2
    transform = optimizer(config)

    @jax.jit
    def step(params, state):
        updates, state = transform.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, transform.init(PARAMS)
    for _ in range(config.steps):
        params, state = step(params, state)
    assert loss(params) < 0.2 * loss(PARAMS)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_only_matrices_decay(name: str) -> None:
    config = OptimConfig(optimizer=name, steps=10, warmup_steps=0, weight_decay=0.5)
    transform = optimizer(config)
    updates, _ = transform.update(
        jax.tree.map(jnp.zeros_like, PARAMS), transform.init(PARAMS), PARAMS
    )
    scale = updates["layers"].pop("scale")
    assert not np.any(scale)
    assert all(np.all(leaf < 0) for leaf in jax.tree.leaves(updates["layers"]))


def test_the_schedule_rises_and_falls() -> None:
    config = OptimConfig(steps=100, warmup_steps=10, learning_rate=1.0)
    rates = [float(schedule(config)(i)) for i in range(101)]
    assert rates[0] == pytest.approx(1 / 11)
    assert max(rates) == rates[10] == 1.0
    assert rates[100] == pytest.approx(0.1)


def test_muon_takes_each_gate_of_a_recurrent_layer_as_a_matrix() -> None:
    kernel = jax.random.normal(jax.random.key(0), (8, 4, 8))
    params = {"layers": {"0": {"recur": {"kernel": kernel}}}}
    transform = optimizer(OptimConfig(optimizer="muon", steps=10, warmup_steps=0, weight_decay=0))
    updates, _ = transform.update(params, transform.init(params), params)
    (update,) = jax.tree.leaves(updates)
    spread = lambda x: np.ptp(np.log(np.linalg.svd(np.moveaxis(x, 1, 0), compute_uv=False)), 1)
    assert (spread(kernel) > 1.5).all()
    assert (spread(update) < 0.75).all()
