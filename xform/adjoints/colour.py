"""The colour of a value: whether derivatives with respect to the inputs pass through it.

Colours correspond to `requires_grad` of a PyTorch tensor. An "active" value depends differentiably
on an active input. A "stopped" value is computed from active values, but no derivative passes
(`stop_gradient`, integers, comparisons). A "constant" value depends on no active input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from xform._jax import JaxprEqn, Var, cond_p, scan_counts, scan_p, while_p
from xform.errors import MissingRule, UnsupportedParam
from xform.passes.listing import programs
from xform.program.arithmetic import differentiable
from xform.program.ir import Program
from xform.registry.table import lookup

Colour = Literal["constant", "stopped", "active"]
COLOURS: tuple[Colour, ...] = ("constant", "stopped", "active")
Colours = dict[Var, Colour]


def strongest(colours: Sequence[Colour]) -> Colour:
    """Return "active" if one of the colours is, else "stopped" if one is, else "constant"."""
    return COLOURS[max(map(COLOURS.index, colours), default=0)]


def of(atom: Any, colours: Colours) -> Colour:
    """Return the colour of a variable; a literal is constant."""
    return colours.get(atom, "constant") if isinstance(atom, Var) else "constant"


def colours(prog: Program, inputs: Sequence[Colour]) -> Colours:
    """Return the colour of each value of a program, including its loops, branches and calls."""
    known: Colours = {}
    outputs_of(prog, inputs, known)
    return known


def outputs_of(prog: Program, inputs: Sequence[Colour], known: Colours) -> list[Colour]:
    """Return the colours of the outputs, and record the colours of all values in `known`.

    If a program runs several times, `known` holds the strongest colour of each value.
    """
    local: Colours = dict(zip(prog.inputs, inputs, strict=True))
    for eqn in prog.equations:
        results = made_by(eqn, [of(v, local) for v in eqn.invars], known)
        local.update(zip(eqn.outvars, results, strict=True))
    known.update({v: strongest([of(v, known), colour]) for v, colour in local.items()})
    return [of(v, local) for v in prog.outputs]


def made_by(eqn: JaxprEqn, inputs: Sequence[Colour], known: Colours) -> list[Colour]:
    """Return the colours of an equation's outputs.

    A primitive without a rule is assumed to be differentiable in all its inputs.
    """
    depends = _nested(eqn, inputs, known) or [strongest(inputs)] * len(eqn.outvars)
    pairs = zip(_differentiable_outputs(eqn, inputs, depends), depends, strict=True)
    return ["active" if on else "stopped" if c != "constant" else c for on, c in pairs]


def _differentiable_outputs(eqn: JaxprEqn, inputs: Sequence[Colour], depends: Sequence[Colour]
                            ) -> Sequence[bool]:  # fmt: skip
    """Return, for each output, whether it depends differentiably on an active input."""
    ins = tuple(c == "active" for c in inputs)
    if not any(ins):
        return (False,) * len(eqn.outvars)
    try:
        return lookup(eqn).active(eqn, ins)
    except (MissingRule, UnsupportedParam):
        pairs = zip(eqn.outvars, depends, strict=True)
        return [c == "active" and differentiable(v.aval) for v, c in pairs]


def _nested(eqn: JaxprEqn, inputs: Sequence[Colour], known: Colours) -> list[Colour]:
    """Return the colours of an equation's outputs, computed from the programs inside it.

    An empty list if there are none, or if their inputs and outputs do not match the equation's.
    """
    bodies = [prog for _, prog in programs(eqn)]
    if eqn.primitive is scan_p:
        nc, nk = scan_counts(eqn.params)
        return _loop(bodies[0], inputs[:nc], inputs[nc : nc + nk], inputs[nc + nk :], known)
    if eqn.primitive is while_p:
        a, b = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        condition, steps = bodies
        carry = _loop(steps, inputs[a : a + b], inputs[a + b :], (), known)
        (predicate,) = outputs_of(condition, [*inputs[:a], *carry], known)
        return [_controlled(predicate, c) for c in carry]
    if eqn.primitive is cond_p:
        index, operands = inputs[0], inputs[1:]
        results = [outputs_of(b, operands, known) for b in bodies]
        return [_controlled(index, strongest(column)) for column in zip(*results, strict=True)]
    if len(bodies) == 1 and len(bodies[0].inputs) == len(eqn.invars):
        outs = outputs_of(bodies[0], inputs, known)
        return outs if len(outs) == len(eqn.outvars) else []
    return []


def _controlled(predicate: Colour, result: Colour) -> Colour:
    """Return "stopped" for a constant result of control flow that depends on an active input."""
    return "stopped" if result == "constant" and predicate != "constant" else result


def _loop(steps: Program, consts: Sequence[Colour], carry: Sequence[Colour],
          seq: Sequence[Colour], known: Colours) -> list[Colour]:  # fmt: skip
    """Return the colours of a loop's outputs.

    The colour of a carry is its strongest colour over all iterations.
    """
    n = len(carry)
    while True:
        outs = outputs_of(steps, [*consts, *carry, *seq], known)
        merged: list[Colour] = [strongest(pair) for pair in zip(carry, outs[:n], strict=True)]
        if merged == list(carry):
            return [*merged, *outs[n:]]
        carry = merged
