"""How the bodies of an equation run in slices, as plain data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from xform._jax import Var
from xform.program.ir import Program
from xform.slices.slicing import SlicedAxis, Slicing

# Axes by position, of inputs or of outputs.
Axes = Mapping[int, int]


class BodySlices(NamedTuple):
    """How a body runs in slices.

    Attributes:
      axes: the axis of each sliced variable.
      members: how each equation that computes sliced values runs, by its position.
      inputs, outputs: the axes of the inputs and outputs.
      sums: for each output, whether it is a sum over the slices.
    """

    axes: dict[Var, int]
    members: dict[int, Slicing]
    inputs: tuple[SlicedAxis, ...]
    outputs: tuple[SlicedAxis, ...]
    sums: tuple[bool, ...]

    @property
    def slicing(self) -> Slicing:
        """How an equation runs that only runs this body."""
        return Slicing(self.inputs, self.outputs, any(self.sums))


class FindBodySlices(NamedTuple):
    """Finds how bodies run in slices.

    Attributes:
      find: returns how a body runs in slices if some inputs and outputs are sliced; None if it
        cannot. It takes `rules` and `with_sums` as its last arguments.
      rules: the texts of the functions with custom rules whose rules are being sliced. A rule may
        call its own function: in its rule, that function is taken to run in slices.
      with_sums: whether outputs may be sums over the slices.
    """

    find: Callable[[Program, Axes, Axes, frozenset[str], bool], BodySlices | None]
    rules: frozenset[str] = frozenset()
    with_sums: bool = False

    def __call__(self, body: Program, inputs: Axes, outputs: Axes) -> BodySlices | None:
        """Return how a body runs in slices."""
        return self.find(body, inputs, outputs, self.rules, self.with_sums)

    def within(self, rule: str) -> FindBodySlices:
        """Return the same for the program of a rule."""
        return self._replace(rules=self.rules | {rule})

    def summing(self) -> FindBodySlices:
        """Return the same for bodies whose outputs may be sums over the slices."""
        return self._replace(with_sums=True)


class Bodies(NamedTuple):
    """How an equation with bodies runs in slices, and each of its bodies, as (program, slices).

    The bodies of a loop or branch are in the order of `Flow.programs`.
    """

    slicing: Slicing
    parts: tuple[tuple[Program, BodySlices], ...]


def by_position(axes: Sequence[SlicedAxis]) -> dict[int, int]:
    """Return the axes that are not None, by position."""
    return {k: axis for k, axis in enumerate(axes) if axis is not None}
