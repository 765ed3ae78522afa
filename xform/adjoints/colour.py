"""Colours of values: does a derivative in the inputs pass through them?

As `requires_grad` says it of a tensor: "active" values depend differentiably on an active input;
"stopped" ones are computed from those, but no derivative passes (`stop_gradient`, integers,
comparisons); "constant" ones depend on no active input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from xform._jax import JaxprEqn, Var, cond_p, scan_counts, scan_p, while_p
from xform.arithmetic import differentiable
from xform.errors import MissingRule, UnsupportedParam
from xform.ir import Program
from xform.passes.listing import programs
from xform.table import lookup

Colour = Literal["constant", "stopped", "active"]
COLOURS: tuple[Colour, ...] = ("constant", "stopped", "active")
Colours = dict[Var, Colour]


def strongest(colours: Sequence[Colour]) -> Colour:
    """Active if one is, else stopped if one is."""
    return COLOURS[max(map(COLOURS.index, colours), default=0)]


def of(atom: Any, colours: Colours) -> Colour:
    """The colour of a variable; literals are constant."""
    return colours.get(atom, "constant") if isinstance(atom, Var) else "constant"


def colours(prog: Program, inputs: Sequence[Colour]) -> Colours:
    """The colour of each value of a program, and of those in its loops, branches and calls."""
    known: Colours = {}
    outputs_of(prog, inputs, known)
    return known


def outputs_of(prog: Program, inputs: Sequence[Colour], known: Colours) -> list[Colour]:
    """Colours of the outputs; `known` gets those of all values.

    Of a program that is run several times, values have the strongest colour that they ever have.
    """
    here: Colours = dict(zip(prog.inputs, inputs, strict=True))
    for eqn in prog.equations:
        made = made_by(eqn, [of(v, here) for v in eqn.invars], known)
        here.update(zip(eqn.outvars, made, strict=True))
    known.update({v: strongest([of(v, known), colour]) for v, colour in here.items()})
    return [of(v, here) for v in prog.outputs]


def made_by(eqn: JaxprEqn, inputs: Sequence[Colour], known: Colours) -> list[Colour]:
    """The colours of what an equation makes; what has no rule is as if it had one."""
    depends = _nested(eqn, inputs, known) or [strongest(inputs)] * len(eqn.outvars)
    pairs = zip(_moves(eqn, inputs, depends), depends, strict=True)
    return ["active" if on else "stopped" if c != "constant" else c for on, c in pairs]


def _moves(eqn: JaxprEqn, inputs: Sequence[Colour], depends: Sequence[Colour]) -> Sequence[bool]:
    """Which outputs depend differentiably on the active inputs."""
    ins = tuple(c == "active" for c in inputs)
    if not any(ins):
        return (False,) * len(eqn.outvars)
    try:
        return lookup(eqn).active(eqn, ins)
    except (MissingRule, UnsupportedParam):
        pairs = zip(eqn.outvars, depends, strict=True)
        return [c == "active" and differentiable(v.aval) for v, c in pairs]


def _nested(eqn: JaxprEqn, inputs: Sequence[Colour], known: Colours) -> list[Colour]:
    """What an equation makes, by the programs in it; nothing if they do not say."""
    bodies = [prog for _, prog in programs(eqn)]
    if eqn.primitive is scan_p:
        nc, nk = scan_counts(eqn.params)
        return _loop(bodies[0], inputs[:nc], inputs[nc : nc + nk], inputs[nc + nk :], known)
    if eqn.primitive is while_p:
        a, b = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        until, steps = bodies
        carry = _loop(steps, inputs[a : a + b], inputs[a + b :], (), known)
        (goes_on,) = outputs_of(until, [*inputs[:a], *carry], known)
        return [_decided(goes_on, c) for c in carry]
    if eqn.primitive is cond_p:
        index, operands = inputs[0], inputs[1:]
        made = [outputs_of(b, operands, known) for b in bodies]
        return [_decided(index, strongest(column)) for column in zip(*made, strict=True)]
    if len(bodies) == 1 and len(bodies[0].inputs) == len(eqn.invars):
        made = outputs_of(bodies[0], inputs, known)
        return made if len(made) == len(eqn.outvars) else []
    return []


def _decided(by: Colour, made: Colour) -> Colour:
    """What is constant but for a decision that depends on an active input is stopped."""
    return "stopped" if made == "constant" and by != "constant" else made


def _loop(steps: Program, consts: Sequence[Colour], carry: Sequence[Colour],
          seq: Sequence[Colour], known: Colours) -> list[Colour]:  # fmt: skip
    """What a loop makes: a carry has the strongest colour that it has in some trip."""
    n = len(carry)
    while True:
        outs = outputs_of(steps, [*consts, *carry, *seq], known)
        grown: list[Colour] = [strongest(pair) for pair in zip(carry, outs[:n], strict=True)]
        if grown == list(carry):
            return [*grown, *outs[n:]]
        carry = grown
