"""Find the equations of a program that carry a derivative. The others are only evaluated.

An active input is an input that is differentiated. A wanted output is an output whose derivative is
needed. A value is active if it depends differentiably on an active input. It is useful if a wanted
output depends on it. Derivatives are computed only for values that are both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from xform._jax import JaxprEqn, Var
from xform.passes.dataflow import AnyOf, operands_through, results_through
from xform.program.flow import Flow
from xform.program.ir import Mask, Program
from xform.registry.table import lookup, rule_of


@dataclasses.dataclass(frozen=True)
class Path:
    """The equations between active inputs and wanted outputs.

    Attributes:
      steps: maps the index of each such equation to two masks: which of its inputs are active, and
        which of its outputs are both active and useful.
      inputs: which inputs of the program are both active and useful.
      outputs: which outputs of the program are active.
    """

    steps: dict[int, tuple[Mask, Mask]]
    inputs: Mask
    outputs: Mask


def path(prog: Program, active: Mask, wanted: Mask | None = None) -> Path:
    """Return the path from `active` inputs to `wanted` outputs (None: all).

    The time is linear in the size of the program. The result is cached on the program.
    """
    key = ("path", active, wanted)
    if key not in prog.cache:
        to_all = prog.cache.get(("path", active, None))
        same = to_all is not None and to_all.outputs == wanted
        prog.cache[key] = to_all if same else _find_path(prog, active, wanted)
    return prog.cache[key]


def _find_path(prog: Program, active: Mask, wanted: Mask | None) -> Path:
    """Mark the active values from the inputs on, then the useful values from the outputs back."""
    active_values = {v for v, on in zip(prog.inputs, active, strict=True) if on}
    reachable: list[tuple[int, Mask]] = []
    for i, eqn in enumerate(prog.equations):
        active_in = tuple(isinstance(v, Var) and v in active_values for v in eqn.invars)
        # An equation without outputs, such as a print, needs no rule.
        if any(active_in) and (eqn.outvars or rule_of(eqn.primitive)):
            active_out = lookup(eqn).active(eqn, active_in)
            if any(active_out):
                reachable.append((i, active_in))
                results = zip(eqn.outvars, active_out, strict=True)
                active_values.update(v for v, on in results if on)
    outputs = tuple(isinstance(v, Var) and v in active_values for v in prog.outputs)
    goals = zip(prog.outputs, outputs if wanted is None else wanted, strict=True)
    useful = {v for v, on in goals if on and isinstance(v, Var)}
    steps: dict[int, tuple[Mask, Mask]] = {}
    for i, active_in in reversed(reachable):
        eqn = prog.equations[i]
        wanted_out = tuple(v in useful and v in active_values for v in eqn.outvars)
        if any(wanted_out):
            steps[i] = active_in, wanted_out
            useful_in = lookup(eqn).useful(eqn, active_in, wanted_out)
            operands = zip(eqn.invars, useful_in, strict=True)
            useful.update(v for v, on in operands if on and isinstance(v, Var))
    inputs = tuple(v in useful and on for v, on in zip(prog.inputs, active, strict=True))
    return Path(steps, inputs, outputs)


def active_through(flow: Flow, active: Mask, results: Sequence[Var]) -> Mask:
    """Return which results of an equation that runs programs are active, in some iteration."""
    analyze = lambda body, inputs: path(body, tuple(inputs)).outputs
    return tuple(results_through(flow, active, results, AnyOf(), analyze))


def active_inside(flow: Flow, eqn: JaxprEqn, active: Mask) -> Mask:
    """Return which operands are active as the bodies read them, in some iteration."""
    return tuple(flow.after(active, active_through(flow, active, eqn.outvars)))


def useful_through(flow: Flow, eqn: JaxprEqn, active: Mask, wanted: Mask) -> Mask:
    """Return on which active operands of an equation the wanted results depend.

    The equation runs programs. For a carry of a loop, the result says whether they depend on its
    value in some iteration.
    """
    inside = active_inside(flow, eqn, active)
    masks = {body.program: tuple(inside[k] for k in body.operands) for body in flow.bodies}

    def analyze(body: Program, outputs: Sequence[bool]) -> Mask:
        if not any(outputs):
            return (False,) * len(body.inputs)
        return path(body, masks[body], tuple(outputs)).inputs

    useful = operands_through(flow, wanted, eqn.invars, AnyOf(), analyze, False, False)
    return tuple(a and b for a, b in zip(useful, inside, strict=True))


def wanted_through(flow: Flow, eqn: JaxprEqn, active: Mask, wanted: Mask) -> Mask:
    """Return which results of an equation that runs programs are active and wanted.

    A carry of a loop is wanted if it is in some iteration.
    """
    results = active_through(flow, active, eqn.outvars)
    useful = useful_through(flow, eqn, active, wanted)
    carried = {r: useful[k] for k, r in flow.carried.items()}
    return tuple(on and carried.get(r, want)
                 for r, (on, want) in enumerate(zip(results, wanted, strict=True)))  # fmt: skip
