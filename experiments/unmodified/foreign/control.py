"""Reinforcement learning: losses of actors and critics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from experiments.unmodified.foreign.parts import Made, Program, labels, normal
from experiments.unmodified.programs import KEY, tokens
from experiments.unmodified.sources import definitions, module, package


def ppo(folder: Path) -> Made:
    """Flax's PPO on 16 screens of 84 by 84, with its network and loss."""
    here = folder / "flax/examples/ppo"
    model = module(here / "models.py").ActorCritic(num_outputs=6)
    agent = definitions(here / "agent.py", "policy_action")
    lib = definitions(here / "ppo_lib.py", "loss_fn")
    lib.loss_fn.__globals__["agent"] = agent
    screens = 255 * jax.random.uniform(KEY, (16, 84, 84, 4))
    batch = screens, labels(16, 6), normal(16), normal(16, seed=2), normal(16, seed=3)

    def loss(params: Any, batch: Any) -> jax.Array:
        return lib.loss_fn(params, model.apply, batch, 0.1, 0.5, 0.01)

    return loss, (model.init(KEY, screens)["params"], batch)


def pixels(folder: Path) -> Made:
    """The critic's loss of DrQ on 32 screens, with the networks of jaxrl."""
    networks = package(folder / "jaxrl", "jaxrl.agents.drq.networks", "jaxrl.agents.drq")
    model = networks.DrQDoubleCritic((256, 256))
    screens, actions = 255 * jax.random.uniform(KEY, (32, 64, 64, 9)), normal(32, 6)

    def loss(params: Any, screens: jax.Array, actions: jax.Array, goal: jax.Array) -> jax.Array:
        one, other = model.apply(params, screens, actions)
        return ((one - goal) ** 2 + (other - goal) ** 2).mean()

    return loss, (model.init(KEY, screens, actions), screens, actions, normal(32))


def impala(folder: Path) -> Made:
    """Haiku's IMPALA: a residual network and an LSTM over 8 steps of 4 games, with V-trace."""
    root = folder / "dm-haiku"
    package(root, "haiku")
    rlax = package(folder / "rlax", "rlax")
    nets, learner, agents = (package(root, f"examples.impala.{name}")
                             for name in ("haiku_nets", "learner", "agent"))  # fmt: skip
    agent = agents.Agent(6, None, lambda n: nets.AtariNet(n, use_resnet=True, use_lstm=True))
    screens = 255 * jax.random.uniform(KEY, (9, 4, 42, 42, 4))
    step = nets.dm_env.TimeStep(jnp.ones((9, 4), jnp.int32), normal(9, 4), jnp.ones((9, 4)),
                                screens)  # fmt: skip
    state = agent.initial_state(4)
    actions, behaviour = tokens(8, 4, 6), normal(8, 4, 6)

    def loss(params: Any, step: Any, state: Any, actions: Any, behaviour: Any) -> jax.Array:
        out = agent.unroll(params, step, state)
        now, values = out.policy_logits[:-1], out.values
        ratios = rlax.categorical_importance_sampling_ratios(now, behaviour, actions)
        trace = jax.vmap(rlax.vtrace_td_error_and_advantage, in_axes=1, out_axes=1)
        found = trace(values[:-1], values[1:], step.reward[1:], 0.99 * step.discount[1:], ratios)
        mask = jnp.ones_like(found.errors)
        policy = learner.policy_gradient_loss(now, actions, found.pg_advantage, mask)
        entropy = learner.entropy_loss(now, mask)
        return policy + 0.25 * jnp.sum(found.errors**2) + 0.01 * entropy

    params = agent._init_fn(KEY, step, state)
    return loss, (params, step, state, actions, behaviour)


PROGRAMS = {
    "Flax ppo": Program("google/flax", "examples/ppo", ppo),
    "DrQ critic": Program("ikostrikov/jaxrl", "jaxrl/agents/drq/networks.py", pixels),
    "IMPALA": Program("google-deepmind/dm-haiku", "examples/impala", impala),
}
