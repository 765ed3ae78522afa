"""How loops, branches and calls run in slices: the axis passes through their bodies.

A body runs in slices if each of its equations does, without a sum over the axis: a sum in a body
would be needed there before it is complete. A loop also needs the same axis in its carried values
before and after an iteration. What decides about the next iteration or about the branch may not
depend on a sliced value. Functions with custom derivative rules are in `custom_rules.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from xform._jax import JaxprEqn, Primitive, custom_jvp_call_p, custom_vjp_call_p
from xform.program.flow import Body, Flow
from xform.registry.table import flow_of, traits
from xform.slices.bodies import Axes, Bodies, BodySlices, FindBodySlices
from xform.slices.custom_rules import custom_jvp, custom_vjp
from xform.slices.opened import opened
from xform.slices.slicing import SlicedAxis, Slicing

_CUSTOM: dict[Primitive, Callable[..., Bodies | None]] = {
    custom_jvp_call_p: custom_jvp,
    custom_vjp_call_p: custom_vjp,
}


def has_body(eqn: JaxprEqn) -> bool:
    """Return whether an equation runs a program in a way that this file knows."""
    flow = flow_of(eqn)
    return eqn.primitive in _CUSTOM or (flow is not None and not flow.is_call)


def runs_unknown_body(eqn: JaxprEqn) -> bool:
    """Return whether an equation is a call, or the like, that is never sliced."""
    return bool(traits(eqn.primitive).call) and not has_body(eqn)


def nested_slicing(eqn: JaxprEqn, operands: Axes, results: Axes, find: FindBodySlices
                   ) -> Bodies | None:  # fmt: skip
    """Return how an equation with bodies runs if some operands and results are sliced.

    The returned slicing may slice more operands and results than those. None: it cannot run so.
    """
    if eqn.primitive in _CUSTOM:
        return _CUSTOM[eqn.primitive](eqn, operands, results, find)
    flow = flow_of(eqn)
    assert flow is not None
    condition = flow.condition and _opened(flow.condition)
    flow = dataclasses.replace(flow, bodies=tuple(map(_opened, flow.bodies)), condition=condition)
    return _LoopOrBranch(eqn, flow, find).slicing(operands, results)


def _opened(body: Body) -> Body:
    return body._replace(program=opened(body.program))


@dataclasses.dataclass(frozen=True)
class _LoopOrBranch:
    """A loop or branch that may run in slices.

    Attributes:
      eqn, flow: the equation, and its flow with opened bodies.
      find: finds how a body runs in slices.
    """

    eqn: JaxprEqn
    flow: Flow
    find: FindBodySlices

    def slicing(self, operands: Axes, results: Axes) -> Bodies | None:
        """Return how it runs if some operands and results are sliced; None if it cannot."""
        if not self._may_be_sliced(operands, results):
            return None
        operands, results = dict(operands), dict(results)
        n_operands, n_results = len(self.eqn.invars), len(self.eqn.outvars)
        for _ in range(n_operands + n_results + 1):
            found = [self._of_body(body, operands, results) for body in self.flow.bodies]
            known = [f for f in found if f is not None]
            if len(known) < len(found):
                return None
            of_operands, of_results = self._outside(known)
            axes = [*of_operands.values(), *of_results.values()]
            if all(len(a) == 1 for a in axes):
                slicing = Slicing(_in_order(of_operands, n_operands),
                                  _in_order(of_results, n_results))  # fmt: skip
                return self._with_condition(slicing, known)
            operands |= {k: a for k, some in of_operands.items() for a in some if a is not None}
            results |= {r: a for r, some in of_results.items() for a in some if a is not None}
        return None

    def _may_be_sliced(self, operands: Axes, results: Axes) -> bool:
        """Return whether no scanned axis is sliced, and nothing that decides what runs.

        A loop whose condition is an array is not sliced. `vmap` makes such loops: each row of the
        batch ends at its own iteration.
        """
        flow = self.flow
        deciding = set[int]() if flow.index is None else {flow.index}
        if flow.condition is not None:
            deciding.update(k for k in flow.condition.operands if k not in flow.carried)
            if flow.condition.program.out_avals[0].shape:
                return False
        scanned = any(axis == 0 for k, axis in operands.items() if k in flow.scanned)
        stacked = any(axis == 0 for r, axis in results.items() if r in flow.stacked)
        return not scanned and not stacked and deciding.isdisjoint(operands)

    def _of_body(self, body: Body, operands: Axes, results: Axes) -> BodySlices | None:
        """Return how a body runs in slices. A slice of a scanned operand lacks axis 0."""
        ins = {i: operands[k] - (k in self.flow.scanned)
               for i, k in enumerate(body.operands) if k in operands}  # fmt: skip
        outs = {i: results[r] - (r in self.flow.stacked)
                for i, r in enumerate(body.results) if r in results}  # fmt: skip
        return self.find(body.program, ins, outs)

    def _outside(self, found: Sequence[BodySlices]
                 ) -> tuple[dict[int, set[SlicedAxis]], dict[int, set[SlicedAxis]]]:  # fmt: skip
        """Return the axes of each operand and each result, in any body and any iteration."""
        flow = self.flow
        operands: dict[int, set[SlicedAxis]] = {}
        results: dict[int, set[SlicedAxis]] = {}
        for body, f in zip(flow.bodies, found, strict=True):
            for k, axis in zip(body.operands, f.inputs, strict=True):
                operands.setdefault(k, set()).add(_raised(axis, k in flow.scanned))
            for r, axis in zip(body.results, f.outputs, strict=True):
                results.setdefault(r, set()).add(_raised(axis, r in flow.stacked))
        for k, r in flow.carried.items():
            operands[k] = results[r] = operands[k] | results[r]
        return operands, results

    def _with_condition(self, slicing: Slicing, found: Sequence[BodySlices]) -> Bodies | None:
        """Return how the bodies and the condition run. The condition must read no sliced value."""
        parts = [(b.program, f) for b, f in zip(self.flow.bodies, found, strict=True)]
        condition = self.flow.condition
        if condition is not None:
            axes = ((i, slicing.operands[k]) for i, k in enumerate(condition.operands))
            inputs = {i: axis for i, axis in axes if axis is not None}
            of_condition = self.find(condition.program, inputs, {})
            if of_condition is None or of_condition.members:
                return None
            parts.insert(0, (condition.program, of_condition))
        return Bodies(slicing, tuple(parts))


def _raised(axis: SlicedAxis, by: int) -> SlicedAxis:
    return axis if axis is None else axis + by


def _in_order(axes: dict[int, set[SlicedAxis]], n: int) -> tuple[SlicedAxis, ...]:
    """Return the only axis of each of `n` operands or results; None for one that is not there."""
    return tuple(next(iter(axes.get(i, (None,)))) for i in range(n))
