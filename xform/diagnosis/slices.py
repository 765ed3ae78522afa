"""Parts of a program as functions of their own: an activation, or a whole layer.

The parts lie within a group: the equations of one layer. A `DependenceMap` has the groups of a
program, and says which of its values depend on the parameters and on the batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from xform._jax import JaxprEqn, Var, cotangent_aval, tangent_aval
from xform.diagnosis.groups import DependenceMap, Group
from xform.interpret.joint import analyze
from xform.interpret.jvp import jvp
from xform.interpret.pullback import pullback
from xform.passes.structured import called_body
from xform.program.arithmetic import Value, differentiable
from xform.program.arrays import zeros
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
    def constants(self) -> list[Var]:
        """The other values that the equations read, which stay constant."""
        own = {*self.inputs, *(v for e in self.equations for v in e.outvars)}
        read = [v for e in self.equations for v in e.invars if isinstance(v, Var)]
        return [v for v in dict.fromkeys(read) if v not in own]

    @cached_property
    def program(self) -> Program:
        """The equations as a program of `inputs`, followed by `constants`."""
        return Program((*self.inputs, *self.constants), (), tuple(self.equations), (self.output,))

    @property
    def active(self) -> tuple[bool, ...]:
        """For each input of `program`, whether it is differentiated."""
        return (*(True,) * len(self.inputs), *(False,) * len(self.constants))

    def push(self, env: Callable[[Var], Value], tangents: Sequence[Value]) -> Value:
        """Return the tangent of the output, for tangents of `inputs`.

        `env` returns the value of a variable.
        """
        args = [env(v) for v in self.program.inputs]
        _, (dy,) = jvp(self.program, args, [*tangents, *[None] * len(self.constants)])
        aval: Any = self.output.aval
        return zeros(tangent_aval(aval)) if dy is None else dy

    def pull(self, env: Callable[[Var], Value]) -> Callable[[Value], Value]:
        """Return the function from a cotangent of the output to the cotangent of the first input.

        `env` returns the value of a variable.
        """
        args = [env(v) for v in self.program.inputs]
        _, pull = pullback(self.program, self.active, (True,), args)
        x: Any = self.inputs[0].aval

        def pull_to_first(ct: Value) -> Value:
            (dx, *_) = pull([ct])
            return zeros(cotangent_aval(x)) if dx is None else dx

        return pull_to_first


def is_linear(function: Slice) -> bool:
    """Return whether a slice is linear in its inputs.

    A slice is linear if its derivative reads no value that depends on the inputs. `analyze` traces
    the slice and its pushforward as one program. Its `forward` equations depend on no tangent, and
    its `backward` equations do.
    """
    joint = analyze(function.program, function.active, push=True)
    dependent = {v for v, active in zip(joint.inputs, joint.active, strict=True) if active}
    for eqn in joint.forward:
        if any(isinstance(v, Var) and v in dependent for v in eqn.invars):
            dependent.update(eqn.outvars)
    if not any(joint.results):
        return False
    return not any(isinstance(v, Var) and v in dependent for e in joint.backward for v in e.invars)


def slice_between(deps: DependenceMap, group: Group, x: Var, out: Var) -> Slice | None:
    """Return the part of a group from `x` to `out`; None if `out` does not depend on `x`."""
    equations = [deps.program.equations[i] for i in group.equations]
    needed, chosen = {out}, list[JaxprEqn]()
    for eqn in reversed(equations):
        if needed.intersection(eqn.outvars):
            chosen.append(eqn)
            needed.update(v for v in eqn.invars if isinstance(v, Var))
    return Slice((x,), tuple(reversed(chosen)), out) if x in needed else None


def find_activation(deps: DependenceMap, group: Group) -> Slice | None:
    """Return the activation of a group, or None.

    This is the first nonlinear elementwise function that all paths through the group pass through.
    """
    inside = set(group.equations)
    for end in group.values:
        readers = deps.readers.get(end, [])
        elementwise = [_elementwise(deps.program.equations[i]) for i in readers]
        # An activation ends at a value that one equation of the group reads, if that equation is
        # not elementwise.
        ends_here = len(readers) == 1 and readers[0] in inside and not elementwise[0]
        if not (end in deps.group_outputs or ends_here) or not differentiable(end.aval):
            continue
        if _all_paths_pass(deps, group, end):
            activation = _nonlinear_chain(deps, group, end)
            if activation is not None:
                return activation
    return None


def _all_paths_pass(deps: DependenceMap, group: Group, v: Var) -> bool:
    """Return whether all paths through a group pass through the value `v`.

    For example, not all paths through a normalization pass through its variance.
    """
    equations = [deps.program.equations[i] for i in group.equations]
    avoiding = set(equations[0].outvars) - {v}  # the values that a path reaches without `v`
    for eqn in equations:
        if avoiding.intersection(x for x in eqn.invars if isinstance(x, Var)):
            avoiding.update(y for y in eqn.outvars if y is not v)
    return not any(y in avoiding for y in group.values if y in deps.group_outputs)


def _nonlinear_chain(deps: DependenceMap, group: Group, end: Var) -> Slice | None:
    """Return the shortest nonlinear chain of elementwise equations of a group that ends in `end`.

    The chain has one input, of the shape of `end`, which no other equation reads.
    """
    shape = lambda v: getattr(v.aval, "shape", None)
    needed, chain = {end}, list[JaxprEqn]()
    for i in reversed(group.equations):
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
        readers = [deps.program.equations[j] for j in deps.readers.get(start, [])]
        only_chain_reads = all(id(reader) in ids for reader in readers)
        if not only_chain_reads or start in deps.outputs or shape(start) != shape(end):
            continue
        function = Slice((start,), tuple(chain), end)
        if differentiable(start.aval) and not is_linear(function):
            return function
    return None


def _elementwise(eqn: JaxprEqn) -> bool:
    """Return whether an equation is elementwise.

    A call, such as a user's own activation, is elementwise if all equations inside it are.
    """
    known = traits(eqn.primitive)
    if known.call and known.calls in ("", "custom"):
        return all(map(_elementwise, called_body(eqn).equations))
    shapes = {getattr(v.aval, "shape", None) for v in (*eqn.invars, *eqn.outvars)}
    moves_data = known.identity or known.fusion == "movement"
    return known.fusion == "elementwise" or (moves_data and len(shapes) == 1)
