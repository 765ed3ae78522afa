"""Propagate sets of input elements through loops and branches.

Each element of a value has a set: the input elements that it may depend on. A loop with a known
trip count is followed iteration by iteration, with the values that are known in each, unless that
takes too long. A scan whose carry depends on no input element is handled as one program for all
iterations at once. For all other loops, the sets of the carry are iterated to a fixed point: they
grow until one more iteration adds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from xform._jax import JaxprEqn, cond_p, scan_counts, scan_p, while_p
from xform.program.dimensions import shape
from xform.program.ir import Program, evaluate, program, trace
from xform.sparse.known import OperandFacts
from xform.sparse.sets import ALL, Sets, elementwise_union, merge_tables, union_over_axes
from xform.sparse.steps import MaybeSets
from xform.sparse.walk import SetPropagator, inline_calls

# Maximum number of equations, over all iterations, for following a loop iteration by iteration.
_MAX_EQUATIONS = 20_000
# After this many rounds of a fixed point, all elements of a carried value share one set.
_ROUNDS_PER_ELEMENT = 32


def _cond(
    propagator: SetPropagator, eqn: JaxprEqn, sets: MaybeSets, facts: OperandFacts
) -> list[Sets | None]:
    """Return the sets of a cond's results, from the branch that is taken.

    If it is not known which branch is taken, the sets are the union over all branches.
    """
    branches = list(map(program, eqn.params["branches"]))
    index, *values = facts.values
    if index is not None:
        branches = [branches[min(max(int(index), 0), len(branches) - 1)]]
    results = [propagator.follow(b, sets[1:], values) for b in branches]
    return [_union(alternatives) for alternatives in zip(*results, strict=True)]


def _union(alternatives: Sequence[Sets | None]) -> Sets | None:
    """Return the elementwise union of sets; None if no alternative depends on an input element."""
    dependent = [x for x in alternatives if x is not None]
    return elementwise_union(dependent) if dependent else None


def _scan(
    propagator: SetPropagator, eqn: JaxprEqn, sets: MaybeSets, facts: OperandFacts
) -> list[Sets | None]:
    """Return the sets of a scan's results.

    If the carry depends on no input element, the scan is followed as a vmap over its iterations.
    Otherwise it is followed iteration by iteration or, if that takes too long, by a fixed point.
    Here and below, the operands of a scan are its constants `[:a]`, the initial carry `[a:b]`, and
    the scanned inputs `[b:]`.
    """
    body, length = program(eqn.params["jaxpr"]), eqn.params["length"]
    a, carries = scan_counts(eqn.params)
    b = a + carries
    if not length:
        return [*sets[a:b], *[None] * (len(eqn.outvars) - carries)]
    if not _carry_depends(propagator, body, sets, a, b):
        return _as_vmap(propagator, eqn, body, sets, facts, a, b)
    if length * len(inline_calls(body).equations) > _MAX_EQUATIONS:
        return _by_fixed_point(propagator, eqn, body, sets, facts, a, b)
    carry, known = list(sets[a:b]), list(facts.values[a:b])
    iterations = range(length)[:: -1 if eqn.params["reverse"] else 1]
    stacked: list[MaybeSets] = [()] * length
    for t in iterations:
        slices = [None if x is None else x.with_ids(x.ids[t]) for x in sets[b:]]
        values = [*facts.values[:a], *known, *(None if v is None else v[t]
                                               for v in facts.values[b:])]  # fmt: skip
        outs, out_values = propagator.run(body, [*sets[:a], *carry, *slices], values)
        carry, known, stacked[t] = outs[:carries], out_values[:carries], outs[carries:]
    return [*carry, *(_stack(outputs) for outputs in zip(*stacked, strict=True))]


def _stack(outputs: MaybeSets) -> Sets | None:
    """Stack the sets of an output over the iterations."""
    dependent = [x for x in outputs if x is not None]
    if not dependent:
        return None
    ids, table = merge_tables(dependent)
    remaining_ids = iter(ids)
    empty = np.zeros_like(ids[0])
    return Sets(np.stack([empty if x is None else next(remaining_ids) for x in outputs]), table)


def _carry_depends(
    propagator: SetPropagator, body: Program, sets: MaybeSets, a: int, b: int
) -> bool:
    """Return whether the carry of a scan depends on an input element, at the start or later."""
    if any(x is not None for x in sets[a:b]):
        return True
    slices = [None if x is None else union_over_axes(x, (0,)) for x in sets[b:]]
    outs = propagator.follow(body, [*sets[:b], *slices], [None] * len(sets))
    return any(x is not None for x in outs[: b - a])


def _as_vmap(propagator: SetPropagator, eqn: JaxprEqn, body: Program, sets: MaybeSets,
             facts: OperandFacts, a: int, b: int) -> list[Sets | None]:  # fmt: skip
    """Return the sets of a scan's results if its carry depends on no input element.

    The program that is followed is a vmap of the body over all iterations.
    """
    length = eqn.params["length"]
    axes = [None] * a + [0] * (len(sets) - a)
    all_iterations = jax.vmap(lambda *xs: evaluate(body, xs), axes, axis_size=length)
    avals: list[Any] = [v.aval for v in eqn.invars]
    carries = [aval.update(shape=(length, *aval.shape)) for aval in avals[a:b]]
    prog = trace(all_iterations, *avals[:a], *carries, *avals[b:])
    values = [*facts.values[:a], *[None] * (b - a), *facts.values[b:]]
    ys = propagator.follow(prog, sets, values)[b - a :]
    return [*[None] * (b - a), *ys]


def _by_fixed_point(propagator: SetPropagator, eqn: JaxprEqn, body: Program, sets: MaybeSets,
                    facts: OperandFacts, a: int, b: int) -> list[Sets | None]:  # fmt: skip
    """Return the sets of a scan's results, by a fixed point.

    One iteration stands for all iterations: it counts as reading all slices of the scanned inputs.
    """
    slices = [None if x is None else union_over_axes(x, (0,)) for x in sets[b:]]
    values = [*facts.values[:a], *[None] * (len(sets) - a)]

    def iteration(carry: MaybeSets) -> list[Sets | None]:
        return propagator.follow(body, [*sets[:a], *carry, *slices], values)

    carry = _fixed_point(lambda carry: iteration(carry)[: b - a], list(sets[a:b]))
    outs = iteration(carry)[b - a :]
    shapes = map(shape, eqn.outvars[b - a :])
    stacked = [None if y is None else y.with_ids(np.broadcast_to(y.ids, s))
               for y, s in zip(outs, shapes, strict=True)]  # fmt: skip
    return [*carry, *stacked]


def _fixed_point(
    iteration: Callable[[list[Sets | None]], list[Sets | None]], carry: list[Sets | None]
) -> list[Sets | None]:
    """Return the fixed point of the carry's sets.

    These are the smallest sets that contain the initial ones and that an iteration of the loop does
    not enlarge. After too many rounds, larger sets are returned: at first one set for all elements
    of a value, in the end all input elements.
    """
    for i in range(2 * _ROUNDS_PER_ELEMENT):
        new = [_union(pair) for pair in zip(carry, iteration(carry), strict=True)]
        if all(map(_equal, carry, new)):
            return carry
        carry = new if i < _ROUNDS_PER_ELEMENT else list(map(_one_set_for_all, new))
    return list(map(_all_input_elements, carry))


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


def _while(
    propagator: SetPropagator, eqn: JaxprEqn, sets: MaybeSets, facts: OperandFacts
) -> list[Sets | None]:
    """Return the sets of a while loop's results.

    The loop is followed iteration by iteration while the condition is known, then by a fixed point.
    """
    condition, body = program(eqn.params["cond_jaxpr"]), program(eqn.params["body_jaxpr"])
    a = eqn.params["cond_nconsts"]  # the operands: constants of the condition, of the body, carry
    b = a + eqn.params["body_nconsts"]
    consts, const_values = sets[a:b], facts.values[a:b]
    carry, carry_values = list(sets[b:]), list(facts.values[b:])
    for _ in range(_MAX_EQUATIONS // max(len(inline_calls(body).equations), 1)):
        no_sets = [None] * len(condition.inputs)
        _, (continues,) = propagator.run(condition, no_sets, [*facts.values[:a], *carry_values])
        if continues is None:
            break
        if not continues:
            return carry
        carry, carry_values = propagator.run(
            body, [*consts, *carry], [*const_values, *carry_values]
        )
    unknown = [None] * len(carry_values)
    return _fixed_point(
        lambda carry: propagator.follow(body, [*consts, *carry], [*const_values, *unknown]), carry
    )


def set_propagator() -> SetPropagator:
    """Return a `SetPropagator` that handles loops and branches."""
    return SetPropagator({cond_p: _cond, scan_p: _scan, while_p: _while})
