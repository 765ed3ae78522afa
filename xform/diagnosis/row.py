"""One row of a report: a layer, in one trip of the loops around it."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class LayerHealth:
    """What was read of a layer, and what is wrong with it. None is what it does not have.

    Attributes:
      name: the path of its weights, without what it calls them; of a sum, that of the layer before.
      trip: in which trip of the scans around it, outermost first.
      kind: "layer", or "sum" of what layers made.
      scope: named scopes and module paths around it.
      where: the user's line, `file:line (function)`.
      kin: what layers of the same operation and shape have in common.
      place: which layer of the program it is; trips of one have the same.
      bypassed: whether a path leads around it.
      size: elements of its result.
      activation: the root mean square of its result.
      gradient: of the loss, in its result: its root mean square.
      input: of a layer, what it reads; of a sum, the sum: its root mean square.
      nonfinite, gradient_nonfinite: elements of either that are NaN or Inf.
      gain: of a layer, what it multiplies (before bias and activation) to what it reads; of a sum,
        what it activates to the sum: as root mean squares.
      sigma: the largest singular value of its Jacobian, from what it reads to its result.
      dead: share of units that are zero, with slope zero, for all examples.
      saturated: share of other elements at which its activation is flat.
      least: of a sum, the smallest operand to the largest.
      correlation: mean size of the cosine between the gradients of neighbouring examples.
      noise: what that is where they have nothing in common.
      weight: norm of its weights.
      gradient_to_weight: norm of their gradient to that; those of a loop's steps share one.
      update_to_weight: norm of an update to that, where an `update` was given.
      verdict: nonfinite, dead, saturated, exploding, vanishing, shattered or fine.
      reason, remedy: of a verdict that is not fine.
      because: the layer whose fault its numbers are, if they are another's.
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
        """What `kin` says without the shape."""
        return self.kin.partition(" [")[0]

    @property
    def title(self) -> str:
        """Its name, with the trip."""
        trip = f"[{', '.join(map(str, self.trip))}]" if self.trip else ""
        return f"{self.name}{trip}" if self.kind == "layer" else f"sum after {self.name}{trip}"

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {**dataclasses.asdict(self), "trip": list(self.trip)}
