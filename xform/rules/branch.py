"""`cond` and `switch`.

Each branch has its own Joint. The residuals of the branches share slots. A slot has a type; a
branch fills the slots that it needs and leaves zeros in the others. Operands that a branch's
backward part reads are taken from outside and need no slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from xform._jax import JaxprEqn, cotangent_aval, tangent_aval, zeros
from xform.interpret import emit
from xform.interpret.absent import present_derivatives
from xform.interpret.activity import path
from xform.interpret.cost import flops
from xform.interpret.joint import Schedule, analyze, wrong_dtype
from xform.interpret.jvp import jvp
from xform.interpret.node import Node, Schedules, Structured, gather, present_mask, spread, submask
from xform.program.arithmetic import Value, instantiate
from xform.program.equation import switch
from xform.program.ir import Mask, Program, evaluate, program, trace
from xform.registry.table import declare
from xform.registry.traits import Traits


def _branches(eqn: JaxprEqn) -> list[Program]:
    return [program(j) for j in eqn.params["branches"]]


def _union(masks: Sequence[Mask]) -> Mask:
    return tuple(any(column) for column in zip(*masks, strict=True))


class Cond(Structured):
    """The rule of `lax.cond` and `lax.switch`: an index, then the operands."""

    def active(self, eqn: JaxprEqn, active: Mask) -> Mask:
        return _union([path(b, active[1:]).outputs for b in _branches(eqn)])

    def useful(self, eqn: JaxprEqn, active: Mask, wanted: Mask) -> Mask:
        return (False, *_union([path(b, active[1:], wanted).inputs for b in _branches(eqn)]))

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
        seeded, results = _union([j.seeded for j in joints]), _union([j.results for j in joints])
        if push:
            return _CondNode(eqn, joints, (False, *seeded), results, push)
        return _CondNode(eqn, joints, seeded, (False, *results), push)


class _CondNode(Node):
    """A branch that carries a derivative."""

    def dependent_results(self, given: Mask) -> Mask:
        full = spread(given, self.seeded)
        columns = _union(
            [present_derivatives(j, tuple(gather(full, j.seeded))) for j in self.joints]
        )
        return tuple(gather(columns, self.results[1:]))

    def reads(self, schedules: Schedules) -> Mask:
        return (True, *_union([p.reads for p in schedules]))

    def forward(self, schedules: Schedules, xs: Sequence[Value], used: Mask):
        index, *ops = xs
        trees: list[Any] = []

        def flat(schedule: Schedule) -> Program:
            def run(*ops: Value) -> list[Value]:
                outs, kept = emit.forward(schedule, ops, used)
                leaves, tree = jax.tree.flatten(kept)
                trees.append(tree)
                return [*gather(outs, used), *leaves]

            return trace(run, *ops)

        programs = [flat(p) for p in schedules]
        n = sum(used)
        slots, places = _slots([p.out_avals[n:] for p in programs])

        def branch(prog: Program, place: list[int]) -> Callable[..., Any]:
            def run(*ops: Value):
                out = evaluate(prog, ops)
                filled = dict(zip(place, out[n:], strict=True))
                return out[:n], [filled[i] if i in filled else zeros(a)
                                 for i, a in enumerate(slots)]  # fmt: skip

            return run

        runs = [branch(p, place) for p, place in zip(programs, places, strict=True)]
        outs, filled = switch(self.eqn.params, index, runs, *ops)
        return spread(outs, used), _Slots(
            filled, tuple(zip(trees, map(tuple, places), strict=True))
        )

    def backward(self, schedules: Schedules, token: Any, xs: Sequence[Value],
                 seeds: Sequence[Value], together: bool) -> list[Value]:  # fmt: skip
        index, *ops = xs
        wide = self.seeded[1:] if self.push else self.seeded
        results = self.results if self.push else self.results[1:]
        of = self.eqn.outvars if self.push else self.eqn.invars[1:]
        kind = tangent_aval if self.push else cotangent_aval
        full_seeds = spread(seeds, wide)
        present = self.present_results(present_mask(seeds))
        on = submask(results, present)
        before: list[list[Any]] = []

        def branch(schedule: Schedule, kept: Any) -> Callable[..., Any]:
            def run() -> list[Value]:
                mine = gather(full_seeds, schedule.joint.seeded)
                out = emit.backward(schedule, kept, ops, mine, False)
                dys = instantiate(spread(out, schedule.joint.results), of, on, kind)
                return dys if self.push else self._alike(dys, gather(of, on), before)

            return run

        runs = [branch(p, k) for p, k in zip(schedules, token.kept(), strict=True)]
        return spread(switch(self.eqn.params, index, runs), present)

    def _alike(self, cts: list[Value], of: Sequence[Any], before: list[list[Any]]) -> list[Value]:
        """Return the cotangents of a branch; raise WrongCotangent if the branches' dtypes differ.

        A weakly typed cotangent takes the dtype of the others.
        """
        before.append([None if _weak(ct) else getattr(ct, "dtype", None) for ct in cts])
        for dtypes, v in zip(zip(*before, strict=True), of, strict=True):
            known_dtypes = {dtype for dtype in dtypes if dtype is not None}
            if len(known_dtypes) > 1:
                given = next(dtype for dtype in known_dtypes if dtype != v.aval.dtype)
                raise wrong_dtype(self.eqn, given, v.aval, "the branches must agree on the dtype")
        return cts


def _weak(x: Value) -> bool:
    return getattr(jax.typeof(x), "weak_type", False)


@jax.tree_util.register_pytree_node_class
class _Slots:
    """The token of a branch: the filled slots, each once, however many branches use it."""

    def __init__(self, filled: Sequence[Value], branches: tuple[tuple[Any, tuple[int, ...]], ...]):
        self._filled, self._branches = filled, branches

    def kept(self) -> list[Any]:
        """Return what each branch saved. A branch that did not run gets the values in its slots."""
        return [
            jax.tree.unflatten(tree, [self._filled[i] for i in place])
            for tree, place in self._branches
        ]

    def tree_flatten(self):
        return tuple(self._filled), self._branches

    @classmethod
    def tree_unflatten(cls, branches: Any, filled: Sequence[Value]):
        return cls(filled, branches)


def _slots(branches: Sequence[Sequence[Any]]) -> tuple[list[Any], list[list[int]]]:
    """Return types of the fewest slots that hold any branch's values, and each branch's slots."""
    slots: list[Any] = []
    places: list[list[int]] = []
    for avals in branches:
        unused = list(range(len(slots)))
        place: list[int] = []
        for aval in avals:
            i = next((i for i in unused if slots[i] == aval), None)
            if i is None:
                i = len(slots)
                slots.append(aval)
            else:
                unused.remove(i)
            place.append(i)
        places.append(place)
    return slots, places


def _flops(eqn: JaxprEqn) -> int:
    """Return the FLOPs of the most expensive branch."""
    return max(map(flops, _branches(eqn)))


declare(Cond, "cond", "structured", (), Traits(foldable=False, flops=_flops),
        known=("branches", "branches_platforms"))  # fmt: skip
