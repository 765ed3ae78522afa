"""Parts of a program as functions of their own: an activation, or a whole layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import jax.numpy as jnp

from xform._jax import JaxprEqn, Var
from xform.diagnosis.dependence import DependenceMap, Region
from xform.interpret.joint import analyze
from xform.interpret.jvp import jvp
from xform.interpret.pullback import pullback
from xform.passes.structured import called_body
from xform.program.arithmetic import Value, differentiable
from xform.program.ir import Program
from xform.registry.table import traits


@dataclasses.dataclass(frozen=True, eq=False)
class Slice:
    """Some equations of a program, as a differentiable function of a few values.

    Other values that the equations read stay constant.

    Attributes:
      inputs: the arguments of the function.
      equations: the equations, in program order.
      output: the result.
    """

    inputs: Sequence[Var]
    equations: Sequence[JaxprEqn]
    output: Var

    @cached_property
    def held(self) -> list[Var]:
        """The other values that the equations read, which stay constant."""
        own = {*self.inputs, *(v for e in self.equations for v in e.outvars)}
        read = [v for e in self.equations for v in e.invars if isinstance(v, Var)]
        return [v for v in dict.fromkeys(read) if v not in own]

    @cached_property
    def program(self) -> Program:
        """The equations as a program of `inputs`, followed by `held`."""
        return Program((*self.inputs, *self.held), (), tuple(self.equations), (self.output,))

    @property
    def active(self) -> tuple[bool, ...]:
        """For each input of `program`, whether it is differentiated."""
        return (*(True,) * len(self.inputs), *(False,) * len(self.held))

    def push(self, env: Callable[[Var], Value], tangents: Sequence[Value]) -> Value:
        """Return the tangent of the output, for tangents of `inputs`.

        `env` returns the value of a variable.
        """
        args = [env(v) for v in self.program.inputs]
        _, (dy,) = jvp(self.program, args, [*tangents, *[None] * len(self.held)])
        aval: Any = self.output.aval
        return jnp.zeros(aval.shape, aval.dtype) if dy is None else dy

    def pull(self, env: Callable[[Var], Value]) -> Callable[[Value], Value]:
        """Return the function from a cotangent of the output to the cotangent of the first input.

        `env` returns the value of a variable.
        """
        args = [env(v) for v in self.program.inputs]
        _, pull = pullback(self.program, self.active, (True,), args)
        x: Any = self.inputs[0].aval

        def pulled(ct: Value) -> Value:
            (dx, *_) = pull([ct])
            return jnp.zeros(x.shape, x.dtype) if dx is None else dx

        return pulled


def is_linear(function: Slice) -> bool:
    """Return whether a slice is linear in its inputs.

    It is if its derivative reads no value that depends on the inputs.
    """
    joint = analyze(function.program, function.active, push=True)
    dependent = {v for v, active in zip(joint.inputs, joint.active, strict=True) if active}
    for eqn in joint.forward:
        if any(isinstance(v, Var) and v in dependent for v in eqn.invars):
            dependent.update(eqn.outvars)
    if not any(joint.results):
        return False
    return not any(isinstance(v, Var) and v in dependent for e in joint.backward for v in e.invars)


def slice_between(deps: DependenceMap, region: Region, x: Var, out: Var) -> Slice | None:
    """Return the part of a region from `x` to `out`; None if `out` does not depend on `x`."""
    equations = [deps.program.equations[i] for i in region.equations]
    needed, chosen = {out}, list[JaxprEqn]()
    for eqn in reversed(equations):
        if needed.intersection(eqn.outvars):
            chosen.append(eqn)
            needed.update(v for v in eqn.invars if isinstance(v, Var))
    return Slice((x,), tuple(reversed(chosen)), out) if x in needed else None


def activation(deps: DependenceMap, region: Region) -> Slice | None:
    """Return the activation of a region, or None.

    This is the first nonlinear elementwise function that all paths through the region pass through.
    """
    inside = set(region.equations)
    for end in region.values:
        readers = deps.readers.get(end, [])
        elementwise = [_elementwise(deps.program.equations[i]) for i in readers]
        # Is it read only by an equation of the region that is not elementwise?
        ends_here = len(readers) == 1 and readers[0] in inside and not elementwise[0]
        if not (end in deps.region_outputs or ends_here) or not differentiable(end.aval):
            continue
        if _all_through(deps, region, end):
            result = _nonlinear_chain(deps, region, end)
            if result is not None:
                return result
    return None


def _all_through(deps: DependenceMap, region: Region, end: Var) -> bool:
    """Return whether all paths through a region pass through a value.

    For example, not all paths through a normalization pass through its variance.
    """
    equations = [deps.program.equations[i] for i in region.equations]
    around = set(equations[0].outvars) - {end}
    for eqn in equations:
        if around.intersection(v for v in eqn.invars if isinstance(v, Var)):
            around.update(v for v in eqn.outvars if v is not end)
    return not any(v in around for v in region.values if v in deps.region_outputs)


def _nonlinear_chain(deps: DependenceMap, region: Region, end: Var) -> Slice | None:
    """Return the shortest chain of elementwise equations that ends in a value and is nonlinear."""
    shape = lambda v: getattr(v.aval, "shape", None)
    needed, chain = {end}, list[JaxprEqn]()
    for i in reversed(region.equations):
        eqn = deps.program.equations[i]
        if not needed.intersection(eqn.outvars):
            continue
        if not _elementwise(eqn) or shape(eqn.outvars[0]) != shape(end):
            return None
        chain.insert(0, eqn)
        needed.difference_update(eqn.outvars)
        needed.update(v for v in eqn.invars if isinstance(v, Var) and deps.of(v).is_data)
        if len(needed) != 1:
            continue
        (start,) = needed
        ids = set(map(id, chain))
        only_chain = all(id(deps.program.equations[j]) in ids for j in deps.readers.get(start, []))
        if not only_chain or start in deps.outputs or shape(start) != shape(end):
            continue
        result = Slice((start,), tuple(chain), end)
        if differentiable(start.aval) and not is_linear(result):
            return result
    return None


def _elementwise(eqn: JaxprEqn) -> bool:
    """Return whether an equation is elementwise.

    A call, such as a user's own activation, is if all equations inside it are.
    """
    known = traits(eqn.primitive)
    if known.call and known.calls in ("", "custom"):
        return all(map(_elementwise, called_body(eqn).equations))
    shapes = {getattr(v.aval, "shape", None) for v in (*eqn.invars, *eqn.outvars)}
    moved = known.identity or (known.fusion == "movement")
    return known.fusion == "elementwise" or (moved and len(shapes) == 1)
