"""Optimizers of Optax, with global-norm clipping, and a warmup and cosine schedule."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, muon

import xform
from models.nets.sizes import DTYPES
from models.settings import setting


def _adamw(c: OptimConfig) -> optax.GradientTransformation:
    return optax.adamw(schedule(c), c.b1, c.b2, weight_decay=c.weight_decay, mask=_decays)


def _lion(c: OptimConfig) -> optax.GradientTransformation:
    return optax.lion(schedule(c), c.b1, c.b2, weight_decay=c.weight_decay, mask=_decays)


def _adafactor(c: OptimConfig) -> optax.GradientTransformation:
    return optax.chain(
        optax.adafactor(multiply_by_parameter_scale=False),  # its updates are already negated
        optax.add_decayed_weights(-c.weight_decay, mask=_decays),
        optax.scale_by_schedule(schedule(c)),
    )


def _muon(c: OptimConfig) -> optax.GradientTransformation:
    return muon(
        schedule(c),
        beta=c.b1,
        adam_b1=c.b1,
        adam_b2=c.b2,
        weight_decay=c.weight_decay,
        weight_decay_mask=_decays,
        consistent_rms=0.2,  # updates as large as AdamW's, so that the same learning rate suits
        muon_weight_dimension_numbers=_hidden_matrices,
    )


def _sgd(c: OptimConfig) -> optax.GradientTransformation:
    return optax.chain(
        optax.add_decayed_weights(c.weight_decay, mask=_decays),
        optax.sgd(schedule(c), momentum=c.b1),
    )


OPTIMIZERS: dict[str, Callable[[OptimConfig], optax.GradientTransformation]] = {
    "adamw": _adamw,
    "lion": _lion,
    "adafactor": _adafactor,
    "muon": _muon,
    "sgd": _sgd,
}


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """Settings of the optimizer."""

    optimizer: str = setting("adamw", "Optimizer.", choices=tuple(OPTIMIZERS))
    steps: int = setting(1000, "Number of training steps of the whole run.", least=1)
    learning_rate: float = setting(3e-3, "Peak learning rate of the schedule.", above=0, most=1e30)
    warmup_steps: int = setting(
        50, "Number of steps in which the learning rate rises to its peak.", least=0
    )
    weight_decay: float = setting(0.1, "Weight decay, applied to matrices only.", least=0)
    clip_norm: float = setting(
        1.0, "Scale gradients down to at most this global norm; inf for no clipping.", above=0
    )
    clip_by: str = setting(
        "global_norm",
        "Norm that --clip-norm bounds: of the gradient itself, or of the gradient of the step"
        " before, which --fused-update can use.",
        choices=("global_norm", "previous_global_norm"),
    )
    b1: float = setting(
        0.9, "Decay rate of the first moment (mean of gradients); momentum of sgd.", least=0, most=1
    )
    b2: float = setting(
        0.95, "Decay rate of the second moment (mean of squared gradients).", least=0, most=1
    )
    spike_factor: float = setting(
        100.0,
        "Skip a step whose gradient norm is more than this many times the usual one (a moving"
        " average).",
        above=1,
    )
    weight_dtype: str = setting(
        "float32",
        "dtype to which each step rounds the parameters before it uses them; the stored parameters"
        " stay float32.",
        choices=DTYPES,
    )
    loss_scale: float = setting(
        2.0**15, "Initial factor of the loss in float16.", least=1, most=2.0**100
    )
    loss_scale_steps: int = setting(
        2000, "Number of consecutive finite steps after which --loss-scale doubles.", least=1
    )
    ema_decay: float = setting(
        0.0,
        "Decay rate of an exponential moving average of the parameters. The average is validated,"
        " sampled and exported instead of the parameters; 0 for no average.",
        least=0,
        most=1,
    )
    offload_optimizer: bool = setting(
        False,
        "Keep the optimizer state, and the average of --ema-decay, in host memory between steps.",
        change="free",
    )
    fused_update: bool = setting(
        False,
        "Update each parameter in the backward pass, as soon as its gradient is complete, so that a"
        " gradient of all parameters never exists. It needs --accumulate 1, --spike-factor inf, and"
        " --clip-by previous_global_norm or --clip-norm inf. A gradient that is not finite stops"
        " the run.",
    )
    max_skips: int = setting(10, "Stop if more than this many steps in a row are skipped.", least=0)


def schedule(config: OptimConfig) -> optax.Schedule:
    """Make the schedule: a linear rise for `warmup_steps` steps, then a cosine decay to a tenth."""
    warmup = min(config.warmup_steps, max(config.steps - 1, 0))
    return optax.warmup_cosine_decay_schedule(
        init_value=config.learning_rate / (warmup + 1),
        peak_value=config.learning_rate,
        warmup_steps=warmup,
        decay_steps=max(config.steps, warmup + 1),
        end_value=config.learning_rate / 10,
    )


def averaged(config: OptimConfig, mean: Any, params: Any, updates: jax.Array) -> Any:
    """Update the moving average of the parameters.

    While `updates`, the number of updates so far, is small, the decay rate is lower, as in
    TensorFlow's `ExponentialMovingAverage`.
    """
    decay = jnp.minimum(config.ema_decay, (1 + updates) / (10 + updates))
    return optax.incremental_update(params, mean, 1 - decay)


def optimizer(config: OptimConfig) -> optax.GradientTransformation:
    """Make the optimizer, which maps float32 gradients to float32 updates."""
    return optax.chain(clipping(config), rule(config))


def clipping(config: OptimConfig) -> optax.GradientTransformation:
    """Make the part of the optimizer that needs the gradients of all parameters."""
    if config.clip_by == "previous_global_norm":
        return xform.clip_by_previous_global_norm(config.clip_norm)
    if config.clip_norm == math.inf:
        return optax.identity()
    return optax.clip_by_global_norm(config.clip_norm)


def rule(config: OptimConfig) -> optax.GradientTransformation:
    """Make the part of the optimizer that treats each parameter independently."""
    return OPTIMIZERS[config.optimizer](config)


# Parts of the names of matrices.
_MATRICES = ("kernel", "embedding", "mixture")


def _decays(params: Any) -> Any:
    """Return which parameters weight decay applies to, as a tree of bools."""
    # By name, not by rank: in scanned layers even the scales of norms have two axes.
    return _by_path(params, lambda path, _: any(word in path for word in _MATRICES))


def _hidden_matrices(params: Any) -> Any:
    """Return the input and output axes of each matrix inside layers, which Muon updates.

    Other parameters get None. Adam updates them.
    """

    def axes(path: str, leaf: jax.Array) -> MuonDimensionNumbers | None:
        if "layers" not in path or not ("kernel" in path or "mixture" in path):
            return None
        last = leaf.ndim - 1
        if "input" in path or "recur" in path:  # a recurrent layer has a matrix for each gate
            return MuonDimensionNumbers(0, last)
        if "attention" in path:  # the axes of heads and of their elements form one matrix axis
            heads = (last - 2, last - 1) if "out" in path else (last - 1, last)
            return (
                MuonDimensionNumbers(heads, last)
                if "out" in path
                else MuonDimensionNumbers(last - 2, heads)
            )
        return MuonDimensionNumbers(last - 1, last)

    return _by_path(params, axes)


def _by_path(params: Any, decide: Callable[[str, Any], Any]) -> Any:
    """Map `decide(path, leaf)` over the parameters."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: decide(jax.tree_util.keystr(path), leaf), params
    )
