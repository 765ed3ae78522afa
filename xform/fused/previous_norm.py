"""`clip_by_previous_global_norm`: clip gradients by the norm of the step before."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xform.errors import WrongArgument
from xform.introspection.packages import require_package

with require_package("optax", "Optax", by="xform.clip_by_previous_global_norm", brings="train"):
    import optax


class PreviousNormState(NamedTuple):
    """The state of `clip_by_previous_global_norm`.

    Attributes:
      norm: the norm over all parameters of the last gradient, a float32 scalar.
    """

    norm: jax.Array


def clip_by_previous_global_norm(
    max_norm: float, first_norm: float = 0.0
) -> optax.GradientTransformation:
    """Return an optimizer step that scales gradients by the global norm of the step before.

    `optax.clip_by_global_norm` needs the gradients of all parameters before it can update one of
    them. This transformation scales the gradient by `max_norm / norm` if `norm > max_norm`, where
    `norm` is that of the last gradient. So `fused_update` can use each gradient at once. It is not
    the same clipping: a step whose own gradient is a spike is not clipped, but the step after it
    is.

    Args:
      max_norm: the largest norm that is not clipped, positive.
      first_norm: the norm that the first step assumes. With 0.0 the first step is not clipped.

    Returns:
      An `optax.GradientTransformation`, for `optax.chain`. Its state is the norm, a
      float32 scalar.

    Raises:
      WrongArgument: `max_norm` is not positive.

    >>> import optax
    >>> clip = xform.clip_by_previous_global_norm(1.0, first_norm=10.0)
    >>> updates, state = clip.update(jnp.float32(4), clip.init(jnp.float32(0)))
    >>> float(updates), float(state.norm)
    (0.4..., 4.0)
    """
    if not max_norm > 0:
        raise WrongArgument(
            f"clip_by_previous_global_norm({max_norm})",
            "the largest norm must be positive",
            "",
            "pass a positive number, such as 1.0",
        )

    def init(params: Any) -> PreviousNormState:
        del params
        return PreviousNormState(jnp.float32(first_norm))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, PreviousNormState]:
        del params
        scale = jnp.where(state.norm > max_norm, max_norm / state.norm, 1.0)
        norm = optax.tree.norm(updates).astype(jnp.float32)
        scaled = jax.tree.map(lambda g: g * scale.astype(jnp.real(g).dtype), updates)
        return scaled, PreviousNormState(norm)

    return optax.GradientTransformation(init, update)
