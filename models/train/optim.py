"""Optimizers behind global-norm clipping, on a warmup and cosine schedule: all of them Optax's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, muon

from models.nets.sizes import DTYPES
from models.settings import setting


def _adamw(c: OptimConfig) -> optax.GradientTransformation:
    return optax.adamw(schedule(c), c.b1, c.b2, weight_decay=c.weight_decay, mask=_decays)


def _lion(c: OptimConfig) -> optax.GradientTransformation:
    return optax.lion(schedule(c), c.b1, c.b2, weight_decay=c.weight_decay, mask=_decays)


def _adafactor(c: OptimConfig) -> optax.GradientTransformation:
    return optax.chain(
        optax.adafactor(multiply_by_parameter_scale=False),  # of the sign of an update
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
        consistent_rms=0.2,  # updates of the size of AdamW's, which have its learning rate
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
    """What decides an update."""

    optimizer: str = setting("adamw", "How gradients become updates.", choices=tuple(OPTIMIZERS))
    steps: int = setting(1000, "Updates in the whole run.", least=1)
    learning_rate: float = setting(3e-3, "Peak of the schedule.", above=0, most=1e30)
    warmup: int = setting(50, "Updates of rising learning rate.", least=0)
    weight_decay: float = setting(0.1, "On matrices only.", least=0)
    clip: float = setting(1.0, "Largest global norm of a gradient; inf for any.", above=0)
    b1: float = setting(0.9, "Decay of the mean of gradients; sgd's momentum.", least=0, most=1)
    b2: float = setting(0.95, "Decay of the mean of their squares.", least=0, most=1)
    spike: float = setting(
        100.0, "A step is skipped whose gradient's norm is so many times the usual.", above=1
    )
    weights: str = setting(
        "float32",
        "What a step rounds parameters to before it reads them; their masters stay float32.",
        choices=DTYPES,
    )
    loss_scale: float = setting(
        2.0**15, "What a loss in float16 is multiplied by at first.", least=1, most=2.0**100
    )
    loss_scale_steps: int = setting(2000, "Good steps after which that doubles.", least=1)
    ema: float = setting(
        0.0,
        "Decay of a mean of the parameters, which is judged, sampled and exported; 0 for none.",
        least=0,
        most=1,
    )
    offload_optimizer: bool = setting(
        False,
        "Keep the optimizer's state, and the mean of --ema, in the host's memory between steps.",
        change="free",
    )
    most_skips: int = setting(10, "Steps skipped in a row before the run stops.", least=0)


def schedule(config: OptimConfig) -> optax.Schedule:
    """Rise linearly for `warmup` updates, then fall along a cosine to a tenth of the peak."""
    warmup = min(config.warmup, max(config.steps - 1, 0))
    return optax.warmup_cosine_decay_schedule(
        init_value=config.learning_rate / (warmup + 1),
        peak_value=config.learning_rate,
        warmup_steps=warmup,
        decay_steps=max(config.steps, warmup + 1),
        end_value=config.learning_rate / 10,
    )


def averaged(config: OptimConfig, mean: Any, params: Any, updates: jax.Array) -> Any:
    """The mean of the parameters with those after so many updates in it.

    It follows them closely at first, when `updates` are few, as in TensorFlow's
    `ExponentialMovingAverage`.
    """
    decay = jnp.minimum(config.ema, (1 + updates) / (10 + updates))
    return optax.incremental_update(params, mean, 1 - decay)


def optimizer(config: OptimConfig) -> optax.GradientTransformation:
    """The transformation of float32 gradients into float32 updates."""
    return optax.chain(clipping(config), rule(config))


def clipping(config: OptimConfig) -> optax.GradientTransformation:
    """What of that needs the gradient of all parameters."""
    return optax.clip_by_global_norm(config.clip)


def rule(config: OptimConfig) -> optax.GradientTransformation:
    """What of that is done for each parameter by itself."""
    return OPTIMIZERS[config.optimizer](config)


_MATRICES = ("kernel", "embedding", "mixture")


def _decays(params: Any) -> Any:
    # By name and not by rank: scanned layers give their norms a second axis.
    return _by_path(params, lambda path, _: any(word in path for word in _MATRICES))


def _hidden_matrices(params: Any) -> Any:
    """Which axes of what is a matrix in a layer are its inputs and outputs; Adam has the others."""

    def axes(path: str, leaf: jax.Array) -> MuonDimensionNumbers | None:
        if "layers" not in path or not ("kernel" in path or "mixture" in path):
            return None
        last = leaf.ndim - 1
        if "input" in path or "recur" in path:  # of a recurrent layer: each gate has a matrix
            return MuonDimensionNumbers(0, last)
        if "attention" in path:  # heads, and what is in each, are one axis
            heads = (last - 2, last - 1) if "out" in path else (last - 1, last)
            return (
                MuonDimensionNumbers(heads, last)
                if "out" in path
                else MuonDimensionNumbers(last - 2, heads)
            )
        return MuonDimensionNumbers(last - 1, last)

    return _by_path(params, axes)


def _by_path(params: Any, ask: Callable[[str, Any], Any]) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: ask(jax.tree_util.keystr(path), leaf), params
    )
