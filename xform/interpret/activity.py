"""Find the equations of a program that carry a derivative. The others are only evaluated.

A value is active if it depends differentiably on an active input. It is useful if a wanted output
depends on it. Derivatives are computed only for values that are both.
"""

from __future__ import annotations

import dataclasses

from xform._jax import Var
from xform.program.ir import Mask, Program
from xform.registry.table import lookup, rule_of


@dataclasses.dataclass(frozen=True)
class Path:
    """The equations between active inputs and wanted outputs.

    `steps` maps the index of an equation to its active inputs and its wanted outputs. `inputs` says
    which inputs a wanted output may depend on. `outputs` says which outputs are active.
    """

    steps: dict[int, tuple[Mask, Mask]]
    inputs: Mask
    outputs: Mask


def path(prog: Program, active: Mask, wanted: Mask | None = None) -> Path:
    """Return the path from `active` inputs to `wanted` outputs (None: all), in linear time."""
    key = ("path", active, wanted)
    if key not in prog.cache:
        every = prog.cache.get(("path", active, None))
        same = every is not None and every.outputs == wanted
        prog.cache[key] = every if same else _path(prog, active, wanted)
    return prog.cache[key]


def _path(prog: Program, active: Mask, wanted: Mask | None) -> Path:
    live = {v for v, on in zip(prog.inputs, active, strict=True) if on}
    reachable: list[tuple[int, Mask]] = []
    for i, eqn in enumerate(prog.equations):
        ins = tuple(isinstance(v, Var) and v in live for v in eqn.invars)
        if any(ins) and (eqn.outvars or rule_of(eqn.primitive)):  # an effect may have no rule
            outs = lookup(eqn).active(eqn, ins)
            if any(outs):
                reachable.append((i, ins))
                live.update(v for v, on in zip(eqn.outvars, outs, strict=True) if on)
    outputs = tuple(isinstance(v, Var) and v in live for v in prog.outputs)
    want = outputs if wanted is None else wanted
    useful = {v for v, on in zip(prog.outputs, want, strict=True) if on and isinstance(v, Var)}
    steps: dict[int, tuple[Mask, Mask]] = {}
    for i, ins in reversed(reachable):
        eqn = prog.equations[i]
        outs = tuple(v in useful and v in live for v in eqn.outvars)
        if any(outs):
            steps[i] = ins, outs
            inputs = lookup(eqn).useful(eqn, ins, outs)
            useful.update(
                v for v, on in zip(eqn.invars, inputs, strict=True) if on and isinstance(v, Var)
            )
    inputs = tuple(v in useful and on for v, on in zip(prog.inputs, active, strict=True))
    return Path(steps, inputs, outputs)
