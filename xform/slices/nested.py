"""How calls, loops and branches run in slices: the axis passes through their bodies.

A body runs in slices if each of its equations does, without a sum over the axis: a sum in a body
would be needed there before it is complete. A loop also needs the same axis in its carried values
before and after an iteration, and its condition may not depend on a sliced value. Functions with
custom derivative rules are in `custom_rules.py`.
"""

from __future__ import annotations

from xform._jax import (
    JaxprEqn,
    cond_p,
    custom_jvp_call_p,
    custom_vjp_call_p,
    scan_counts,
    scan_p,
    while_p,
)
from xform.program.ir import Program, program
from xform.registry.table import traits
from xform.slices.bodies import Axes, Bodies, BodySlices, FindBodySlices, by_position
from xform.slices.custom_rules import custom_jvp, custom_vjp
from xform.slices.opened import opened
from xform.slices.slicing import Slicing


def has_body(eqn: JaxprEqn) -> bool:
    """Return whether an equation runs a program in a way that this file knows."""
    return eqn.primitive in _SLICED_BY


def runs_unknown_body(eqn: JaxprEqn) -> bool:
    """Return whether an equation is a call, or the like, that is never sliced."""
    return bool(traits(eqn.primitive).call) and not has_body(eqn)


def nested_slicing(eqn: JaxprEqn, operands: Axes, results: Axes, find: FindBodySlices
                   ) -> Bodies | None:  # fmt: skip
    """Return how an equation with bodies runs if some operands and results are sliced.

    The returned slicing may slice more operands and results than those. None: it cannot run so.
    """
    return _SLICED_BY[eqn.primitive](eqn, operands, results, find)


def _scan(eqn: JaxprEqn, operands: Axes, results: Axes, find: FindBodySlices) -> Bodies | None:
    """Slice a scan along an axis that its body keeps. The scanned axis itself is never sliced."""
    consts, carried = scan_counts(eqn.params)
    first = consts + carried
    if any(axis == 0 for k, axis in operands.items() if k >= first):
        return None
    if any(axis == 0 for k, axis in results.items() if k >= carried):
        return None
    ins = {k: axis - (k >= first) for k, axis in operands.items()}
    outs = {k: axis - (k >= carried) for k, axis in results.items()}
    body = opened(program(eqn.params["jaxpr"]))
    found = _loop(body, ins, outs, consts, carried, find)
    if found is None:
        return None
    raised = lambda axes, start: tuple(
        axis if axis is None or k < start else axis + 1 for k, axis in enumerate(axes)
    )
    slicing = Slicing(raised(found.inputs, first), raised(found.outputs, carried))
    return Bodies(slicing, ((body, found),))


def _while(eqn: JaxprEqn, operands: Axes, results: Axes, find: FindBodySlices) -> Bodies | None:
    """Slice a while loop whose condition reads no sliced value.

    A loop whose condition is an array is not sliced. `vmap` makes such loops: each row of the batch
    ends at its own iteration.
    """
    n, m = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    (condition_type,) = eqn.params["cond_jaxpr"].out_avals
    if condition_type.shape or any(k < n for k in operands):
        return None
    body, condition = (opened(program(eqn.params[k])) for k in ("body_jaxpr", "cond_jaxpr"))
    ins = {k - n: axis for k, axis in operands.items()}
    found = _loop(body, ins, results, m, len(eqn.outvars), find)
    if found is None:
        return None
    states = {n + k: axis for k, axis in by_position(found.inputs[m:]).items()}
    of_condition = find(condition, states, {})
    if of_condition is None or of_condition.members:
        return None
    slicing = Slicing(((None,) * n + found.inputs), found.outputs)
    return Bodies(slicing, ((body, found), (condition, of_condition)))


def _loop(body: Program, ins: Axes, outs: Axes, consts: int, carried: int, find: FindBodySlices
          ) -> BodySlices | None:  # fmt: skip
    """Return how the body of a loop runs in slices, with equal axes for carried values."""
    ins, outs = dict(ins), dict(outs)
    for _ in range(2 * carried + 1):
        found = find(body, ins, outs)
        if found is None:
            return None
        before, after = found.inputs[consts : consts + carried], found.outputs[:carried]
        if before == after:
            return found
        for k, (a, b) in enumerate(zip(before, after, strict=True)):
            if a is not None:
                outs[k] = a
            if b is not None:
                ins[consts + k] = b
    return None


def _cond(eqn: JaxprEqn, operands: Axes, results: Axes, find: FindBodySlices) -> Bodies | None:
    """Slice a conditional whose index is not sliced, with equal axes in all branches."""
    if 0 in operands:
        return None
    branches = [opened(program(b)) for b in eqn.params["branches"]]
    ins, outs = {k - 1: axis for k, axis in operands.items()}, dict(results)
    for _ in range(len(eqn.invars) + len(eqn.outvars)):
        found = [find(b, ins, outs) for b in branches]
        known = [f for f in found if f is not None]
        if len(known) < len(branches):
            return None
        if len({(f.inputs, f.outputs) for f in known}) == 1:
            slicing = Slicing((None, *known[0].inputs), known[0].outputs)
            return Bodies(slicing, tuple(zip(branches, known, strict=True)))
        for f in known:
            ins |= by_position(f.inputs)
            outs |= by_position(f.outputs)
    return None


_SLICED_BY = {
    scan_p: _scan,
    while_p: _while,
    cond_p: _cond,
    custom_jvp_call_p: custom_jvp,
    custom_vjp_call_p: custom_vjp,
}
