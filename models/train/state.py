"""All that a training step changes."""

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
      opt_state: the optimizer's.
      step: updates done or skipped, int32; `skipped` of them changed nothing, `skipped_in_row` of
        these were the last.
      usual_norm: a moving mean of the gradient's norm; infinite before the first update.
      loss_scale: what the loss is multiplied by; None where nothing is in float16.
      average: a moving mean of the parameters and the statistics; None without `--ema`.
      statistics: what the model gathers of the batches that it sees, as batch norms do; empty where
        there are none.
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
        """The parameters and statistics that are judged, sampled and exported."""
        if self.average is not None:
            return self.average
        return nnx.merge_state(self.params, self.statistics)


def init_state(model: Any, optim: OptimConfig, seed: int, mesh: Mesh | None = None) -> TrainState:
    """The state before the first update; of a mesh each device makes its part of the same."""
    if mesh is None:
        return _first(model, optim, seed)
    types = abstract_state(model, optim, mesh)
    first = lambda: _first(model, optim, seed)
    return jax.jit(first, out_shardings=shardings_of(types))()


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _first(model: Any, optim: OptimConfig, seed: int) -> TrainState:
    _, params, statistics = nnx.split(build(model, seed), nnx.Param, nnx.BatchStat)
    none = jnp.zeros((), jnp.int32)
    no_norm = jnp.array(jnp.inf, jnp.float32)
    opt_state = optimizer(optim).init(params)
    return TrainState(
        params,
        opt_state,
        none,
        none,
        none,
        no_norm,
        first_scale(model, optim),
        jax.tree.map(jnp.copy, nnx.merge_state(params, statistics)) if optim.ema else None,
        statistics,
    )


def abstract_state(
    model: Any, optim: OptimConfig, mesh: Mesh | AbstractMesh | None = None
) -> TrainState:
    """The state as shapes and dtypes alone, and on a mesh with shardings, each of a memory."""
    state = jax.eval_shape(lambda: init_state(model, optim, 0))
    if mesh is None:
        return state
    state = placed(state, mesh)
    if not optim.offload_optimizer:
        return state
    opt_state, average = placed((state.opt_state, state.average), mesh, HOST)
    return dataclasses.replace(state, opt_state=opt_state, average=average)


def shardings_of(types: Tree) -> Tree:
    """Where each array of a tree of types lies."""
    return jax.tree.map(lambda x: x.sharding, types)


def device_bytes(tree: Any, waiting: bool = False) -> int:
    """Bytes of arrays, or of types of arrays, on each device, or for each waiting on its host."""

    def size(leaf: Any) -> int:
        sharding = getattr(leaf, "sharding", None)
        shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
        return int(jnp.dtype(leaf.dtype).itemsize) * math.prod(shape)

    return sum(size(leaf) for leaf in jax.tree.leaves(tree) if on_host(leaf) == waiting)
