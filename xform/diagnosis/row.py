"""One row of a report: a layer, in one iteration of the loops around it."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class LayerHealth:
    """Measurements and verdict of one layer, or of a sum of layer results (a residual path).

    None means that the layer has no such number.

    Attributes:
      name: path of its weights in `params`, up to the layer: "layers.0" for "layers.0.kernel". For
        a sum, the name of the layer before it.
      trip: iteration of each scan around it, outermost first.
      kind: "layer", or "sum" for a sum of layer results.
      scope: named scopes and module paths around it.
      where: the line of the user's code, `file:line (function)`.
      kin: kind, operation and shapes, which similar layers have in common.
      place: number of the layer in the program; the same in all iterations of a loop.
      bypassed: whether a path leads around it, such as a residual path.
      size: number of elements of its result.
      activation: root mean square of its result.
      gradient: root mean square of the loss's gradient with respect to its result.
      input: for a layer, root mean square of its input; for a sum, of the sum itself.
      nonfinite, gradient_nonfinite: number of elements of the result, and of the gradient, that are
        NaN or Inf.
      gain: for a layer, root mean square of its product (before bias and activation) divided by
        that of its input. For a sum, root mean square of the input of the activation that follows,
        divided by that of the sum: 1 unless something, such as a normalization, is between them.
      sigma: estimate, from below, of the largest singular value of the Jacobian of its result with
        respect to its input.
      dead: share of units (indices of the last axis) that are zero, with slope zero, for all
        examples.
      saturated: share of elements where the slope of the activation is near zero. Elements that are
        zero with slope zero are left out.
      least: for a sum, root mean square of the smallest operand divided by that of the largest.
      correlation: mean absolute cosine between the gradients of neighbouring examples.
      noise: expected value of `correlation` for random gradients.
      weight: norm of its weights.
      gradient_to_weight: norm of the gradient of its weights, divided by `weight`. Steps of a loop
        that share weights share this number.
      update_to_weight: norm of the update of its weights, divided by `weight`, if an `update` was
        given.
      verdict: nonfinite, dead, saturated, exploding, vanishing, shattered or fine.
      reason, remedy: explanation of a verdict that is not fine.
      because: title of the layer at fault that causes abnormal numbers in this layer.
    """

    name: str
    trip: tuple[int, ...]
    kind: str
    scope: str
    where: str
    kin: str
    place: int
    bypassed: bool
    size: int
    activation: float
    gradient: float
    input: float | None = None
    nonfinite: float = 0.0
    gradient_nonfinite: float = 0.0
    gain: float | None = None
    sigma: float | None = None
    dead: float | None = None
    saturated: float | None = None
    least: float | None = None
    correlation: float | None = None
    noise: float | None = None
    weight: float | None = None
    gradient_to_weight: float | None = None
    update_to_weight: float | None = None
    verdict: str = "fine"
    reason: str = ""
    remedy: str = ""
    because: str = ""

    @property
    def operation(self) -> str:
        """The kind and operation of `kin`, without the shape."""
        return self.kin.partition(" [")[0]

    @property
    def title(self) -> str:
        """Name with the iteration: "layers[3]"; for a sum "sum after layers[3]"."""
        trip = f"[{', '.join(map(str, self.trip))}]" if self.trip else ""
        return f"{self.name}{trip}" if self.kind == "layer" else f"sum after {self.name}{trip}"

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain data for JSON."""
        return {**dataclasses.asdict(self), "trip": list(self.trip)}
