"""The layers of a loss: where a weight meets the batch, and what follows from that alone.

A *layer* begins where parameters are multiplied with, or looked up by, something that depends on
the batch. All that follows from its result alone is of that layer: bias, norm, activation. Where
two of them meet, a region of another kind begins; if it is a sum, as around a residual branch, it
is a row of its own. This needs no scopes: a scope, or the path of the weights, is what names it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from xform._jax import JaxprEqn, Var
from xform.arithmetic import differentiable
from xform.diagnosis.flow import Flow, Mark, Region, flow
from xform.diagnosis.slices import Slice, activation, between, is_linear
from xform.ir import Program
from xform.memory.attribute import scope
from xform.source import frame


@dataclasses.dataclass(frozen=True, eq=False)
class Layer:
    """A layer, or a sum of two of them, in one program.

    Attributes:
      kind: "layer", or "sum".
      start: its first equation.
      product: what that makes.
      x: what it reads that depends on the batch; None of a sum.
      operands: what a sum adds up.
      out: its result, behind bias, norm and activation.
      weights: the parameters of which it is, as (leaf, axes that loops have taken off).
      applied: those of them that its first equation applies.
      shape: what tells it from layers of another kind: its operation, and its weight's shape.
      slope: from what is activated to its activation, if it has one.
      body: from `x` to `out`.
      bypassed: whether a path leads around it.
      where, scope: the user's line, and the named scopes around it.
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
    """The layers of one program, and those of the loops, branches and regions within it.

    Attributes:
      program: the program, with its calls opened.
      after: of an equation, by `id`, the layers whose result it makes.
      inner: of an equation, by `id`, the levels within it.
    """

    program: Program
    after: dict[int, list[Layer]]
    inner: dict[int, tuple[Level, ...]]

    @cached_property
    def rows(self) -> list[Row]:
        """All layers, in the order in which they are written, with the loops around them."""
        rows: list[Row] = []
        for place, eqn in enumerate(self.program.equations):
            of = eqn.params
            for i, level in enumerate(self.inner.get(id(eqn), ())):
                around = (place, of.get("length"), bool(of.get("reverse"))), (i, None, False)
                rows += [Row(r.layer, (*around, *r.around), r.place) for r in level.rows]
            rows += [Row(layer, (), place) for layer in self.after.get(id(eqn), ())]
        return rows


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """A layer with what is around it.

    Attributes:
      layer: the layer.
      around: of each loop, branch or region, outermost first: its place, its trips if it is a scan,
        and whether that runs backward.
      place: of the layer among the equations of its program.
    """

    layer: Layer
    around: tuple[tuple[int, int | None, bool], ...]
    place: int

    @property
    def trips(self) -> tuple[int, ...]:
        """The lengths of the scans around it, outermost first."""
        return tuple(length for _, length, _ in self.around if length is not None)

    def when(self, trip: Sequence[int]) -> tuple[int, ...]:
        """When a trip of it runs, beside those of all other layers: smaller is earlier."""
        rest, key = iter(trip), list[int]()
        for place, length, backward in self.around:
            at = 0 if length is None else next(rest)
            key += [place, -at if backward else at]
        return (*key, self.place)


def level(prog: Program, marks: Sequence[Mark]) -> Level:
    """The layers of a program, whose inputs are of parameters, of the batch, or of both.

    Its first output is the loss.
    """
    return _level(flow(prog, marks, results=1), top=True)


def _level(of: Flow, top: bool) -> Level:
    after: dict[int, list[Layer]] = {}
    for region in of.regions:
        layer = _layer(of, region, top)
        if layer is not None:
            after.setdefault(id(of.producer[layer.out]), []).append(layer)
    inner = {key: tuple(_level(f, False) for f in flows) for key, flows in of.inner.items()}
    return Level(of.program, after, inner)


def _layer(of: Flow, region: Region, top: bool) -> Layer | None:
    if region.kind not in ("layer", "join"):
        return None
    start = of.program.equations[region.equations[0]]
    product = start.outvars[0]
    shape: Any = product.aval
    if not shape.shape or not differentiable(shape):
        return None
    operands = tuple(dict.fromkeys(of.data(start)))
    joined = region.kind == "join"
    if joined and not (_adds(start, operands) and _alike(operands, product)):
        return None
    # Behind the last layers the loss follows, whose functions of elements are no activations.
    last = top and not of.followed(region)
    slope = None if last else activation(of, region)
    ends = [v for v in region.values if v in of.left and differentiable(v.aval)]
    first = product if joined or last or not ends else ends[0]
    out = first if slope is None else slope.output
    x = None if joined else next(iter(operands), None)
    body = None
    if x is not None and differentiable(x.aval):
        body = between(of, region, x, out)
    return Layer(
        kind="sum" if joined else "layer",
        start=start,
        product=product,
        x=x,
        operands=operands if joined else (),
        out=out,
        weights=frozenset(w for i in region.equations for w in of.weights(i)),
        applied=frozenset(of.weights(region.equations[0])),
        shape=_shape(of, start),
        slope=slope,
        body=body,
        bypassed=of.bypassed(start),
        where=frame(start),
        scope=scope(f"{start.source_info.name_stack}/"),
    )


def _adds(eqn: JaxprEqn, operands: Sequence[Var]) -> bool:
    """Whether a value is linear in all that meet there, together."""
    if len(operands) < 2 or not all(differentiable(v.aval) for v in operands):
        return False
    return is_linear(Slice(operands, (eqn,), eqn.outvars[0]))


def _alike(operands: Sequence[Var], product: Var) -> bool:
    shape = lambda v: getattr(v.aval, "shape", None)
    return all(shape(v) == shape(product) for v in operands)


def _shape(of: Flow, eqn: JaxprEqn) -> str:
    sizes = [getattr(v.aval, "shape", ()) for v in eqn.invars if of.of(v).weight]
    return f"{eqn.primitive.name} {sizes or [getattr(eqn.outvars[0].aval, 'shape', ())]}"
