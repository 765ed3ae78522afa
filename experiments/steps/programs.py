"""Twelve training steps: functions of their state and a batch, written for JAX alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

LAYERS, WIDTH, BATCH = 12, 64, 1024
ADAM = optax.adam(1e-3)


@dataclasses.dataclass(frozen=True)
class Step:
    """A step, its arguments, and which of them it replaces or reads as a batch.

    Attributes:
      run: the step.
      args: its arguments.
      donated: positions of the arguments whose memory the results may take.
      batches: positions of the arguments that are sharded over a mesh by their first axis.
    """

    run: Callable[..., Any]
    args: Sequence[Any]
    donated: tuple[int, ...] = ()
    batches: tuple[int, ...] = ()


def _net(ws: Any, x: Any) -> Any:
    return jax.lax.scan(lambda h, w: (jnp.sin(h @ w), None), x, ws)[0]


def _unrolled(ws: Any, x: Any) -> Any:
    for w in ws:
        x = jnp.tanh(x @ w)
    return x


def _loss(ws: Any, x: Any) -> Any:
    return jnp.mean(_net(ws, x) ** 2)


def _normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape) * shape[-1] ** -0.5


def _weights(seed: int = 0) -> jax.Array:
    return _normal(seed, LAYERS, WIDTH, WIDTH)


def _batch(seed: int = 9) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (BATCH, WIDTH))


def adam() -> Step:
    """Adam on scanned layers."""

    def step(ws: Any, state: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(_loss)(ws, x)
        updates, state = ADAM.update(grads, state)
        return optax.apply_updates(ws, updates), state, value

    ws = _weights()
    return Step(step, (ws, ADAM.init(ws), _batch()), (0, 1), (2,))


def sgd() -> Step:
    """Gradient descent on unrolled layers."""

    def step(ws: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(lambda ws: jnp.mean(_unrolled(ws, x) ** 2))(ws)
        return [w - 0.1 * g for w, g in zip(ws, grads, strict=True)], value

    return Step(step, (list(_weights()), _batch()), (0,), (1,))


def microbatches() -> Step:
    """Gradients of four parts of a batch, added up in a scan."""

    def step(ws: Any, x: Any) -> Any:
        def add(total: Any, part: Any) -> Any:
            value, grads = jax.value_and_grad(_loss)(ws, part)
            return total + grads, value

        parts = jnp.swapaxes(x.reshape(BATCH // 4, 4, WIDTH), 0, 1)
        grads, values = jax.lax.scan(add, jnp.zeros_like(ws), parts)
        return ws - 0.1 * grads, values

    return Step(step, (_weights(), _batch()), (0,), (1,))


def gan() -> Step:
    """A generator and a discriminator, each with a gradient of its own."""

    def step(g: Any, d: Any, z: Any, x: Any) -> Any:
        dg = jax.grad(lambda g: jnp.mean(_net(d, _net(g, z))))(g)
        dd = jax.grad(lambda d: jnp.mean(_net(d, x)) - jnp.mean(_net(d, _net(g, z))))(d)
        return g - 0.1 * dg, d + 0.1 * dd

    return Step(step, (_weights(1), _weights(2), _batch(3), _batch()), (0, 1), (2, 3))


def actor_and_critic() -> Step:
    """A critic's regression, then an actor's ascent on the critic."""

    def step(actor: Any, critic: Any, seen: Any, reward: Any) -> Any:
        value = lambda critic, action: jnp.mean(_net(critic, action), axis=-1)
        act = lambda actor: _net(actor, seen)
        error = lambda critic: jnp.mean((value(critic, act(actor)) - reward) ** 2)
        critic = critic - 0.1 * jax.grad(error)(critic)
        gain = lambda actor: -jnp.mean(value(critic, act(actor)))
        return actor - 0.1 * jax.grad(gain)(actor), critic

    return Step(step, (_weights(1), _weights(2), _batch(), _batch(4)[:, 0]), (0, 1), (2, 3))


def averaged() -> Step:
    """Gradient descent, with an exponential moving average of the weights."""

    def step(ws: Any, mean: Any, x: Any) -> Any:
        ws = ws - 0.1 * jax.grad(_loss)(ws, x)
        return ws, 0.9 * mean + 0.1 * ws

    return Step(step, (_weights(), jnp.zeros_like(_weights()), _batch()), (0, 1), (2,))


def frozen() -> Step:
    """The first half of the layers is frozen."""

    def step(fixed: Any, ws: Any, x: Any) -> Any:
        loss = lambda ws: jnp.mean(_net(ws, jax.lax.stop_gradient(_net(fixed, x))) ** 2)
        return ws - 0.1 * jax.grad(loss)(ws)

    half = LAYERS // 2
    return Step(step, (_weights()[:half], _weights()[half:], _batch()), (1,), (2,))


def two_jits() -> Step:
    """Two calls of a jitted gradient."""

    @jax.jit
    def gradient(ws: Any, x: Any) -> Any:
        return jax.grad(_loss)(ws, x)

    def step(ws: Any, x: Any) -> Any:
        ws = ws - 0.1 * gradient(ws, x)
        return ws - 0.1 * gradient(ws, x + 1)

    return Step(step, (_weights(), _batch()), (0,), (1,))


def flax_nnx() -> Step:
    """A Flax NNX module and its optimizer, through split and merge."""
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(LAYERS)])

        def __call__(self, x: jax.Array) -> jax.Array:
            for layer in self.layers:
                x = jnp.sin(layer(x))
            return x

    net = Net(nnx.Rngs(0))
    graph, state = nnx.split((net, nnx.Optimizer(net, ADAM, wrt=nnx.Param)))

    def step(state: Any, x: Any) -> Any:
        net, optimizer = nnx.merge(graph, state)
        value, grads = nnx.value_and_grad(lambda net: jnp.mean(net(x) ** 2))(net)
        optimizer.update(net, grads)
        return nnx.split((net, optimizer))[1], value

    return Step(step, (state, _batch()), (0,), (1,))


def flax_linen() -> Step:
    """A Flax Linen module with batch statistics and dropout, in a `TrainState`."""
    import flax.linen as nn
    from flax.training.train_state import TrainState

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            for _ in range(LAYERS):
                x = nn.gelu(nn.LayerNorm()(nn.Dense(WIDTH)(x)))
                x = nn.Dropout(0.1, deterministic=False)(x)
            return x

    net, x = Net(), _batch()
    params = net.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x)["params"]
    state = TrainState.create(apply_fn=net.apply, params=params, tx=ADAM)

    def step(state: Any, key: Any, x: Any) -> Any:
        run = lambda params: state.apply_fn({"params": params}, x, rngs={"dropout": key})
        value, grads = jax.value_and_grad(lambda params: jnp.mean(run(params) ** 2))(state.params)
        return state.apply_gradients(grads=grads), value

    return Step(step, (state, jax.random.key(2), x), (0,), (2,))


def equinox() -> Step:
    """An Equinox MLP, vmapped over the batch."""
    import equinox as eqx

    net = eqx.nn.MLP(WIDTH, WIDTH, WIDTH, LAYERS, activation=jnp.sin, key=jax.random.key(0))
    arrays, static = eqx.partition(net, eqx.is_array)

    def step(arrays: Any, state: Any, x: Any) -> Any:
        loss = lambda net: jnp.mean(jax.vmap(net)(x) ** 2)
        value, grads = eqx.filter_value_and_grad(loss)(eqx.combine(arrays, static))
        updates, state = ADAM.update(grads, state)
        return eqx.apply_updates(arrays, updates), state, value

    return Step(step, (arrays, ADAM.init(arrays), _batch()), (0, 1), (2,))


def haiku() -> Step:
    """A Haiku MLP."""
    import haiku as hk

    net = hk.without_apply_rng(
        hk.transform(lambda x: hk.nets.MLP([WIDTH] * LAYERS, activation=jnp.tanh)(x))
    )
    params = net.init(jax.random.key(0), _batch())

    def step(params: Any, state: Any, x: Any) -> Any:
        loss = lambda params: jnp.mean(net.apply(params, x) ** 2)
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = ADAM.update(grads, state)
        return optax.apply_updates(params, updates), state, value

    return Step(step, (params, ADAM.init(params), _batch()), (0, 1), (2,))


STEPS: dict[str, Callable[[], Step]] = {
    "Adam": adam,
    "SGD": sgd,
    "microbatches": microbatches,
    "GAN": gan,
    "actor and critic": actor_and_critic,
    "moving average": averaged,
    "frozen layers": frozen,
    "two jits inside": two_jits,
    "Flax NNX": flax_nnx,
    "Flax Linen": flax_linen,
    "Equinox": equinox,
    "Haiku": haiku,
}
