"""Parts of a program as programs of their own: an activation, and a layer from end to end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import jax.numpy as jnp

from xform._jax import JaxprEqn, Var
from xform.arithmetic import Value, differentiable
from xform.diagnosis.flow import Flow, Region
from xform.interpret.joint import analyze
from xform.interpret.jvp import jvp
from xform.interpret.pullback import pullback
from xform.ir import Program
from xform.passes.structured import body
from xform.table import traits


@dataclasses.dataclass(frozen=True, eq=False)
class Slice:
    """Some equations of a program, as a function of a few values; the others it reads are held.

    Attributes:
      inputs: what it is a function of.
      equations: in order.
      output: what it makes.
    """

    inputs: Sequence[Var]
    equations: Sequence[JaxprEqn]
    output: Var

    @cached_property
    def held(self) -> list[Var]:
        """What it reads besides."""
        made = {*self.inputs, *(v for e in self.equations for v in e.outvars)}
        read = [v for e in self.equations for v in e.invars if isinstance(v, Var)]
        return [v for v in dict.fromkeys(read) if v not in made]

    @cached_property
    def program(self) -> Program:
        """The program, of its inputs, then what is held."""
        return Program((*self.inputs, *self.held), (), tuple(self.equations), (self.output,))

    @property
    def active(self) -> tuple[bool, ...]:
        """Which inputs of the program are differentiated."""
        return (*(True,) * len(self.inputs), *(False,) * len(self.held))

    def push(self, env: Callable[[Var], Value], tangents: Sequence[Value]) -> Value:
        """The tangent of the output."""
        args = [env(v) for v in self.program.inputs]
        _, (dy,) = jvp(self.program, args, [*tangents, *[None] * len(self.held)])
        aval: Any = self.output.aval
        return jnp.zeros(aval.shape, aval.dtype) if dy is None else dy

    def pull(self, env: Callable[[Var], Value]) -> Callable[[Value], Value]:
        """From a cotangent of the output to that of the first input."""
        args = [env(v) for v in self.program.inputs]
        _, pull = pullback(self.program, self.active, (True,), args)
        x: Any = self.inputs[0].aval

        def pulled(ct: Value) -> Value:
            (dx, *_) = pull([ct])
            return jnp.zeros(x.shape, x.dtype) if dx is None else dx

        return pulled


def is_linear(of: Slice) -> bool:
    """Whether a slice is linear in its inputs: its derivative reads nothing that they decide."""
    joint = analyze(of.program, of.active, push=True)
    moving = {v for v, on in zip(joint.inputs, joint.active, strict=True) if on}
    for eqn in joint.forward:
        if any(isinstance(v, Var) and v in moving for v in eqn.invars):
            moving.update(eqn.outvars)
    if not any(joint.results):
        return False
    return not any(isinstance(v, Var) and v in moving for e in joint.backward for v in e.invars)


def between(of: Flow, region: Region, x: Var, out: Var) -> Slice | None:
    """A layer from what it reads to what it makes; None if it makes nothing of it."""
    equations = [of.program.equations[i] for i in region.equations]
    needed, kept = {out}, list[JaxprEqn]()
    for eqn in reversed(equations):
        if needed.intersection(eqn.outvars):
            kept.append(eqn)
            needed.update(v for v in eqn.invars if isinstance(v, Var))
    return Slice((x,), tuple(reversed(kept)), out) if x in needed else None


def activation(of: Flow, region: Region) -> Slice | None:
    """The first part of a region that bends each element by itself, and that all flows through."""
    inside = set(region.equations)
    for end in region.values:
        readers = of.readers.get(end, [])
        elementwise = [_elementwise(of.program.equations[i]) for i in readers]
        alone = len(readers) == 1 and readers[0] in inside and not elementwise[0]
        if (end in of.left or alone) and differentiable(end.aval) and _all_through(of, region, end):
            found = _bend(of, region, end)
            if found is not None:
                return found
    return None


def _all_through(of: Flow, region: Region, end: Var) -> bool:
    """Whether nothing leaves a region but by way of a value, as by way of no norm's variance."""
    equations = [of.program.equations[i] for i in region.equations]
    around = set(equations[0].outvars) - {end}
    for eqn in equations:
        if around.intersection(v for v in eqn.invars if isinstance(v, Var)):
            around.update(v for v in eqn.outvars if v is not end)
    return not any(v in around for v in region.values if v in of.left)


def _bend(of: Flow, region: Region, end: Var) -> Slice | None:
    """The shortest nonlinear chain of elementwise equations that ends in a value."""
    shape = lambda v: getattr(v.aval, "shape", None)
    needed, chain = {end}, list[JaxprEqn]()
    for i in reversed(region.equations):
        eqn = of.program.equations[i]
        if not needed.intersection(eqn.outvars):
            continue
        if not _elementwise(eqn) or shape(eqn.outvars[0]) != shape(end):
            return None
        chain.insert(0, eqn)
        needed.difference_update(eqn.outvars)
        needed.update(v for v in eqn.invars if isinstance(v, Var) and of.of(v).data)
        if len(needed) != 1:
            continue
        (start,) = needed
        ids = set(map(id, chain))
        alone = all(id(of.program.equations[j]) in ids for j in of.readers.get(start, []))
        if not alone or start in of.outputs or shape(start) != shape(end):
            continue
        found = Slice((start,), tuple(chain), end)
        if differentiable(start.aval) and not is_linear(found):
            return found
    return None


def _elementwise(eqn: JaxprEqn) -> bool:
    """Whether an equation maps each element by itself; a user's own activation may be a call."""
    known = traits(eqn.primitive)
    if known.call and known.calls in ("", "custom"):
        return all(map(_elementwise, body(eqn).equations))
    shapes = {getattr(v.aval, "shape", None) for v in (*eqn.invars, *eqn.outvars)}
    moved = known.identity or (known.fusion == "movement")
    return known.fusion == "elementwise" or (moved and len(shapes) == 1)
