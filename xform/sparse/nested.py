"""Propagate sets of input elements through loops and branches.

Each element of a value has a set: the input elements that it may depend on. A loop with a known
trip count is followed iteration by iteration, with the values that are known in each, unless that
takes too long. A scan whose carry depends on no input element is handled as one program for all
iterations at once. For all other loops, the sets of the carry are iterated to a fixed point: they
grow until one more iteration adds nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from xform._jax import JaxprEqn
from xform.passes.dataflow import Lattice, results_through
from xform.passes.inline import inlined, underived_body
from xform.program.dimensions import shape
from xform.program.flow import Flow
from xform.program.ir import Program, evaluate, trace
from xform.sparse.known import OperandFacts
from xform.sparse.sets import ALL, Sets, elementwise_union, merge_tables, union_over_axes
from xform.sparse.steps import MaybeSets
from xform.sparse.walk import SetPropagator

# Maximum number of equations, over all iterations, for following a loop iteration by iteration.
_MAX_EQUATIONS = 20_000
# After this many rounds of a fixed point, all elements of a carried value share one set.
_ROUNDS_PER_ELEMENT = 32


def follow_nested(
    propagator: SetPropagator, eqn: JaxprEqn, flow: Flow, sets: MaybeSets, facts: OperandFacts
) -> list[Sets | None]:
    """Return the sets of the results of a loop or branch, given the sets of its operands.

    `flow` is the equation's flow. If it is not known which branch is taken, the sets are the union
    over all branches.
    """
    if flow.length is not None:
        return _scan(propagator, eqn, flow, sets, facts)
    if flow.condition is not None:
        return _while(propagator, eqn, flow, sets, facts)
    if flow.index is not None and (index := facts.values[flow.index]) is not None:
        taken = flow.bodies[min(max(int(index), 0), len(flow.bodies) - 1)]
        flow = dataclasses.replace(flow, bodies=(taken,))
    return _in_any_run(propagator, eqn, flow, sets, facts.values)


def _union(alternatives: Sequence[Sets | None]) -> Sets | None:
    """Return the elementwise union of sets; None if no alternative depends on an input element."""
    dependent = [x for x in alternatives if x is not None]
    return elementwise_union(dependent) if dependent else None


def _scan(propagator: SetPropagator, eqn: JaxprEqn, flow: Flow, sets: MaybeSets,
          facts: OperandFacts) -> list[Sets | None]:  # fmt: skip
    """Return the sets of a scan's results.

    If the carry depends on no input element, the scan is followed as a vmap over its iterations.
    Otherwise it is followed iteration by iteration or, if that takes too long, by a fixed point.
    """
    (body,) = flow.bodies
    if flow.length and not _carry_depends(propagator, flow, sets):
        return _as_vmap(propagator, flow, sets, facts)
    if flow.length * len(inlined(body.program, underived_body).equations) > _MAX_EQUATIONS:
        return _in_any_run(propagator, eqn, flow, sets, facts.values)
    values = list(facts.values)
    outputs: list[list[Sets | None]] = [[]] * flow.length
    for t in flow.iterations:
        outputs[t], out_values = propagator.run(
            body.program,
            flow.inputs(body, sets, lambda x, t=t: None if x is None else x.with_ids(x.ids[t])),
            flow.inputs(body, values, lambda v, t=t: None if v is None else v[t]),
        )
        sets, values = flow.after(sets, outputs[t]), flow.after(values, out_values)
    return flow.results(sets, outputs, _stack)


def _stack(outputs: MaybeSets) -> Sets | None:
    """Stack the sets of an output over the iterations."""
    dependent = [x for x in outputs if x is not None]
    if not dependent:
        return None
    ids, table = merge_tables(dependent)
    remaining_ids = iter(ids)
    empty = np.zeros_like(ids[0])
    return Sets(np.stack([empty if x is None else next(remaining_ids) for x in outputs]), table)


def _carry_depends(propagator: SetPropagator, flow: Flow, sets: MaybeSets) -> bool:
    """Return whether the carry of a scan depends on an input element, at the start or later."""
    if any(sets[k] is not None for k in flow.carried):
        return True
    (body,) = flow.bodies
    outs = propagator.follow(
        body.program, flow.inputs(body, sets, _any_slice), [None] * len(body.operands)
    )
    return any(outs[r] is not None for r in flow.carried.values())


def _any_slice(x: Sets | None) -> Sets | None:
    """Return the sets of the slices of a value along axis 0, united."""
    return None if x is None else union_over_axes(x, (0,))


def _as_vmap(
    propagator: SetPropagator, flow: Flow, sets: MaybeSets, facts: OperandFacts
) -> list[Sets | None]:
    """Return the sets of a scan's results if its carry depends on no input element.

    The program that is followed is a vmap of the body over all iterations.
    """
    (body,), length = flow.bodies, flow.length
    each = [k in flow.scanned or k in flow.carried for k in body.operands]
    all_iterations = jax.vmap(
        lambda *xs: evaluate(body.program, xs), [0 if on else None for on in each],
        axis_size=length,
    )  # fmt: skip
    avals: list[Any] = body.program.in_avals
    types = [aval.update(shape=(length, *aval.shape)) if on else aval
             for aval, on in zip(avals, each, strict=True)]  # fmt: skip
    prog = trace(all_iterations, *types)
    operands = [None if k in flow.carried else sets[k] for k in body.operands]
    values = [None if k in flow.carried else facts.values[k] for k in body.operands]
    ys = propagator.follow(prog, operands, values)
    return [y if r in flow.stacked else None for r, y in enumerate(ys)]


def _in_any_run(propagator: SetPropagator, eqn: JaxprEqn, flow: Flow, sets: MaybeSets,
                values: Sequence[Any]) -> list[Sets | None]:  # fmt: skip
    """Return the sets of the results of a loop or branch, for any iteration or branch.

    The sets of a loop's carry are a fixed point: the smallest sets that contain the initial ones
    and that an iteration does not enlarge. `values` are the known values of the operands.
    """
    growing = _GrowingSets()
    changing = flow.carried.keys() | flow.scanned
    known = [None if k in changing else v for k, v in enumerate(values)]
    inputs = {body.program: [known[k] for k in body.operands] for body in flow.bodies}

    def analyze(body: Program, of_inputs: MaybeSets) -> list[Sets | None]:
        growing.rounds += 1
        return propagator.follow(body, of_inputs, inputs[body])

    return results_through(flow, sets, eqn.outvars, growing, analyze)


class _GrowingSets(Lattice[Sets | None]):
    """The sets of the carry of a loop grow.

    After too many rounds, larger sets are returned: at first one set for all elements of a value,
    in the end all input elements.
    """

    def __init__(self) -> None:
        self.rounds = 0

    def join(self, a: Sets | None, b: Sets | None) -> Sets | None:
        joined = _union([a, b])
        if self.rounds <= _ROUNDS_PER_ELEMENT:
            return joined
        if self.rounds <= 2 * _ROUNDS_PER_ELEMENT:
            return _one_set_for_all(joined)
        return _all_input_elements(joined)

    def same(self, a: Sets | None, b: Sets | None) -> bool:
        return _equal(a, b)

    def slice(self, x: Sets | None, v: Any) -> Sets | None:
        return _any_slice(x)

    def stack(self, x: Sets | None, v: Any) -> Sets | None:
        return None if x is None else x.with_ids(np.broadcast_to(x.ids, shape(v)))


def _equal(old: Sets | None, new: Sets | None) -> bool:
    """Return whether the sets are equal. They can only have grown, so their sizes are compared."""
    if old is None or new is None:
        return new is None
    return np.array_equal(old.sizes[old.ids], new.sizes[new.ids])


def _one_set_for_all(x: Sets | None) -> Sets | None:
    """Give each element the union of all elements' sets."""
    if x is None:
        return None
    union = union_over_axes(x, range(x.ids.ndim))
    return union.with_ids(np.broadcast_to(union.ids, x.ids.shape))


def _all_input_elements(x: Sets | None) -> Sets | None:
    """Give each element the set of all input elements."""
    return None if x is None else x.with_ids(np.full_like(x.ids, ALL))


def _while(propagator: SetPropagator, eqn: JaxprEqn, flow: Flow, sets: MaybeSets,
           facts: OperandFacts) -> list[Sets | None]:  # fmt: skip
    """Return the sets of a while loop's results.

    The loop is followed iteration by iteration while the condition is known, then by a fixed point.
    """
    (body,), condition, values = flow.bodies, flow.condition, list(facts.values)
    assert condition is not None
    for _ in range(_MAX_EQUATIONS // max(len(inlined(body.program, underived_body).equations), 1)):
        of_condition = [values[k] for k in condition.operands]
        no_sets = [None] * len(of_condition)
        _, (continues,) = propagator.run(condition.program, no_sets, of_condition)
        if continues is None:
            break
        if not continues:
            return flow.results(sets, (), _stack)
        outs, out_values = propagator.run(
            body.program, [sets[k] for k in body.operands], [values[k] for k in body.operands]
        )
        sets, values = flow.after(sets, outs), flow.after(values, out_values)
    return _in_any_run(propagator, eqn, flow, sets, values)


def set_propagator() -> SetPropagator:
    """Return a `SetPropagator` that handles loops and branches."""
    return SetPropagator(follow_nested)
