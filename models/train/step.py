"""The training step, as a compiled program with a donated state."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from models.nets.objectives import OBJECTIVES
from models.nets.presets import TRAINED, abstract
from models.train.gradient import fused, separate
from models.train.host import fetch_after, put, to_device
from models.train.mesh import abstract_mesh, batch_sharding, placed
from models.train.optim import OptimConfig, averaged, schedule
from models.train.state import TrainState, abstract_state, device_bytes, shardings_of
from models.train.update import select
from xform.diagnosis import Diagnosis

Metrics = dict[str, Any]
Step = Callable[[TrainState, Any], tuple[TrainState, Metrics]]
Loss = Callable[..., tuple[jax.Array, tuple[nnx.State, Metrics]]]
# Optimizer settings for memory analyses. Their numbers do not affect the memory.
_OPTIM = OptimConfig()
# Weight of the latest gradient norm in its moving average.
_LATEST_WEIGHT = 0.02


def make_loss(model: Any, training: bool = True, mesh: AbstractMesh | None = None) -> Loss:
    """Make the loss as a pure function of parameters, statistics and a batch.

    Policies are planned for this function, in a step and in `xform.plan`. It returns the mean loss,
    and a pair of the new statistics and the objective's metrics. In training it takes two more
    arguments: the key of dropout (None if the model has no dropout), and the loss scale or None.

    Args:
      model: the model configuration.
      training: whether it is for training. Otherwise the model is in evaluation mode: it reads the
        statistics and does not change them.
      mesh: the mesh of the arguments. The gradient gets the sharding of the parameters. A batch,
        and the statistics of batch norms, are global over the devices.
    """
    abstract_model = abstract(model)
    if not training:
        abstract_model.eval()
    graphdef, types, _ = nnx.split(abstract_model, nnx.Param, nnx.BatchStat)
    shardings = None if mesh is None else shardings_of(placed(types, mesh))
    objective = OBJECTIVES[type(model)].loss

    def loss(params: nnx.State, statistics: nnx.State, batch: Any, key: jax.Array | None = None,
             scale: jax.Array | None = None) -> Any:  # fmt: skip
        if shardings is not None:  # this also fixes the sharding of their gradient
            params = jax.lax.with_sharding_constraint(params, shardings)
        # Copy: NNX refuses to change variables that were made outside the loop over slices.
        merged = nnx.merge(graphdef, params, statistics, copy=True)
        with using_mesh(mesh), jax.named_scope("forward"):
            value, metrics = objective(merged, batch, key, training)
        statistics = nnx.state(merged, nnx.BatchStat)
        return value if scale is None else value * scale, (statistics, metrics)

    return loss


def using_mesh(mesh: AbstractMesh | None) -> contextlib.AbstractContextManager[Any]:
    """Return a context manager that sets the mesh for the sharding constraints of layers."""
    return contextlib.nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh)


def dropout_key(model: Any, seed: int, step: jax.Array) -> jax.Array | None:
    """Return the key of a step's dropout, from seed and step; None if there is no dropout."""
    if not getattr(model, "dropout", 0.0):
        return None
    return jax.random.fold_in(jax.random.key(seed), step)


def make_step(model: Any, optim: OptimConfig, policy: Any = None, seed: int = 0,
              mesh: AbstractMesh | None = None, health: Diagnosis | None = None
              ) -> Step:  # fmt: skip
    """Make the pure function of one training step.

    It maps a state and a tree of arrays `[accumulate, batch, ...]` to the next state and a
    dictionary of metrics: `loss` (before the update), the objective's metrics, `grad_norm`,
    `learning_rate` and `skipped`. `skipped` is 1.0 if loss, gradient or statistics are not finite,
    or if the gradient is a spike. Such a step changes neither parameters, statistics nor optimizer
    state.

    The gradients of the `accumulate` slices are computed one after the other and summed, so only
    the activations of one slice are in memory. A batch norm normalizes each slice by itself and
    updates its statistics with each. Gradients are with respect to the rounded parameters, and are
    summed and applied in float32. In float16 the loss is scaled, and `loss_scale` is a metric.
    Offloaded optimizer state is copied to the device after the gradient is computed, and back after
    the update.

    With `optim.fused_update` each parameter is updated as soon as its gradient is complete. A batch
    has one slice then. Only a loss or statistics that are not finite skip the step. With `health`
    the update is separate all the same.

    Args:
      model: the model configuration.
      optim: the settings of the optimizer.
      policy: which values the backward pass saves.
      seed: the random seed of dropout.
      mesh: the mesh of the state, which keeps its sharding.
      health: a diagnosis of the loss (`models.train.health`), whose readings of the layers become
        the metric `health`.
    """
    loss = make_loss(model, mesh=mesh)
    state_places = None if mesh is None else shardings_of(abstract_state(model, optim, mesh))
    offloads = mesh is not None and optim.offload_optimizer
    compute = (
        fused(model, loss, optim, policy)
        if optim.fused_update and health is None
        else separate(loss, optim, policy, health, offloads)
    )

    def step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        found = compute(state, batch, dropout_key(model, seed, state.step))
        norm, good, params, statistics = found.norm, found.good, found.params, found.statistics
        first = jnp.isinf(state.usual_norm)
        usual = jnp.where(
            first, norm, (1 - _LATEST_WEIGHT) * state.usual_norm + _LATEST_WEIGHT * norm
        )
        done = state.step - state.skipped
        result = nnx.merge_state(params, statistics)
        mean = fetch_after(state.average, jax.tree.leaves(params)[-1])
        average = mean and averaged(optim, mean, result, done)
        new = state.skipped, jnp.zeros_like(state.skipped), usual, average, statistics
        old = (state.skipped + 1, state.skipped_in_row + 1, state.usual_norm, mean,
               state.statistics)  # fmt: skip
        skipped, in_row, usual, average, statistics = select(good, new, old)
        metrics = {
            "loss": found.loss,
            **found.measures,
            "grad_norm": norm,
            "learning_rate": jnp.asarray(schedule(optim)(done), jnp.float32),
            "skipped": 1.0 - good,
        }
        if state.loss_scale is not None:
            metrics["loss_scale"] = state.loss_scale.value
        if health is not None:
            metrics["health"] = health.updated(
                found.readings, state.params, params, state.loss_scale and state.loss_scale.value
            )
        scaled = state.loss_scale and state.loss_scale.after(found.finite, optim.loss_scale_steps)
        after = TrainState(
            params,
            found.opt_state,
            state.step + 1,
            skipped,
            in_row,
            usual,
            scaled,
            average,
            statistics,
        )
        if state_places is not None:
            after = put(after, state_places)
        return after, metrics

    return step


@functools.partial(jax.jit, static_argnums=0, static_argnames="policy", donate_argnums=1)
def train_step(model: Any, state: TrainState, tokens: jax.Array, *,
               policy: Any = None) -> tuple[TrainState, Metrics]:  # fmt: skip
    """Run one step with the default optimizer. It is an example for `python -m xform memory`."""
    mesh = jax.sharding.get_abstract_mesh()
    return make_step(model, _OPTIM, policy, mesh=mesh if mesh.size > 1 else None)(state, tokens)


def inputs(preset: str = "tiny", batch: int = 8, context: int | None = None,
           dtype: str = "bfloat16", scan_layers: bool = True, mesh: str = ""
           ) -> tuple[Any, TrainState, jax.ShapeDtypeStruct]:  # fmt: skip
    """Return the types of the arguments of `train_step` for a model of text.

    Nothing is allocated. With a mesh, such as `fsdp=4,tensor=4`, the arguments have the shardings
    of a run, and the layers of the model follow them.
    """
    base: Any = TRAINED[preset]
    config = dataclasses.replace(
        base, context=context or base.context, dtype=dtype, scan_layers=scan_layers
    )
    devices = abstract_mesh(mesh)
    tokens = jax.ShapeDtypeStruct((1, batch, config.context + 1), jnp.uint8)
    if devices.size == 1:
        return config, abstract_state(config, _OPTIM), tokens
    where = batch_sharding(devices, batch, axis=1)
    return config, abstract_state(config, _OPTIM, devices), tokens.update(sharding=where)


@functools.cache
def make_evaluate(model: Any, mesh: AbstractMesh | None = None
                  ) -> Callable[[nnx.State, Any], Metrics]:  # fmt: skip
    """Make a jitted function that evaluates a model on a batch `[batch, ...]`.

    It takes the parameters and statistics as one state, `TrainState.result`, and the batch. It
    returns the mean `loss` and the objective's metrics.
    """
    loss = make_loss(model, training=False, mesh=mesh)

    def evaluate(result: nnx.State, batch: Any) -> Metrics:
        params, statistics = nnx.split_state(to_device(result), nnx.Param, nnx.BatchStat)
        value, (_, measures) = loss(params, statistics, jax.tree.map(jnp.asarray, batch))
        return {"loss": value, **measures}

    return jax.jit(evaluate)


def compile_step(model: Any, optim: OptimConfig, batch: Any, policy: Any = None, seed: int = 0,
                 mesh: Mesh | None = None, health: Diagnosis | None = None
                 ) -> jax.stages.Compiled:  # fmt: skip
    """Compile the step for batches of these types, with a donated state."""
    state = abstract_state(model, optim, mesh)
    around = None if mesh is None else mesh.abstract_mesh
    step = jax.jit(make_step(model, optim, policy, seed, around, health), donate_argnums=0)
    compiled = step.lower(state, batch).compile()
    check_donation(compiled, state)
    return compiled


def check_donation(compiled: jax.stages.Compiled, state: TrainState) -> None:
    """Check that XLA reuses all the memory of the donated state, on each device.

    Raises:
      RuntimeError: fewer bytes are aliased than the state has.
    """
    donated = device_bytes(state) + device_bytes(state, offloaded=True)
    memory: Any = compiled.memory_analysis()
    aliased = memory and memory.alias_size_in_bytes + memory.host_alias_size_in_bytes
    if not aliased or aliased < donated:
        raise RuntimeError(
            f"the compiled step reuses only {aliased} of the {donated} bytes of its donated state:"
            " report this error with the command"
        )
