"""Absent cotangents: run the backward part of a Joint for only some of its seeds.

Terms, which `joint` and `node` define in full:

- a *Joint* is one program of two parts: the forward pass and the backward pass of a function. A
  *Schedule* says which values of the forward part are saved and which are recomputed;
- a *seed* is an input of the backward part: the cotangent of an output of the function. (If the
  backward part pushes tangents, as for `linearize`, a seed is the tangent of an input.) A *result*
  is an output of the backward part;
- a seed is *absent* if no derivative arrives there, else *present*. A mask `given` says which seeds
  are present. A value is absent if all seeds that it depends on are absent;
- a *node* is a loop, branch or call with a derivative. A `fork` equation stands for it in the
  forward part, and a `join` equation in the backward part.

Outside `jit`, a call is differentiated before it is known which of its outputs are used, so its
Joint has a seed for each output. An absent seed must not become an array of zeros, because zeros
times an infinite coefficient are NaN. So this module removes the equations that depend on absent
seeds alone. An equation that also depends on a present seed is reduced: a sum becomes its present
term, and a `join` or an identity of several values drops the absent ones. Only an equation that
cannot be reduced gets zeros for its absent inputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from xform._jax import JaxprEqn, Primitive, Var, ad, batching, mlir
from xform.interpret.node import gather, join_p, spread, submask
from xform.passes.dce import live
from xform.program.arithmetic import Value
from xform.program.arrays import zeros
from xform.program.dimensions import SampledCache
from xform.program.ir import Atom, Mask, Program, trace
from xform.registry.table import rule_of, traits
from xform.registry.words import Passthrough

# `joint.Joint` and `joint.Schedule`. This module is imported by `joint`, so it cannot import them.
Joint = Any
Schedule = Any

# An identity that marks the cotangents of all outputs of one call, such as of a `custom_vjp`, as a
# group. The user's backward function takes the whole group, so if one cotangent of the group is
# present, the absent ones become zeros.
together_p = Primitive("xform_together")
together_p.multiple_results = True
together_p.def_impl(lambda *cts: list(cts))
together_p.def_abstract_eval(lambda *avals: list(avals))
mlir.register_lowering(together_p, lambda ctx, *cts: cts)
batching.primitive_batchers[together_p] = lambda cts, axes: (cts, axes)
ad.primitive_jvps[together_p] = lambda cts, dcts: (list(cts), list(dcts))

# An identity that marks where the backward part gets its seeds. Equations after it that have
# effects or draw random numbers without a key belong to the backward part, although they may depend
# on no seed.
start_p = Primitive("xform_start")
start_p.multiple_results = True
start_p.def_abstract_eval(lambda *avals: list(avals))

# By `id` of an equation, for each of its inputs: the group of cotangents that the input belongs to.
# An input outside all groups has an empty tuple. An equation has no entry if all its inputs are
# outside all groups.
CotangentGroups = dict[int, tuple[tuple[Var, ...], ...]]


def group_cotangents(cts: Sequence[Value]) -> list[Value]:
    """Mark the cotangents that one call of a user's backward function takes as a group.

    A symbolic zero, None, stays None and is outside the group. A single cotangent needs no mark.
    """
    on = [ct is not None for ct in cts]
    return spread(together_p.bind(*gather(cts, on)), on) if sum(on) > 1 else list(cts)


def remove_markers(prog: Program) -> tuple[Program, int, CotangentGroups]:
    """Remove the equations `xform_start` and `xform_together` from a program.

    Returns:
      Three things: the program, with the operands of these equations in place of their results; the
      number of its equations before `xform_start` (all, if that does not occur); and the groups of
      cotangents that `xform_together` marked.
    """
    names: dict[Any, Atom] = {}
    groups: dict[Any, tuple[Var, ...]] = {}
    groups_by_equation: CotangentGroups = {}
    equations: list[JaxprEqn] = []
    start = len(prog.equations)
    for eqn in prog.equations:
        inputs = [names.get(v, v) if isinstance(v, Var) else v for v in eqn.invars]
        if eqn.primitive in (start_p, together_p):
            names.update(zip(eqn.outvars, inputs, strict=True))
            if eqn.primitive is start_p:
                start = len(equations)
                continue
            group = tuple(v for v in inputs if isinstance(v, Var))
            groups.update(dict.fromkeys(eqn.outvars, group))
            continue
        same = all(a is b for a, b in zip(inputs, eqn.invars, strict=True))
        new = eqn if same else eqn.replace(invars=inputs)
        groups_read = tuple(groups.get(v, ()) if isinstance(v, Var) else () for v in eqn.invars)
        if any(groups_read):
            groups_by_equation[id(new)] = groups_read
        equations.append(new)
    outputs = tuple(names.get(v, v) if isinstance(v, Var) else v for v in prog.outputs)
    rewritten = Program(prog.inputs, prog.consts, tuple(equations), outputs)
    return rewritten, start, groups_by_equation


@dataclasses.dataclass(frozen=True, eq=False)
class ReducedJoint:
    """A Joint reduced to some of its seeds.

    Attributes:
      joint: the reduced Joint. It has the same forward part.
      present_results: which backward outputs of the original Joint are present. The others are
        removed.
      replacements: by `id`, for each backward equation of the original Joint that changed: the
        equations that replace it, or an empty tuple if it is removed.
    """

    joint: Joint
    present_results: Mask
    replacements: dict[int, tuple[JaxprEqn, ...]]


def reduced_joint(joint: Joint, given: Mask) -> ReducedJoint:
    """Return a Joint reduced to the present seeds. The result is cached on the Joint."""
    if given not in joint.reduced_joints:
        joint.reduced_joints[given] = _reduce_joint(joint, given)
    return joint.reduced_joints[given]


def present_derivatives(joint: Joint, given: Mask) -> Mask:
    """Return which inputs of the program get a cotangent if only the `given` seeds are present.

    If the backward part pushes tangents, return which outputs get a tangent.
    """
    if all(given):
        return joint.results
    return submask(joint.results, reduced_joint(joint, given).present_results)


def reduced_schedule(schedule: Schedule, given: Mask) -> tuple[Schedule, Mask]:
    """Return a Schedule for the present seeds alone, and which of its results are present.

    A Schedule says which values the Joint saves and recomputes. The new Schedule saves the same
    values, because the forward pass has already run.
    """
    if ("given", given) not in schedule.cache:
        reduced = reduced_joint(schedule.joint, given)
        order = [e for eqn in schedule.order for e in reduced.replacements.get(id(eqn), (eqn,))]
        order = live(order, reduced.joint.backward_outputs)
        new = dataclasses.replace(schedule, joint=reduced.joint, order=order, cache=SampledCache())
        schedule.cache["given", given] = new, reduced.present_results
    return schedule.cache["given", given]


def _reduce_joint(joint: Joint, given: Mask) -> ReducedJoint:
    pruner = _Pruner(joint, given)
    replacements: dict[int, tuple[JaxprEqn, ...]] = {}
    backward: list[JaxprEqn] = []
    for eqn in joint.backward:
        new = pruner.equations(eqn)
        if new != (eqn,):
            replacements[id(eqn)] = new
        backward += new
    present = tuple(not pruner.is_absent(v) for v in joint.backward_outputs)
    outputs = tuple(pruner.renamed(gather(joint.backward_outputs, present)))
    reduced = dataclasses.replace(
        joint,
        program=dataclasses.replace(joint.program, consts=tuple(pruner.consts.items())),
        seeds=tuple(gather(joint.seeds, given)),
        backward_outputs=outputs,
        seeded=submask(joint.seeded, given),
        results=submask(joint.results, present),
        backward=live(backward, outputs),
    )
    return ReducedJoint(reduced, present, replacements)


class _Pruner:
    """Reduces the equations of a backward part one after another, in order.

    Attributes:
      cotangent_groups: the groups of cotangents of the Joint.
      consts: the constants of the program, and of the zeros that are added.
      seed_dependent: the values of the backward part that depend on a seed, absent or present.
      absent: the values that depend on absent seeds alone. Each equation may add its results.
      names: for the result of a sum with one present term: that term, which replaces the result.
    """

    def __init__(self, joint: Joint, given: Mask):
        self.cotangent_groups: CotangentGroups = joint.cotangent_groups
        self.consts: dict[Var, Any] = dict(joint.program.consts)
        self.seed_dependent = set(joint.seeds)
        for eqn in joint.backward:
            if any(isinstance(v, Var) and v in self.seed_dependent for v in eqn.invars):
                self.seed_dependent.update(eqn.outvars)
        self.absent = set(gather(joint.seeds, [not on for on in given]))
        self.names: dict[Any, Atom] = {}

    def is_absent(self, v: Atom) -> bool:
        """Return whether all seeds that a value depends on are absent."""
        return isinstance(v, Var) and v in self.absent

    def renamed(self, atoms: Sequence[Atom]) -> list[Atom]:
        """Replace the results of removed sums by the terms that remain of them."""
        return [self.names.get(v, v) if isinstance(v, Var) else v for v in atoms]

    def equations(self, eqn: JaxprEqn) -> tuple[JaxprEqn, ...]:
        """Return the equations that replace an equation of the backward part."""
        groups = self.cotangent_groups.get(id(eqn), ((),) * len(eqn.invars))
        on_seed = [isinstance(v, Var) and v in self.seed_dependent for v in eqn.invars]
        is_absent = list(map(self.is_absent, eqn.invars))
        # A user's backward function gets zeros for absent cotangents if others of its group are
        # present.
        zero_needed = [
            absent and not all(map(self.is_absent, group))
            for absent, group in zip(is_absent, groups, strict=True)
        ]
        if not any(is_absent):
            return self._with_renamed_inputs(eqn)
        if is_absent == on_seed and not any(zero_needed):
            self.absent.update(eqn.outvars)
            return ()
        if not any(zero_needed):
            if eqn.primitive is join_p and (new := self._reduced_join(eqn, is_absent)) is not None:
                return (new,)
            if traits(eqn.primitive).sums_operands:
                term = eqn.invars[1 if is_absent[0] else 0]
                if term.aval == eqn.outvars[0].aval:
                    (self.names[eqn.outvars[0]],) = self.renamed([term])
                    return ()
            rule = rule_of(eqn.primitive)
            if isinstance(rule, Passthrough):
                absent = gather(is_absent, rule.returned_operands(eqn))
                self.absent.update(gather(eqn.outvars, absent))
                narrowed = rule.narrow_equation(eqn, tuple([not a for a in absent]))
                return self._with_renamed_inputs(narrowed)
        return self._with_zeros(eqn, is_absent)

    def _with_renamed_inputs(self, eqn: JaxprEqn) -> tuple[JaxprEqn, ...]:
        """Return `eqn` with the remaining terms in place of the results of removed sums."""
        inputs = self.renamed(eqn.invars)
        same = all(a is b for a, b in zip(inputs, eqn.invars, strict=True))
        return (eqn if same else eqn.replace(invars=inputs),)

    def _reduced_join(self, eqn: JaxprEqn, is_absent: Sequence[bool]) -> JaxprEqn | None:
        """Return the `join` of a node without its absent seeds; None if the node needs them.

        `is_absent` says which inputs of the equation are absent. These inputs are the token of the
        node (the residuals that its `fork` returned), the inputs of the node, and the seeds.
        """
        node, given = eqn.params["node"], eqn.params["given"]
        n = 1 + len(node.eqn.invars)
        fewer = submask(given, tuple(not absent for absent in is_absent[n:]))
        if not node.accepts(fewer):
            return None
        pairs = zip(
            eqn.outvars,
            gather(node.present_results(fewer), node.present_results(given)),
            strict=True,
        )
        outputs = [v for v, on in pairs if on]
        self.absent.update(set(eqn.outvars).difference(outputs))
        inputs = self.renamed(gather(eqn.invars, [not absent for absent in is_absent]))
        params = {"node": node, "given": fewer}
        return eqn.replace(invars=inputs, outvars=outputs, params=params)

    def _with_zeros(self, eqn: JaxprEqn, is_absent: Sequence[bool]) -> tuple[JaxprEqn, ...]:
        """Return the equations that make zeros for absent inputs, then `eqn` with these zeros."""
        zero_equations: list[JaxprEqn] = []
        inputs = self.renamed(eqn.invars)
        for i, v in enumerate(eqn.invars):
            if is_absent[i]:
                zero = trace(lambda aval=v.aval: [zeros(aval)])
                self.consts.update(zero.consts)
                zero_equations += zero.equations
                (inputs[i],) = zero.outputs
        return (*zero_equations, eqn.replace(invars=inputs))
