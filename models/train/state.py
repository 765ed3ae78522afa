"""The training state: everything that a training step changes."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from models.nets.presets import build
from models.train.host import HOST, on_host
from models.train.mesh import placed
from models.train.optim import OptimConfig, optimizer
from models.train.precision import LossScale, first_scale

Tree = TypeVar("Tree")


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "params",
        "opt_state",
        "step",
        "skipped",
        "skipped_in_row",
        "usual_norm",
        "loss_scale",
        "average",
        "statistics",
    ],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state of a run.

    Attributes:
      params: float32 parameters.
      opt_state: the optimizer state.
      step: number of steps, including skipped ones, int32.
      skipped: number of skipped steps, which changed nothing.
      skipped_in_row: number of skipped steps since the last one that was not skipped.
      usual_norm: moving average of the gradient norm; infinite before the first update.
      loss_scale: the factor of the loss; None if nothing is in float16.
      average: moving average of the parameters and the statistics; None without `--ema-decay`.
      statistics: running statistics of the model, such as those of batch norms; may be empty.
    """

    params: nnx.State
    opt_state: optax.OptState
    step: jax.Array
    skipped: jax.Array
    skipped_in_row: jax.Array
    usual_norm: jax.Array
    loss_scale: LossScale | None
    average: nnx.State | None
    statistics: nnx.State

    @property
    def result(self) -> nnx.State:
        """The parameters and statistics that are validated, sampled and exported."""
        if self.average is not None:
            return self.average
        return nnx.merge_state(self.params, self.statistics)


def init_state(model: Any, optim: OptimConfig, seed: int, mesh: Mesh | None = None) -> TrainState:
    """Make the state before the first step. On a mesh, each device makes its part of it."""
    if mesh is None:
        return _first(model, optim, seed)
    types = abstract_state(model, optim, mesh)
    first = lambda: _first(model, optim, seed)
    return jax.jit(first, out_shardings=shardings_of(types))()


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _first(model: Any, optim: OptimConfig, seed: int) -> TrainState:
    """Make the state before the first step, on one device."""
    _, params, statistics = nnx.split(build(model, seed), nnx.Param, nnx.BatchStat)
    zero = jnp.zeros((), jnp.int32)
    no_norm = jnp.array(jnp.inf, jnp.float32)
    opt_state = optimizer(optim).init(params)
    return TrainState(
        params,
        opt_state,
        zero,
        zero,
        zero,
        no_norm,
        first_scale(model, optim),
        jax.tree.map(jnp.copy, nnx.merge_state(params, statistics)) if optim.ema_decay else None,
        statistics,
    )


def abstract_state(
    model: Any, optim: OptimConfig, mesh: Mesh | AbstractMesh | None = None
) -> TrainState:
    """Return the state as shapes and dtypes only, and on a mesh with shardings and memory kinds."""
    state = jax.eval_shape(lambda: init_state(model, optim, 0))
    if mesh is None:
        return state
    state = placed(state, mesh)
    if not optim.offload_optimizer:
        return state
    opt_state, average = placed((state.opt_state, state.average), mesh, HOST)
    return dataclasses.replace(state, opt_state=opt_state, average=average)


def shardings_of(types: Tree) -> Tree:
    """Return the sharding of each array in a tree of types."""
    return jax.tree.map(lambda x: x.sharding, types)


def device_bytes(tree: Any, offloaded: bool = False) -> int:
    """Count the bytes of arrays, or of their types, in the memory of each device.

    With `offloaded`, count the bytes in host memory for each device instead.
    """

    def size(leaf: Any) -> int:
        sharding = getattr(leaf, "sharding", None)
        shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
        return int(jnp.dtype(leaf.dtype).itemsize) * math.prod(shape)

    return sum(size(leaf) for leaf in jax.tree.leaves(tree) if on_host(leaf) == offloaded)
