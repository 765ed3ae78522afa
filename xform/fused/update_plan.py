"""Decide where each parameter is updated: in a backward loop, or when its gradient is complete.

A leaf is one array of the pytree of parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from xform._jax import JaxprEqn, Var, scan_counts
from xform.fused.fused_step import Step
from xform.fused.layer_axis import LayerAxis, NotSeparable
from xform.fused.layer_loop import BackwardLoop
from xform.fused.layers import LeafUpdate, plan_leaf
from xform.fused.step_graph import Graph


@dataclasses.dataclass(frozen=True, eq=False)
class UpdatePlan:
    """Where the parameters of a step are updated.

    Attributes:
      loops: the backward loops that update their layers.
      in_loop: the leaves that these loops update.
      reasons: for each leaf of stacked parameters that no loop updates, the reason.
    """

    loops: tuple[BackwardLoop, ...]
    in_loop: frozenset[int]
    reasons: dict[int, str]


def plan_updates(step: Step) -> UpdatePlan:
    """Decide where each parameter of a traced step is updated."""
    return _Planner(step).plan()


class _Planner:
    """Plans the updates of a traced step."""

    def __init__(self, step: Step):
        self._step, self._graph = step, Graph(step)
        self._reasons: dict[int, str] = {}

    def plan(self) -> UpdatePlan:
        updates: dict[int, list[LeafUpdate]] = {}
        scans: dict[int, JaxprEqn] = {}
        for leaf, grad in enumerate(self._step.grads):
            scan = self._graph.last_loop(grad) if isinstance(grad, Var) else None
            if scan is None or not isinstance(grad, Var) or not self._is_stack(grad, scan):
                if self._graph.comes_from_while(grad):
                    self._reasons[leaf] = "the backward loop starts from stored states (a budget)"
                continue
            try:
                update = plan_leaf(self._step, self._graph, leaf, scan)
                self._check_readers(update, scan)
            except NotSeparable as reason:
                self._reasons[leaf] = str(reason)
            else:
                scans[id(scan)] = scan
                updates.setdefault(id(scan), []).append(update)
        loops = tuple(self._loop(scans[key], several) for key, several in updates.items())
        in_loop = frozenset(u.leaf for loop in loops for u in loop.updates)
        return UpdatePlan(loops, in_loop, self._reasons)

    def _is_stack(self, grad: Var, scan: JaxprEqn) -> bool:
        """Return whether a gradient has the axis of a loop's layers."""
        region = self._graph.region([grad], self._graph.after(scan))
        stacked = scan.outvars[scan_counts(scan.params)[1] :]
        read = {grad, *(v for e in region for v in e.invars if isinstance(v, Var))}
        stacks = [v for v in stacked if v in read]
        try:
            return bool(stacks) and (grad in stacks or LayerAxis(region, stacks).axis(grad) == 0)
        except NotSeparable:
            return False

    def _check_readers(self, update: LeafUpdate, scan: JaxprEqn) -> None:
        """Raise NotSeparable if something needs an old stack after the loop has overwritten it."""
        own = {id(e) for e, _ in update.equations}
        after = self._graph.after(scan)
        n_consts, n_carry = scan_counts(scan.params)
        origins = [self._graph.origin(v)[0] for v in scan.invars]
        outputs = [self._graph.origin(v)[0] for v in self._step.outputs]
        for t in update.targets:
            if t.old in origins[: n_consts + n_carry]:
                raise NotSeparable("each iteration of the backward loop reads all layers")
            if t.axis and t.old in origins:
                raise NotSeparable("the loop does not run over the axis of the layers")
            if t.old in outputs:
                raise NotSeparable("the step returns the old value too")
            for eqn in self._graph.readers_of(t.old):
                if id(eqn) in own or eqn is scan:
                    continue
                if self._graph.is_update(eqn):
                    raise NotSeparable(f"`{eqn.primitive.name}` of the update reads all layers")
                if not after.isdisjoint(eqn.outvars):
                    raise NotSeparable("the old value is read after the backward loop")

    def _loop(self, scan: JaxprEqn, updates: Sequence[LeafUpdate]) -> BackwardLoop:
        """Return the loop with some updates in it."""
        own = {id(e) for u in updates for e, _ in u.equations}
        targets = [t for u in updates for t in u.targets]
        of_updates = [v for u in updates for v in (*u.stacks, *u.before)]
        earlier = {id(e) for e in self._graph.needed([*scan.invars, *of_updates])} | {id(scan)}
        first = dict.fromkeys(
            v for t in targets for eqn in self._graph.readers_of(t.old)
            if id(eqn) not in own | earlier for v in eqn.outvars
        )  # fmt: skip
        makes = {t.new for t in targets} | {v for u in updates for e in u.sums for v in e.outvars}
        rest = self._graph.needed(self._step.outputs, makes)
        read = {id(v) for atoms in (*(e.invars for e in rest), self._step.outputs) for v in atoms}
        gradients = {v for u in updates for v in u.gradients}
        dropped = frozenset(v for v in gradients if id(v) not in read)
        scanned = scan.invars[sum(scan_counts(scan.params)) :]
        olds = {t.old for t in targets}
        origins = {v: self._graph.origin(v) for v in scanned if isinstance(v, Var)}
        carried = {v: origin for v, origin in origins.items() if origin[0] in olds}
        return BackwardLoop(scan, tuple(updates), tuple(first), dropped, carried)
