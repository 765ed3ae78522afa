"""Plan the update of stacked parameters in the backward loop over their layers.

The backward pass of scanned layers is a `scan`, whose stacked outputs are gradients of stacks: of
arrays with an axis that runs over the layers. `plan_leaf` finds what of a leaf's update this scan
can run for one layer in each iteration, or why it cannot. A leaf is one array of the pytree of
parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from xform._jax import JaxprEqn, Var, scan_counts
from xform.fused.coupling import bits_of
from xform.fused.fused_step import Step
from xform.fused.layer_axis import LayerAxis, NotSeparable, can_slice
from xform.fused.step_graph import Graph
from xform.program.dimensions import shape
from xform.program.ir import Atom
from xform.registry.table import traits

# An equation that runs for each layer, and the axis of the layers in its result (None: no axis).
Sliced = tuple[JaxprEqn, int | None]


@dataclasses.dataclass(frozen=True, eq=False)
class LayerTarget:
    """A new parameter or state that the loop computes layer by layer.

    Attributes:
      new: the variable of the new value.
      old: the input with the old value, whose layers are overwritten one by one.
      axis: the axis of the layers.
    """

    new: Var
    old: Var
    axis: int


@dataclasses.dataclass(frozen=True, eq=False)
class LeafUpdate:
    """The update of one leaf in a backward loop.

    Attributes:
      leaf: the number of the leaf.
      gradients: the stacked outputs of the scan that the update reads.
      targets: the results that are stacks.
      sums: equations that sum over the layers; the loop accumulates their results.
      equations: the equations that run for each layer, in order, with the axis of the layers in
        their result.
      stacks: stacks that exist before the loop, with the axis of their layers.
      before: values that are the same for all layers, which are computed before the loop.
    """

    leaf: int
    gradients: tuple[Var, ...]
    targets: tuple[LayerTarget, ...]
    sums: tuple[JaxprEqn, ...]
    equations: tuple[Sliced, ...]
    stacks: dict[Var, int]
    before: tuple[Var, ...]


def plan_leaf(step: Step, graph: Graph, leaf: int, scan: JaxprEqn) -> LeafUpdate:
    """Plan the update of a leaf in the backward loop `scan`, whose outputs its gradient reads.

    Raises:
      NotSeparable: the update cannot run layer by layer; the text says why.
    """
    results = _results(step, leaf)
    scalars = [v for v, _ in results if not shape(v)]
    results = [(v, old) for v, old in results if shape(v)]
    after = graph.after(scan)
    of_stacks = graph.region([v for v, _ in results], after)
    of_sums = graph.region([*scalars, *graph.read_by_several.get(leaf, ())], after)
    region = graph.in_order((*of_stacks, *of_sums))
    n_carry = scan_counts(scan.params)[1]
    read = {v for e in region for v in e.invars if isinstance(v, Var)}
    gradients = [v for v in scan.outvars[n_carry:] if v in read]
    if not read.isdisjoint(scan.outvars[:n_carry]):
        raise NotSeparable("it reads the last state of the backward loop")
    if not gradients:
        raise NotSeparable("it reads no gradient of a layer")
    axes = LayerAxis(region, gradients)
    needed = {id(e) for e in of_stacks}
    sums = [e for e in of_sums if id(e) not in needed and axes.sums(e)]
    targets = tuple(_target(axes, new, old) for new, old in results)
    return _split(leaf, region, axes, gradients, targets, sums, after)


def _results(step: Step, leaf: int) -> list[tuple[Var, Atom | None]]:
    """Return the results that depend on a leaf's gradient alone, with their old values.

    The old value of a new state is the state at the same place in the pytree.
    """
    same = len(step.new_state) == len(step.state)
    old_state = step.state if same else (None,) * len(step.new_state)
    places = zip((*step.new_params, *step.new_state), (*step.params, *old_state), strict=True)
    return [(new, old) for new, old in places
            if isinstance(new, Var) and bits_of(step, new) == 1 << leaf]  # fmt: skip


def _target(axes: LayerAxis, new: Any, old: Any) -> LayerTarget:
    """Return the target of a result, whose old value is the input `old`."""
    axis = axes.axis(new)
    if axis is None:
        raise NotSeparable(f"a result of type {new.aval.str_short()} has no axis of the layers")
    if not isinstance(old, Var) or axes.axis(old) not in (None, axis):
        raise NotSeparable("the new state is not where the old one is")
    types: list[Any] = [old.aval, new.aval]
    if len({(t.shape, t.dtype) for t in types}) > 1:
        raise NotSeparable("the new state has another type than the old one")
    return LayerTarget(new, old, axis)


def _split(
    leaf: int,
    region: Sequence[JaxprEqn],
    axes: LayerAxis,
    gradients: Sequence[Var],
    targets: tuple[LayerTarget, ...],
    sums: Sequence[JaxprEqn],
    after: set[Var],
) -> LeafUpdate:
    """Divide the equations of an update into those of each layer and those before the loop."""
    in_loop: list[Sliced] = []
    made: set[Var] = {*gradients}
    outside: dict[Var, None] = {}
    accumulated = {id(e) for e in sums}
    for eqn in region:
        layered = any(axes.axis(v) is not None for v in eqn.invars)
        axis = axes.axis(eqn.outvars[0])
        if not layered and (axis is None or not traits(eqn.primitive).view):
            continue  # the same for all layers, or a stack of no other stack, such as random bits
        if axis is None and not (id(eqn) in accumulated and axes.sums(eqn)):
            raise NotSeparable(f"`{eqn.primitive.name}` reduces over the layers")
        if not can_slice(eqn, axis):
            raise NotSeparable(f"`{eqn.primitive.name}` is not known to run on one layer")
        in_loop.append((eqn, axis))
        made.update(eqn.outvars)
    for eqn, _ in in_loop:
        outside.update((v, None) for v in eqn.invars if isinstance(v, Var) and v not in made)
    for v in outside:
        if v in after:
            raise NotSeparable("it reads a result that is known only after the loop")
    if not all(t.new in made for t in targets):
        raise NotSeparable("a result does not come from the loop")
    stacks = {v: axis for v in outside if (axis := axes.axis(v)) is not None}
    stacks |= {t.old: t.axis for t in targets}
    before = tuple(v for v in outside if v not in stacks)
    return LeafUpdate(leaf, tuple(gradients), targets, tuple(sums), tuple(in_loop), stacks, before)
