"""Prove that an update treats each layer of a stacked parameter on its own, and find its axes.

The parameters of scanned layers are a *stack*: an array with one axis that runs over the layers.
An update is separable along this axis if the layer `i` of each result depends only on the layer `i`
of the stacks that it reads. Then a loop over the layers can update one layer in each iteration. The
proof follows the axis through the equations of the update (`registry/ends.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.sharding import NamedSharding, Sharding

from xform._jax import JaxprEqn, Var
from xform._jax.meshes import has_explicit_axis
from xform.memory.axes import Axes, Factors, repeated_factors
from xform.program.dimensions import shape
from xform.program.ir import Atom, bind
from xform.registry.dependence import Elementwise
from xform.registry.table import ends, keeps_order, traits


class NotSeparable(Exception):
    """An update is not separable along the axis of layers; the text says why."""


class LayerAxis:
    """The axis of the layers in the values of some equations.

    Args:
      equations: the equations of the update of one leaf, in order.
      stacks: values whose first axis runs over the layers.

    Raises:
      NotSeparable: an equation mixes layers.
    """

    def __init__(self, equations: Sequence[JaxprEqn], stacks: Sequence[Var]):
        self._axes = Axes()
        self._values: dict[Var, tuple[Factors, ...]] = {}
        self._summed: list[tuple[JaxprEqn, Factors]] = []
        for stack in stacks:
            self._axes.same(self._of(stack)[0], self._of(stacks[0])[0])
        for eqn in equations:
            self._unify(eqn)
        layers = self._axes.factors(self._of(stacks[0])[0])
        if shape(stacks[0])[0] < 2:
            raise NotSeparable("it has one layer")
        if len(layers) != 1:
            raise NotSeparable("a reshape merges or splits the axis of the layers")
        (self._layers,) = layers
        self._check(equations)

    def axis(self, v: Atom) -> int | None:
        """Return which axis of a value runs over the layers; None if it has none."""
        if not isinstance(v, Var) or v not in self._values:
            return None
        factors = [self._axes.factors(axis) for axis in self._values[v]]
        return next((i for i, f in enumerate(factors) if self._layers in f), None)

    def sums(self, eqn: JaxprEqn) -> bool:
        """Return whether an equation sums over the layers."""
        summed = (f for e, factors in self._summed if e is eqn for f in self._axes.factors(factors))
        return self._layers in summed

    def _of(self, v: Var) -> tuple[Factors, ...]:
        if v not in self._values:
            self._values[v] = tuple(map(self._axes.new, shape(v)))
        return self._values[v]

    def _unify(self, eqn: JaxprEqn) -> None:
        """Record which axes of the operands and results run over the same indices."""
        operands = [
            self._of(v) if isinstance(v, Var) else ((),) * len(shape(v)) for v in eqn.invars
        ]
        summed = self._axes.unify(eqn, operands, list(map(self._of, eqn.outvars)))
        self._summed.append((eqn, summed))

    def _check(self, equations: Sequence[JaxprEqn]) -> None:
        """Raise NotSeparable if an equation mixes layers, or if an axis is not of layers alone."""
        for v, axes in self._values.items():
            if (i := self.axis(v)) is not None and _is_sharded(v.aval, i):
                raise NotSeparable("the axis of the layers is sharded")
            resolved = tuple(map(self._axes.factors, axes))
            if self._layers in repeated_factors(resolved):
                raise NotSeparable("two axes of a value run over the layers")
            if any(self._layers in f and f != (self._layers,) for f in resolved):
                raise NotSeparable(f"a reshape to {shape(v)} merges the axis of the layers")
        if self._layers in self._axes.mixed():
            mixing = (e.primitive.name for e in equations if self._mixes(e))
            raise NotSeparable(f"`{next(mixing, 'an operation')}` mixes the layers")

    def _mixes(self, eqn: JaxprEqn) -> bool:
        axes = (self.axis(v) for v in eqn.invars)
        return not keeps_order(eqn) and any(
            i is not None and e[i] is None for i, e in zip(axes, ends(eqn), strict=True)
        )


def _is_sharded(aval: Any, axis: int) -> bool:
    """Return whether a type tells that an axis is divided over devices."""
    sharding = getattr(aval, "sharding", None)
    return (
        sharding is not None
        and has_explicit_axis(aval)
        and sharding.spec.partitions[axis] is not None
    )


def is_elementwise(eqn: JaxprEqn) -> bool:
    """Return whether an element of a result depends only on the operands' elements at its place."""
    known = traits(eqn.primitive)
    return isinstance(known.dependence, Elementwise) or known.fusion == "elementwise"


def is_constraint(eqn: JaxprEqn, axis: int = 0) -> bool:
    """Return whether an equation shards a value, but not along an axis.

    Its result is the operand, and the same constraint fits one layer if the axis is of layers.
    """
    sharding = eqn.params.get("sharding")
    if not traits(eqn.primitive).identity or not isinstance(sharding, NamedSharding):
        return False
    partitions = sharding.spec.partitions
    return axis >= len(partitions) or partitions[axis] is None


def can_slice(eqn: JaxprEqn, axis: int | None) -> bool:
    """Return whether `slice_equation` can run an equation on one layer."""
    known = traits(eqn.primitive)
    if known.identity and isinstance(eqn.params.get("sharding"), Sharding):
        return axis is not None and is_constraint(eqn, axis)
    if is_elementwise(eqn) or known.identity:
        return "dst_sharding" not in eqn.params  # it would shard a value whose type tells how
    moves = known.fusion == "movement" and not known.part_shape
    return moves or known.fusion == "reduction"


def slice_equation(eqn: JaxprEqn, xs: Sequence[Any], axis: int | None, outer: Any) -> list[Any]:
    """Run an equation on one layer; in `xs` and in the results the layer axis has length 1.

    `axis` is the layer axis of the result, None if it has none, and `outer` the name stack.
    """
    if axis is not None and (name := traits(eqn.primitive).result_shape):
        sizes = [*eqn.params[name]]
        sizes[axis] = 1
        eqn = eqn.replace(params={**eqn.params, name: tuple(sizes)})
    return bind(eqn, xs, outer)
