"""The optimizer: AdamW behind global-norm clipping, on a warmup and cosine schedule."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import optax


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """What decides an update, for a run of `steps` of them."""

    steps: int
    learning_rate: float = 3e-3
    warmup: int = 50
    weight_decay: float = 0.1
    clip: float = 1.0
    b1: float = 0.9
    b2: float = 0.95


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


def optimizer(config: OptimConfig) -> optax.GradientTransformation:
    """The transformation of float32 gradients into float32 updates."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.adamw(
            schedule(config),
            b1=config.b1,
            b2=config.b2,
            weight_decay=config.weight_decay,
            mask=_is_matrix,
        ),
    )


def _is_matrix(params: Any) -> Any:
    # By name and not by rank: a scanned stack gives its norms a second axis.
    def decays(path: tuple[Any, ...], _: jax.Array) -> bool:
        return any(f"{name}" in jax.tree_util.keystr(path) for name in ("kernel", "embedding"))

    return jax.tree_util.tree_map_with_path(decays, params)
