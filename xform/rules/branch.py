"""The rule of `cond` and `switch`.

Each branch has its own *Joint*: its forward and backward pass, traced as one program. A *schedule*
says which values the forward pass saves. The cond becomes two conds. The first runs the forward
pass of a branch, and returns the outputs and a *token*, which holds the saved values. The second
runs the backward pass of the branch from the token and the *seeds* (the cotangents of the outputs,
or for `linearize` the tangents of the inputs).

All branches of a cond must return values of the same types. So the first cond returns *slots*:
values of fixed types, which the branches share. A branch puts its saved values in slots of their
types, and zeros in the other slots. If the backward pass reads an operand of the cond, it reads the
operand itself, which needs no slot. The base classes `Structured` and `Node` describe the methods
(`xform.interpret.node`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from xform._jax import JaxprEqn, cotangent_aval, tangent_aval
from xform.interpret import emit
from xform.interpret.absent import present_derivatives
from xform.interpret.joint import Schedule, analyze, wrong_dtype
from xform.interpret.jvp import jvp
from xform.interpret.node import Node, Schedules, Structured, gather, present_mask, spread, submask
from xform.program.arithmetic import Value, instantiate
from xform.program.arrays import zeros
from xform.program.equation import switch
from xform.program.flow import Body, BodyFunction, Flow
from xform.program.ir import Mask, Program, evaluate, program, trace, union
from xform.registry.table import declare
from xform.registry.traits import Traits


def _branches(eqn: JaxprEqn) -> list[Program]:
    """Return the programs of the branches."""
    return [program(j) for j in eqn.params["branches"]]


class Cond(Structured):
    """The rule of `lax.cond` and `lax.switch`. The inputs are an index, then the operands."""

    def flow(self, eqn: JaxprEqn) -> Flow:
        operands, results = range(1, len(eqn.invars)), range(len(eqn.outvars))
        return Flow(tuple(Body(b, operands, results) for b in _branches(eqn)), index=0)

    def rebuild(self, eqn: JaxprEqn, xs: Sequence[Value], functions: Sequence[BodyFunction],
                each: Any = None) -> tuple[list[Value], Any]:  # fmt: skip
        index, *operands = xs
        return switch(eqn.params, index, functions, operands, each)

    def jvp(self, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value]):
        on = self.active(eqn, tuple(dx is not None for dx in dxs))

        def branch(prog: Program) -> Callable[..., Any]:
            def run(xs: list[Value], dxs: list[Value]):
                ys, dys = jvp(prog, xs, dxs)
                return ys, spread(instantiate(dys, prog.out_avals, on), on)

            return run

        runs = [branch(b) for b in _branches(eqn)]
        return switch(eqn.params, xs[0], runs, list(xs[1:]), list(dxs[1:]))

    def node(self, eqn: JaxprEqn, active: Mask, wanted: Mask, push: bool) -> Node:
        joints = [analyze(b, active[1:], wanted, push) for b in _branches(eqn)]
        seeded, results = union(*[j.seeded for j in joints]), union(*[j.results for j in joints])
        if push:
            return _CondNode(eqn, joints, (False, *seeded), results, push)
        return _CondNode(eqn, joints, seeded, (False, *results), push)


class _CondNode(Node):
    """The node of a cond. Its forward and its backward part are a cond each."""

    def dependent_results(self, given: Mask) -> Mask:
        full = spread(given, self.seeded)
        dependent = union(
            *[present_derivatives(j, tuple(gather(full, j.seeded))) for j in self.joints]
        )
        return tuple(gather(dependent, self.results[1:]))

    def reads(self, schedules: Schedules) -> Mask:
        return (True, *union(*[p.reads for p in schedules]))

    def forward(self, schedules: Schedules, xs: Sequence[Value], used: Mask):
        index, *operands = xs
        trees: list[Any] = []

        def traced_forward(schedule: Schedule) -> Program:
            def run(*operands: Value) -> list[Value]:
                outs, saved = emit.forward(schedule, operands, used)
                leaves, tree = jax.tree.flatten(saved)
                trees.append(tree)
                return [*gather(outs, used), *leaves]

            return trace(run, *operands)

        programs = [traced_forward(p) for p in schedules]
        n = sum(used)
        slot_types, slots_of = _assign_slots([p.out_avals[n:] for p in programs])

        def branch(prog: Program, slots: list[int]) -> Callable[..., Any]:
            def run(*operands: Value):
                out = evaluate(prog, operands)
                filled = dict(zip(slots, out[n:], strict=True))
                return out[:n], [filled[i] if i in filled else zeros(aval)
                                 for i, aval in enumerate(slot_types)]  # fmt: skip

            return run

        runs = [branch(p, slots) for p, slots in zip(programs, slots_of, strict=True)]
        outs, values = switch(self.eqn.params, index, runs, *operands)
        return spread(outs, used), _CondToken(
            values, tuple(zip(trees, map(tuple, slots_of), strict=True))
        )

    def backward(self, schedules: Schedules, token: Any, xs: Sequence[Value],
                 seeds: Sequence[Value], together: bool) -> list[Value]:  # fmt: skip
        index, *operands = xs
        seeded = self.seeded[1:] if self.push else self.seeded
        results = self.results if self.push else self.results[1:]
        variables = self.eqn.outvars if self.push else self.eqn.invars[1:]
        kind = tangent_aval if self.push else cotangent_aval
        full_seeds = spread(seeds, seeded)
        present = self.present_results(present_mask(seeds))
        on = submask(results, present)
        dtypes: list[list[Any]] = []

        def branch(schedule: Schedule, saved: Any) -> Callable[..., Any]:
            def run() -> list[Value]:
                branch_seeds = gather(full_seeds, schedule.joint.seeded)
                out = emit.backward(schedule, saved, operands, branch_seeds, False)
                full = instantiate(spread(out, schedule.joint.results), variables, on, kind)
                return full if self.push else self._checked(full, gather(variables, on), dtypes)

            return run

        runs = [branch(p, saved) for p, saved in zip(schedules, token.saved(), strict=True)]
        return spread(switch(self.eqn.params, index, runs), present)

    def _checked(
        self, cts: list[Value], variables: Sequence[Any], dtypes_of_branches: list[list[Any]]
    ) -> list[Value]:
        """Return the cotangents of a branch; raise WrongCotangent if the branches' dtypes differ.

        `variables` are the operands that the cotangents belong to. `dtypes_of_branches` has the
        dtypes of earlier branches; those of this branch are appended. A weakly typed cotangent
        agrees with any dtype.
        """
        dtypes_of_branches.append(
            [None if _is_weak(ct) else getattr(ct, "dtype", None) for ct in cts]
        )
        for dtypes, v in zip(zip(*dtypes_of_branches, strict=True), variables, strict=True):
            known_dtypes = {dtype for dtype in dtypes if dtype is not None}
            if len(known_dtypes) > 1:
                given = next(dtype for dtype in known_dtypes if dtype != v.aval.dtype)
                raise wrong_dtype(self.eqn, given, v.aval, "the branches must agree on the dtype")
        return cts


def _is_weak(x: Value) -> bool:
    return getattr(jax.typeof(x), "weak_type", False)


@jax.tree_util.register_pytree_node_class
class _CondToken:
    """The saved values of a cond: the values of all slots. Branches may share a slot.

    `branches` has, for each branch, the tree of its saved values and the slots of its leaves.
    """

    def __init__(self, values: Sequence[Value], branches: tuple[tuple[Any, tuple[int, ...]], ...]):
        self._values, self._branches = values, branches

    def saved(self) -> list[Any]:
        """Return the saved values of each branch.

        For a branch that did not run, these are whatever is in its slots.
        """
        return [
            jax.tree.unflatten(tree, [self._values[i] for i in slots])
            for tree, slots in self._branches
        ]

    def tree_flatten(self):
        return tuple(self._values), self._branches

    @classmethod
    def tree_unflatten(cls, branches: Any, values: Sequence[Value]):
        return cls(values, branches)


def _assign_slots(branches: Sequence[Sequence[Any]]) -> tuple[list[Any], list[list[int]]]:
    """Assign slots to the saved values of branches, given their types; use few slots.

    Returns the types of the slots, and for each branch the slots of its values.
    """
    slot_types: list[Any] = []
    slots_of: list[list[int]] = []
    for avals in branches:
        unused = list(range(len(slot_types)))
        slots: list[int] = []
        for aval in avals:
            i = next((i for i in unused if slot_types[i] == aval), None)
            if i is None:
                i = len(slot_types)
                slot_types.append(aval)
            else:
                unused.remove(i)
            slots.append(i)
        slots_of.append(slots)
    return slot_types, slots_of


declare(Cond, "cond", "structured", (), Traits(foldable=False),
        supported_params=("branches", "branches_platforms"))  # fmt: skip
