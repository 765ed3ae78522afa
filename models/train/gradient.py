"""The gradient of a step and its update: one after the other, or each parameter by itself.

With `--fused-update` a parameter is updated as soon as its own gradient is complete
(`xform.fused_update`). So the norm over all gradients is known only after the update. It can
neither clip the gradients of its own step nor skip that step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import xform
from models.errors import InputError
from models.train.optim import OptimConfig, optimizer
from models.train.precision import rounded
from models.train.state import TrainState
from models.train.update import select, updated, updated_in_turn
from xform.diagnosis import Diagnosis

# Takes a state, a tree of arrays `[accumulate, batch, ...]` and the key of dropout or None.
Compute = Callable[[TrainState, Any, jax.Array | None], "Computed"]
Loss = Callable[..., Any]


class Computed(NamedTuple):
    """The loss of one step, its new parameters and its metrics.

    Attributes:
      loss: the mean loss, float32.
      norm: the norm of the gradient over all parameters, float32.
      finite: whether loss, gradient and statistics are finite. In a fused step, whether loss and
        statistics are.
      good: whether the step is good. Otherwise it changes nothing.
      params: the new parameters; the old ones if the step is not good.
      opt_state: the new optimizer state; the old one if the step is not good.
      statistics: the new statistics, also if the step is not good.
      measures: the metrics of the objective.
      readings: the readings of the diagnosis; `()` without one.
    """

    loss: jax.Array
    norm: jax.Array
    finite: jax.Array
    good: jax.Array
    params: nnx.State
    opt_state: optax.OptState
    statistics: nnx.State
    measures: dict[str, Any]
    readings: Any


def separate(loss: Loss, optim: OptimConfig, policy: Any, health: Diagnosis | None,
             offloads: bool) -> Compute:  # fmt: skip
    """Make the function that computes the whole gradient, and then updates all parameters.

    Args:
      loss: the loss of a model (`models.train.step.make_loss`).
      optim: the settings of the optimizer.
      policy: which values the backward pass saves.
      health: a diagnosis of the loss, or None.
      offloads: whether the optimizer state is in host memory.
    """
    gradient, update = _gradient(loss, policy, health), updated_in_turn if offloads else updated

    def compute(state: TrainState, batch: Any, key: jax.Array | None) -> Computed:
        params, scale = rounded(state.params, optim), state.loss_scale and state.loss_scale.value
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
            add = xform.passes.SumInLoops()(add)  # the gradients of scanned layers, in place
            (summed, statistics), seen = jax.lax.scan(add, before, (batch, keys))
            seen = jax.tree.map(lambda x: jnp.mean(x, 0), seen)
        parts = slices if scale is None else slices * scale
        value, grads = jax.tree.map(lambda leaf: leaf.astype(jnp.float32) / parts, summed)
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(norm) & _finite(value, statistics)
        good = finite
        if optim.spike_factor < math.inf:
            good &= norm <= optim.spike_factor * state.usual_norm
        with jax.named_scope("update"):
            params, opt_state = update(optim, state, grads, good)
        return Computed(value, norm, finite, good, params, opt_state, statistics, *seen)

    return compute


def fused(model: Any, loss: Loss, optim: OptimConfig, policy: Any) -> Compute:
    """Make the function that updates each parameter as soon as its gradient is complete.

    The arguments are those of `separate`, and the model configuration. The function raises an
    InputError for settings that need all gradients before the update.
    """
    record = xform.clip_by_previous_global_norm(math.inf)  # clips nothing, and keeps the norm
    recording = optax.chain(record, _only_if_finite(optimizer(optim)))
    of_masters = lambda params, *given: loss(rounded(params, optim), *given)
    step = xform.fused_update(of_masters, recording, has_aux=True, policy=policy)

    def compute(state: TrainState, batch: Any, key: jax.Array | None) -> Computed:
        check_fused(model, optim, jax.tree.leaves(batch)[0].shape[0])
        only = jax.tree.map(lambda x: x[0], batch)
        before = record.init(state.params), state.opt_state
        params, (recorded, opt_state), (value, aux) = step(
            state.params, before, state.statistics, only, key
        )
        (statistics, measures), value = aux, value.astype(jnp.float32)
        good = _finite(value, statistics)
        return Computed(
            value, recorded.norm, good, good, params, opt_state, statistics, measures, ()
        )

    return compute


def check_fused(model: Any, optim: OptimConfig, accumulate: int) -> None:
    """Check that no setting needs the gradients of all parameters before `--fused-update`.

    Raises:
      InputError: one does. The message names each such setting, and what to give instead.
    """
    if not optim.fused_update:
        return
    clips = optim.clip_norm < math.inf and optim.clip_by == "global_norm"
    conflicts = [
        (accumulate > 1, "--accumulate adds the gradients of several batches first",
         "--accumulate 1"),
        (clips, "--clip-norm scales by the norm over all gradients",
         "--clip-by previous_global_norm (the norm of the step before) or --clip-norm inf"),
        (optim.spike_factor < math.inf, "--spike-factor skips a step by that norm",
         "--spike-factor inf"),
        ("float16" in (model.dtype, optim.weight_dtype),
         "in float16 a step is skipped if any gradient overflows", "--dtype bfloat16"),
        (optim.offload_optimizer, "--offload-optimizer fetches the state after the backward pass",
         "--fused-update without it"),
    ]  # fmt: skip
    found = [(reason, remedy) for applies, reason, remedy in conflicts if applies]
    if found:
        reasons, remedies = zip(*found, strict=True)
        raise InputError(
            "--fused-update updates each parameter before all gradients are known, but"
            f" {', and '.join(reasons)}: give {', and '.join(remedies)}, or leave out"
            " --fused-update"
        )


def _only_if_finite(inner: Any) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer that changes nothing if the loss or the statistics are not finite."""

    def update(grads: Any, opt_state: Any, params: Any = None, *, value: jax.Array, aux: Any
               ) -> Any:  # fmt: skip
        statistics, _ = aux
        with jax.named_scope("update"):
            good = _finite(value, statistics)
            updates, after = inner.update(grads, opt_state, params)
            unchanged = jax.tree.map(jnp.zeros_like, updates), opt_state
            return select(good, (updates, after), unchanged)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def _finite(loss: jax.Array, statistics: Any) -> jax.Array:
    """Return whether the loss and all statistics are finite."""
    finite = jnp.isfinite(loss)
    for leaf in jax.tree.leaves(statistics):
        finite &= jnp.all(jnp.isfinite(leaf))
    return finite


def _gradient(loss: Loss, policy: Any, health: Diagnosis | None) -> Callable[..., Any]:
    """Make the gradient function of a loss.

    It takes the arguments of the loss, for one slice of a step. It returns `[loss, gradient]`, to
    be summed over the slices; the new statistics; and a pair of the objective's metrics and the
    readings of the diagnosis (`()` without a diagnosis).
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
