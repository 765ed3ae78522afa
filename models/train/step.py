"""One training step as a compiled program that reuses the memory of the state it is given."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

import xform
from models.nets.objectives import OBJECTIVES
from models.nets.presets import TRAINED, abstract
from models.train.host import brought, fetched, put
from models.train.mesh import abstract_mesh, batch_sharding, placed
from models.train.optim import OptimConfig, averaged, schedule
from models.train.precision import rounded
from models.train.state import TrainState, abstract_state, device_bytes, shardings_of
from models.train.update import chosen, updated, updated_in_turn
from xform.diagnosis import Diagnosis

Metrics = dict[str, Any]
Step = Callable[[TrainState, Any], tuple[TrainState, Metrics]]
Loss = Callable[..., tuple[jax.Array, tuple[nnx.State, Metrics]]]
# What the memory of a step is analyzed with: the number of steps decides no bytes.
_OPTIM = OptimConfig()
# How much of the usual norm of a gradient is that of the last one.
_LAST = 0.02


def make_loss(model: Any, training: bool = True, mesh: AbstractMesh | None = None) -> Loss:
    """The mean loss of parameters, statistics and a batch, as the model's objective has it.

    It is what a policy plans for: a pure function, the same in a step and in `xform.plan`. It
    returns the loss, and beside it the statistics after the batch and the objective's measures. In
    training a fourth argument is the key of dropout, None where a model has none; a fifth one is
    what the loss is multiplied by. Without it a model is judged: statistics are read, and stay.
    `mesh` is that on which the arguments lie; the gradient then lies as the parameters do, and a
    batch is one batch, of which each device has a part: so are the statistics.
    """
    whole = abstract(model)
    if not training:
        whole.eval()
    graphdef, types, _ = nnx.split(whole, nnx.Param, nnx.BatchStat)
    places = None if mesh is None else shardings_of(placed(types, mesh))
    objective = OBJECTIVES[type(model)].loss

    def loss(params: nnx.State, statistics: nnx.State, batch: Any, key: jax.Array | None = None,
             scale: jax.Array | None = None) -> Any:  # fmt: skip
        if places is not None:  # so is their gradient, whatever reads it
            params = jax.lax.with_sharding_constraint(params, places)
        # A copy, since NNX takes no variables that were made outside the loop over slices.
        merged = nnx.merge(graphdef, params, statistics, copy=True)
        with on(mesh), jax.named_scope("forward"):
            value, measures = objective(merged, batch, key, training)
        after = nnx.state(merged, nnx.BatchStat)
        return value if scale is None else value * scale, (after, measures)

    return loss


def on(mesh: AbstractMesh | None) -> contextlib.AbstractContextManager[Any]:
    """A context in which layers say where on the mesh they lie."""
    return contextlib.nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh)


def dropout_key(model: Any, seed: int, step: jax.Array) -> jax.Array | None:
    """The key of a step's dropout: a function of seed and step; None where nothing is dropped."""
    if not getattr(model, "dropout", 0.0):
        return None
    return jax.random.fold_in(jax.random.key(seed), step)


def make_step(model: Any, optim: OptimConfig, policy: Any = None, seed: int = 0,
              mesh: AbstractMesh | None = None, health: Diagnosis | None = None
              ) -> Step:  # fmt: skip
    """The pure function of one update, of which `policy` says what the backward pass keeps.

    It maps a state and a tree of arrays `[accumulate, batch, ...]` to the next state and the
    metrics `loss` (before the update), what the objective measures, `grad_norm`, `learning_rate`,
    and `skipped`: 1.0 where loss, gradient or statistics are not finite, or the gradient is a
    spike, and the step changes neither parameters, statistics nor the optimizer. Gradients of the
    `accumulate` slices are summed one after another, so that only one slice's activations are held;
    a batch norm normalizes each slice by itself, and its statistics move with each. `seed` is that
    of dropout. On a `mesh` the new state lies as the old one. Gradients are of the rounded
    parameters, summed and applied in float32. In float16 the loss is scaled, and `loss_scale` is a
    metric. An optimizer state that waits in the host's memory is fetched when the gradient is
    there, and put back. A diagnosis of the loss (`models.train.health`) reads its layers on the
    way: then `health` is a metric.
    """
    gradient = _gradient(make_loss(model, mesh=mesh), policy, health)
    state_places = None if mesh is None else shardings_of(abstract_state(model, optim, mesh))
    offloads = mesh is not None and optim.offload_optimizer
    update = updated_in_turn if offloads else updated

    def step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        key, params = dropout_key(model, seed, state.step), rounded(state.params, optim)
        scale = state.loss_scale and state.loss_scale.value
        slices = jax.tree.leaves(batch)[0].shape[0]
        if slices == 1:
            only = jax.tree.map(lambda x: x[0], batch)
            summed, statistics, seen = gradient(params, state.statistics, only, key, scale)
        else:
            zero = [jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.params)]

            def add(carry: Any, slice_: Any) -> tuple[Any, Any]:
                total, statistics = carry
                more, statistics, seen = gradient(params, statistics, *slice_, scale)
                total = jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, more)
                return (total, statistics), seen

            keys = None if key is None else jax.random.split(key, slices)
            before = (zero, state.statistics)
            (summed, statistics), seen = jax.lax.scan(add, before, (batch, keys))
            seen = jax.tree.map(lambda x: jnp.mean(x, 0), seen)
        measures, read = seen
        parts = slices if scale is None else slices * scale
        loss, grads = jax.tree.map(lambda leaf: leaf.astype(jnp.float32) / parts, summed)
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        for leaf in jax.tree.leaves(statistics):
            finite &= jnp.all(jnp.isfinite(leaf))
        good = finite
        if optim.spike < math.inf:
            good &= norm <= optim.spike * state.usual_norm
        with jax.named_scope("update"):
            params, opt_state = update(optim, state, grads, good)
        first = jnp.isinf(state.usual_norm)
        usual = jnp.where(first, norm, (1 - _LAST) * state.usual_norm + _LAST * norm)
        done = state.step - state.skipped
        result = nnx.merge_state(params, statistics)
        mean = fetched(state.average, jax.tree.leaves(params)[-1])
        average = mean and averaged(optim, mean, result, done)
        new = state.skipped, jnp.zeros_like(state.skipped), usual, average, statistics
        old = (state.skipped + 1, state.skipped_in_row + 1, state.usual_norm, mean,
               state.statistics)  # fmt: skip
        skipped, in_row, usual, average, statistics = chosen(good, new, old)
        metrics = {
            "loss": loss,
            **measures,
            "grad_norm": norm,
            "learning_rate": jnp.asarray(schedule(optim)(done), jnp.float32),
            "skipped": 1.0 - good,
        }
        if state.loss_scale is not None:
            metrics["loss_scale"] = state.loss_scale.value
        if health is not None:
            metrics["health"] = health.updated(read, state.params, params, scale)
        scaled = state.loss_scale and state.loss_scale.after(finite, optim.loss_scale_steps)
        after = TrainState(
            params, opt_state, state.step + 1, skipped, in_row, usual, scaled, average, statistics
        )
        if state_places is not None:
            after = put(after, state_places)
        return after, metrics

    return step


def _gradient(loss: Loss, policy: Any, health: Diagnosis | None) -> Callable[..., Any]:
    """A function of the arguments of a loss: what slices sum up, statistics, and what is read.

    The sum is of losses and gradients; read are the objective's measures and, by a diagnosis, the
    layers.
    """
    plain = xform.value_and_grad(loss, has_aux=True, policy=policy)

    def gradient(params: nnx.State, *given: Any) -> Any:
        found = (
            (*plain(params, *given), ())
            if health is None
            else health.value_and_grad(params, given, jax.random.key(0))
        )
        (value, (after, measures)), grads, read = found
        return [value, grads], after, (measures, read)

    return gradient


@functools.partial(jax.jit, static_argnums=0, static_argnames="policy", donate_argnums=1)
def train_step(model: Any, state: TrainState, tokens: jax.Array, *,
               policy: Any = None) -> tuple[TrainState, Metrics]:  # fmt: skip
    """One update with the usual optimizer, as `python -m xform memory` takes it."""
    mesh = jax.sharding.get_abstract_mesh()
    return make_step(model, _OPTIM, policy, mesh=mesh if mesh.size > 1 else None)(state, tokens)


def inputs(preset: str = "tiny", batch: int = 8, context: int | None = None,
           dtype: str = "bfloat16", scan: bool = True, mesh: str = ""
           ) -> tuple[Any, TrainState, jax.ShapeDtypeStruct]:  # fmt: skip
    """Arguments of `train_step` for a model of text, as types: nothing is allocated.

    On a mesh, such as `fsdp=4,tensor=4`, they have the shardings of a run, and the model's layers
    have those that the arguments imply.
    """
    base: Any = TRAINED[preset]
    config = dataclasses.replace(base, context=context or base.context, dtype=dtype, scan=scan)
    devices = abstract_mesh(mesh)
    tokens = jax.ShapeDtypeStruct((1, batch, config.context + 1), jnp.uint8)
    if devices.size == 1:
        return config, abstract_state(config, _OPTIM), tokens
    where = batch_sharding(devices, batch, axis=1)
    return config, abstract_state(config, _OPTIM, devices), tokens.update(sharding=where)


@functools.cache
def make_evaluate(model: Any, mesh: AbstractMesh | None = None
                  ) -> Callable[[nnx.State, Any], Metrics]:  # fmt: skip
    """The jitted mean `loss`, and the objective's measures, of a batch `[batch, ...]`.

    It takes the parameters and statistics of a model as one state: `TrainState.result`.
    """
    loss = make_loss(model, training=False, mesh=mesh)

    def judged(result: nnx.State, batch: Any) -> Metrics:
        params, statistics = nnx.split_state(brought(result), nnx.Param, nnx.BatchStat)
        value, (_, measures) = loss(params, statistics, jax.tree.map(jnp.asarray, batch))
        return {"loss": value, **measures}

    return jax.jit(judged)


def compile_step(model: Any, optim: OptimConfig, batch: Any, policy: Any = None, seed: int = 0,
                 mesh: Mesh | None = None, health: Diagnosis | None = None
                 ) -> jax.stages.Compiled:  # fmt: skip
    """Compile the step for a batch of these types, with its state donated."""
    state = abstract_state(model, optim, mesh)
    around = None if mesh is None else mesh.abstract_mesh
    step = jax.jit(make_step(model, optim, policy, seed, around, health), donate_argnums=0)
    compiled = step.lower(state, batch).compile()
    check_donation(compiled, state)
    return compiled


def check_donation(compiled: jax.stages.Compiled, state: TrainState) -> None:
    """See that XLA does reuse the memory of the donated state, on each device.

    Raises:
      RuntimeError: the aliased bytes are below the bytes of parameters and optimizer state.
    """
    donated = device_bytes(state) + device_bytes(state, waiting=True)
    memory: Any = compiled.memory_analysis()
    aliased = memory and memory.alias_size_in_bytes + memory.host_alias_size_in_bytes
    if not aliased or aliased < donated:
        raise RuntimeError(f"the step reuses {aliased} bytes of the {donated} of its state")
