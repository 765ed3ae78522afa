"""The layers of a loss, found in its program.

A *layer* begins where parameters are multiplied with, or looked up by, a value that depends on the
batch. It includes all equations that depend on its result alone: bias, normalization, activation.
An equation that combines the results of several layers begins another region; if it is a sum, as in
a residual path, it gets a row of its own. Named scopes are not needed: scopes and the paths of
weights only give the names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from xform._jax import JaxprEqn, Var
from xform.diagnosis.dependence import Dependence, DependenceMap, Region, dependence_map
from xform.diagnosis.slices import Slice, activation, is_linear, slice_between
from xform.memory.attribute import scope
from xform.program.arithmetic import differentiable
from xform.program.ir import Program
from xform.program.source import frame


@dataclasses.dataclass(frozen=True, eq=False)
class Layer:
    """A layer, or a sum of layer results, in one program.

    Attributes:
      kind: "layer" or "sum".
      start: its first equation.
      product: result of the first equation.
      x: its input, which depends on the batch; None for a sum.
      operands: operands of a sum; empty for a layer.
      out: its result, after bias, normalization and activation.
      weights: the parameters that its equations read, as pairs of leaf index and number of leading
        axes that loops scan over.
      applied: the parameters that its first equation reads.
      shape: primitive of the first equation and shapes of its weights.
      slope: its activation as a function of one value; None without an activation.
      body: the layer as a function from `x` to `out`; None if there is no such function.
      bypassed: whether a path leads around it, such as a residual path.
      where: the line of the user's code.
      scope: the named scopes around it.
    """

    kind: str
    start: JaxprEqn
    product: Var
    x: Var | None
    operands: tuple[Var, ...]
    out: Var
    weights: frozenset[tuple[int, int]]
    applied: frozenset[tuple[int, int]]
    shape: str
    slope: Slice | None
    body: Slice | None
    bypassed: bool
    where: str
    scope: str


@dataclasses.dataclass(frozen=True, eq=False)
class Level:
    """The layers of one program, including its loops, branches and remat regions.

    Attributes:
      program: the program, with its calls inlined.
      after: by `id` of an equation, the layers whose result it computes.
      inner: by `id` of an equation, the levels of the programs inside it.
    """

    program: Program
    after: dict[int, list[Layer]]
    inner: dict[int, tuple[Level, ...]]

    @cached_property
    def rows(self) -> list[NestedLayer]:
        """All layers in program order, with the loops around them."""
        rows: list[NestedLayer] = []
        for place, eqn in enumerate(self.program.equations):
            params = eqn.params
            for i, level in enumerate(self.inner.get(id(eqn), ())):
                around = (
                    (place, params.get("length"), bool(params.get("reverse"))),
                    (i, None, False),
                )
                rows += [NestedLayer(r.layer, (*around, *r.around), r.place) for r in level.rows]
            rows += [NestedLayer(layer, (), place) for layer in self.after.get(id(eqn), ())]
        return rows


@dataclasses.dataclass(frozen=True, eq=False)
class NestedLayer:
    """A layer, and the loops, branches and remat regions around it.

    Attributes:
      layer: the layer.
      around: entries (position, trip count, reverse), outermost first. Each loop, branch or region
        around the layer has two: its own, with a trip count only for a scan; and one with the
        number of the program inside it, such as the branch.
      place: position of the equation that computes the layer's result.
    """

    layer: Layer
    around: tuple[tuple[int, int | None, bool], ...]
    place: int

    @property
    def trips(self) -> tuple[int, ...]:
        """Trip counts of the scans around it, outermost first."""
        return tuple(length for _, length, _ in self.around if length is not None)

    def when(self, trip: Sequence[int]) -> tuple[int, ...]:
        """Return a key that sorts the iterations of all layers in execution order."""
        rest, key = iter(trip), list[int]()
        for place, length, reverse in self.around:
            iteration = 0 if length is None else next(rest)
            key += [place, -iteration if reverse else iteration]
        return (*key, self.place)


def level(prog: Program, inputs: Sequence[Dependence]) -> Level:
    """Find the layers of a program whose first output is the loss.

    `inputs` tells for each input whether it depends on parameters, on the batch, or on both.
    """
    return _level(dependence_map(prog, inputs, results=1), top=True)


def _level(deps: DependenceMap, top: bool) -> Level:
    after: dict[int, list[Layer]] = {}
    for region in deps.regions:
        layer = _layer(deps, region, top)
        if layer is not None:
            after.setdefault(id(deps.producer[layer.out]), []).append(layer)
    inner = {key: tuple(_level(m, False) for m in maps) for key, maps in deps.inner.items()}
    return Level(deps.program, after, inner)


def _layer(deps: DependenceMap, region: Region, top: bool) -> Layer | None:
    if region.kind not in ("layer", "join"):
        return None
    start = deps.program.equations[region.equations[0]]
    product = start.outvars[0]
    shape: Any = product.aval
    if not shape.shape or not differentiable(shape):
        return None
    operands = tuple(dict.fromkeys(deps.data_operands(start)))
    is_sum = region.kind == "join"
    if is_sum and not (_is_linear_in(start, operands) and _same_shapes(operands, product)):
        return None
    # After the last layers comes the loss, whose elementwise functions are not activations.
    last = top and not deps.has_later_layer(region)
    slope = None if last else activation(deps, region)
    ends = [v for v in region.values if v in deps.region_outputs and differentiable(v.aval)]
    end = product if is_sum or last or not ends else ends[0]
    out = end if slope is None else slope.output
    x = None if is_sum else next(iter(operands), None)
    body = None
    if x is not None and differentiable(x.aval):
        body = slice_between(deps, region, x, out)
    return Layer(
        kind="sum" if is_sum else "layer",
        start=start,
        product=product,
        x=x,
        operands=operands if is_sum else (),
        out=out,
        weights=frozenset(w for i in region.equations for w in deps.weights(i)),
        applied=frozenset(deps.weights(region.equations[0])),
        shape=_shape(deps, start),
        slope=slope,
        body=body,
        bypassed=deps.bypassed(start),
        where=frame(start),
        scope=scope(f"{start.source_info.name_stack}/"),
    )


def _is_linear_in(eqn: JaxprEqn, operands: Sequence[Var]) -> bool:
    """Return whether an equation's result is jointly linear in at least two operands."""
    if len(operands) < 2 or not all(differentiable(v.aval) for v in operands):
        return False
    return is_linear(Slice(operands, (eqn,), eqn.outvars[0]))


def _same_shapes(operands: Sequence[Var], product: Var) -> bool:
    shape = lambda v: getattr(v.aval, "shape", None)
    return all(shape(v) == shape(product) for v in operands)


def _shape(deps: DependenceMap, eqn: JaxprEqn) -> str:
    shapes = [getattr(v.aval, "shape", ()) for v in eqn.invars if deps.of(v).is_weight]
    return f"{eqn.primitive.name} {shapes or [getattr(eqn.outvars[0].aval, 'shape', ())]}"
