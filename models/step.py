"""One training step as a compiled program that reuses the memory of the state it is given."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

import xform
from models.config import PRESETS, TransformerConfig
from models.optim import OptimConfig, optimizer, schedule
from models.transformer import Transformer, abstract_transformer, next_token_loss


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["params", "opt_state", "step"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a step changes: float32 parameters, the optimizer's state, updates done (int32)."""

    params: nnx.State
    opt_state: optax.OptState
    step: jax.Array


Metrics = dict[str, jax.Array]
# What the memory of a step is analyzed with: the number of steps decides no bytes.
_OPTIM = OptimConfig(steps=1000)
Step = Callable[[TrainState, jax.Array], tuple[TrainState, Metrics]]


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def init_state(model: TransformerConfig, optim: OptimConfig, seed: int) -> TrainState:
    """The state before the first update; `jax.eval_shape` gives its shapes alone."""
    params = nnx.state(Transformer(model, rngs=nnx.Rngs(seed)), nnx.Param)
    return TrainState(params, optimizer(optim).init(params), jnp.zeros((), jnp.int32))


def make_step(model: TransformerConfig, optim: OptimConfig, policy: Any = None) -> Step:
    """The pure function of one update, of which `policy` says what the backward pass keeps.

    It maps a state and uint8 tokens `[accumulate, batch, window + 1]` to the next state and the
    metrics `loss` (nats per token, before the update), `grad_norm` and `learning_rate`. Gradients
    of the `accumulate` slices are summed one after another, so that only one slice's activations
    are held.
    """
    graphdef, _ = nnx.split(abstract_transformer(model))
    transform = optimizer(optim)

    def gradient(params: nnx.State, tokens: jax.Array) -> tuple[jax.Array, nnx.State]:
        # A copy, since NNX takes no variables that were made outside the loop over slices.
        merged = nnx.merge(graphdef, params, copy=True)
        differentiate = xform.flax.value_and_grad(next_token_loss, policy=policy)
        return differentiate(merged, tokens.astype(jnp.int32))

    def step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, Metrics]:
        if tokens.shape[0] == 1:
            loss, grads = gradient(state.params, tokens[0])
        else:
            zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.params))

            def add(total: Any, slice_: jax.Array) -> tuple[Any, None]:
                return jax.tree.map(jnp.add, total, gradient(state.params, slice_)), None

            summed, _ = jax.lax.scan(add, zero, tokens)
            loss, grads = jax.tree.map(lambda leaf: leaf / tokens.shape[0], summed)
        updates, opt_state = transform.update(grads, state.opt_state, state.params)
        metrics = {
            "loss": loss,
            "grad_norm": optax.tree.norm(grads),
            "learning_rate": jnp.asarray(schedule(optim)(state.step), jnp.float32),
        }
        params: Any = optax.apply_updates(state.params, updates)
        return TrainState(params, opt_state, state.step + 1), metrics

    return step


@functools.partial(jax.jit, static_argnums=0, static_argnames="policy", donate_argnums=1)
def train_step(model: TransformerConfig, state: TrainState, tokens: jax.Array, *,
               policy: Any = None) -> tuple[TrainState, Metrics]:  # fmt: skip
    """One update with the usual optimizer, as `python -m xform memory` takes it."""
    return make_step(model, _OPTIM, policy)(state, tokens)


def inputs(preset: str = "tiny", batch: int = 8, context: int | None = None, dtype: str = "bf16",
           scan: bool = True, data: int = 1, model: int = 1
           ) -> tuple[TransformerConfig, TrainState, jax.ShapeDtypeStruct]:  # fmt: skip
    """Arguments of `train_step` as types: nothing is allocated.

    On `data` x `model` devices the batch is sharded over the one axis, and the largest axis of each
    array of the state over both, if they divide it.
    """
    base = PRESETS[preset]
    config = dataclasses.replace(base, context=context or base.context, dtype=dtype, scan=scan)
    state = jax.eval_shape(lambda: init_state(config, _OPTIM, 0))
    tokens = jax.ShapeDtypeStruct((1, batch, config.context + 1), jnp.uint8)
    if data * model == 1:
        return config, state, tokens
    mesh = AbstractMesh((data, model), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def sharded(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        axis = max(range(x.ndim), key=lambda i: x.shape[i], default=0)
        split = x.ndim and x.shape[axis] % (data * model) == 0
        spec = P(*[None] * axis, ("data", "model")) if split else P()
        return x.update(sharding=NamedSharding(mesh, spec))

    tokens = tokens.update(sharding=NamedSharding(mesh, P(None, "data")))
    return config, jax.tree.map(sharded, state), tokens


@functools.cache
def make_evaluate(model: TransformerConfig) -> Callable[[nnx.State, ArrayLike], jax.Array]:
    """The jitted mean loss, nats per token, of uint8 tokens `[batch, window + 1]`."""
    graphdef, _ = nnx.split(abstract_transformer(model))

    @jax.jit
    def evaluate(params: nnx.State, tokens: ArrayLike) -> jax.Array:
        return next_token_loss(nnx.merge(graphdef, params), jnp.asarray(tokens, jnp.int32))

    return evaluate


@functools.cache
def compile_step(
    model: TransformerConfig, optim: OptimConfig, tokens_shape: tuple[int, int, int]
) -> jax.stages.Compiled:
    """Compile the step for tokens `[accumulate, batch, window + 1]`, with its state donated."""
    state = jax.eval_shape(lambda: init_state(model, optim, seed=0))
    tokens = jax.ShapeDtypeStruct(tokens_shape, jnp.uint8)
    compiled = jax.jit(make_step(model, optim), donate_argnums=0).lower(state, tokens).compile()
    check_donation(compiled, state)
    return compiled


def check_donation(compiled: jax.stages.Compiled, state: TrainState) -> None:
    """See that XLA does reuse the memory of the donated state.

    Raises:
      RuntimeError: the aliased bytes are below the bytes of parameters and optimizer state.
    """
    donated = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    memory = compiled.memory_analysis()
    aliased = 0 if memory is None else memory.alias_size_in_bytes
    if aliased < donated:
        raise RuntimeError(f"the step reuses {aliased} bytes of the {donated} of its state")
