"""The layers of a loss, found in its program.

A *layer* begins where parameters are multiplied with, or looked up by, a value that depends on the
batch. It includes all equations that depend on its result alone: bias, normalization, activation.
An equation that combines the results of several layers begins another group of equations. If it is
a sum, as in a residual path, it counts as a layer of kind "sum". Named scopes are not needed:
scopes and the paths of weights only give the names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

from xform._jax import JaxprEqn, Var
from xform.diagnosis.bypass import bypassed_equations
from xform.diagnosis.dependence import dependence_map
from xform.diagnosis.groups import Dependence, DependenceMap, Group
from xform.diagnosis.slices import Slice, find_activation, is_linear, slice_between
from xform.memory.attribute import scope
from xform.program.arithmetic import differentiable
from xform.program.ir import Program
from xform.program.source import frame
from xform.registry.table import flow_of


@dataclasses.dataclass(frozen=True, eq=False)
class Layer:
    """A layer, or a sum of layer results, in one program.

    Attributes:
      kind: "layer" or "sum".
      start: its first equation.
      product: result of the first equation, such as a matrix product or the sum.
      input: its input, which depends on the batch; None for a sum.
      operands: operands of a sum; empty for a layer.
      result: its result, after bias, normalization and activation.
      weights: the parameters that its equations read, as pairs of leaf index and number of leading
        axes that loops scan over.
      applied: the parameters that its first equation reads.
      operation: primitive of the first equation and shapes of its weights.
      activation: its activation as a function of one value; None without an activation.
      function: the layer as a function from `input` to `result`; None if there is none.
      bypassed: whether a path leads around it, such as a residual path.
      where: the line of the user's code.
      scope: the named scopes around it.
    """

    kind: str
    start: JaxprEqn
    product: Var
    input: Var | None
    operands: tuple[Var, ...]
    result: Var
    weights: frozenset[tuple[int, int]]
    applied: frozenset[tuple[int, int]]
    operation: str
    activation: Slice | None
    function: Slice | None
    bypassed: bool
    where: str
    scope: str


@dataclasses.dataclass(frozen=True, eq=False)
class ProgramLayers:
    """The layers of one program, including its loops, branches and remat regions.

    Attributes:
      program: the program, with its calls inlined.
      by_equation: by `id` of an equation, the layers whose result it computes.
      nested: by `id` of a loop, branch or remat region, the layers of the programs inside it.
    """

    program: Program
    by_equation: dict[int, list[Layer]]
    nested: dict[int, tuple[ProgramLayers, ...]]

    @cached_property
    def rows(self) -> list[NestedLayer]:
        """All layers in program order, with the loops around them."""
        rows: list[NestedLayer] = []
        for position, eqn in enumerate(self.program.equations):
            flow = flow_of(eqn)
            length, reverse = (None, False) if flow is None else (flow.length, flow.reverse)
            for i, inner in enumerate(self.nested.get(id(eqn), ())):
                around = Enclosing(position, length, reverse, i)
                rows += [NestedLayer(row.layer, (around, *row.around), row.position)
                         for row in inner.rows]  # fmt: skip
            layers = self.by_equation.get(id(eqn), ())
            rows += [NestedLayer(layer, (), position) for layer in layers]
        return rows


class Enclosing(NamedTuple):
    """A loop, branch or remat region around a layer.

    Attributes:
      position: position of its equation in the program around it.
      length: number of iterations; None unless it is a loop of known length.
      reverse: whether the loop runs from the last iteration to the first.
      body: the number of the program that has the layer, such as the number of the branch.
    """

    position: int
    length: int | None
    reverse: bool
    body: int


@dataclasses.dataclass(frozen=True, eq=False)
class NestedLayer:
    """A layer, and the loops, branches and remat regions around it.

    Attributes:
      layer: the layer.
      around: the loops, branches and remat regions, outermost first.
      position: position of the equation that computes the layer's result.
    """

    layer: Layer
    around: tuple[Enclosing, ...]
    position: int

    @property
    def lengths(self) -> tuple[int, ...]:
        """Numbers of iterations of the scans around the layer, outermost first."""
        return tuple(loop.length for loop in self.around if loop.length is not None)

    def sort_key(self, trip: Sequence[int]) -> tuple[int, ...]:
        """Return a key that sorts the iterations of all layers in execution order.

        `trip` holds the iteration of each scan around the layer, outermost first.
        """
        iterations, key = iter(trip), list[int]()
        for loop in self.around:
            iteration = 0 if loop.length is None else next(iterations)
            key += [loop.position, -iteration if loop.reverse else iteration, loop.body]
        return (*key, self.position)


def find_layers(prog: Program, inputs: Sequence[Dependence]) -> ProgramLayers:
    """Find the layers of a program whose first output is the loss.

    `inputs` tells for each input whether it depends on parameters, on the batch, or on both.
    """
    return _layers_of_map(dependence_map(prog, inputs, results=1), is_outermost=True)


def _layers_of_map(deps: DependenceMap, is_outermost: bool) -> ProgramLayers:
    """Return the layers of a program, given what its values depend on."""
    by_equation: dict[int, list[Layer]] = {}
    bypassed = bypassed_equations(deps) if deps.groups else {}
    for group in deps.groups:
        layer = _layer_of_group(deps, group, bypassed, is_outermost)
        if layer is not None:
            by_equation.setdefault(id(deps.producer[layer.result]), []).append(layer)
    nested = {
        key: tuple(_layers_of_map(inner, False) for inner in maps)
        for key, maps in deps.nested.items()
    }
    return ProgramLayers(deps.program, by_equation, nested)


def _layer_of_group(
    deps: DependenceMap, group: Group, bypassed: dict[int, bool], is_outermost: bool
) -> Layer | None:
    """Convert a group of equations to a `Layer`; None if it is neither a layer nor a sum.

    `bypassed` says for each equation, by `id`, whether a path avoids it.
    """
    if group.kind not in ("layer", "combination"):
        return None
    start = deps.program.equations[group.equations[0]]
    product = start.outvars[0]
    aval: Any = product.aval
    if not aval.shape or not differentiable(aval):
        return None
    operands = tuple(dict.fromkeys(deps.data_operands(start)))
    is_sum = group.kind == "combination"
    if is_sum and not (_is_linear_in(start, operands) and _same_shapes(operands, product)):
        return None
    # After the last layers comes the loss, whose elementwise functions are not activations.
    is_last = is_outermost and not deps.has_later_layer(group)
    activation = None if is_last else find_activation(deps, group)
    outputs = [v for v in group.values if v in deps.group_outputs and differentiable(v.aval)]
    if activation is not None:
        result = activation.output
    else:  # without an activation, the first value that leaves the group
        result = product if is_sum or is_last or not outputs else outputs[0]
    x = None if is_sum else next(iter(operands), None)
    function = None
    if x is not None and differentiable(x.aval):
        function = slice_between(deps, group, x, result)
    return Layer(
        kind="sum" if is_sum else "layer",
        start=start,
        product=product,
        input=x,
        operands=operands if is_sum else (),
        result=result,
        weights=frozenset(w for i in group.equations for w in deps.weights(i)),
        applied=frozenset(deps.weights(group.equations[0])),
        operation=_operation(deps, start),
        activation=activation,
        function=function,
        bypassed=bypassed[id(start)],
        where=frame(start),
        scope=scope(f"{start.source_info.name_stack}/"),
    )


def _is_linear_in(eqn: JaxprEqn, operands: Sequence[Var]) -> bool:
    """Return whether an equation's result is jointly linear in at least two operands."""
    if len(operands) < 2 or not all(differentiable(v.aval) for v in operands):
        return False
    return is_linear(Slice(operands, (eqn,), eqn.outvars[0]))


def _same_shapes(operands: Sequence[Var], product: Var) -> bool:
    """Return whether all operands have the shape of the product."""
    shape = lambda v: getattr(v.aval, "shape", None)
    return all(shape(v) == shape(product) for v in operands)


def _operation(deps: DependenceMap, eqn: JaxprEqn) -> str:
    """Return the primitive of an equation and the shapes of its weights, or of its result."""
    shapes = [getattr(v.aval, "shape", ()) for v in eqn.invars if deps.of(v).is_weight]
    return f"{eqn.primitive.name} {shapes or [getattr(eqn.outvars[0].aval, 'shape', ())]}"
