"""Dead code elimination: drop equations whose results nothing reads.

The pass `Dce` goes backward through a program, from its outputs. For a loop, branch or call it
finds the outputs that are used, drops the equations in its bodies that only compute other outputs,
and rebuilds it with the used outputs alone. `live` does the same for a list of equations, without
their bodies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Sequence
from typing import Any, ClassVar

from xform._jax import JaxprEqn, Var, has_effects
from xform.passes.base import Pass
from xform.passes.builder import Builder
from xform.passes.dataflow import AnyOf, operands_through
from xform.passes.structured import bodies, inputs_read, outputs_used, rebuild_equation
from xform.program.ir import Mask, Program, gather
from xform.registry.table import flow_of


@dataclasses.dataclass(frozen=True)
class Dce(Pass):
    """Dead code elimination: drop equations without effects that no output depends on.

    In loops, branches and calls it drops outputs that nothing reads, and values that a loop carries
    only for such outputs. A loop is dropped if nothing reads its outputs, even if it never ends.

    >>> from xform import passes
    >>> f = passes.Dce()(lambda x: (jnp.cos(x), jnp.sin(x))[1])
    >>> [e.primitive.name for e in jax.make_jaxpr(f)(1.0).eqns]
    ['sin']
    """

    name: ClassVar[str] = "dce"

    def rewrite(self, prog: Program) -> Program:
        needed = {v for v in prog.outputs if isinstance(v, Var)}
        kept: list[JaxprEqn | tuple[JaxprEqn, Program, Mask]] = []
        for eqn in reversed(prog.equations):
            if not has_effects(eqn) and not any(v in needed for v in eqn.outvars):
                continue
            pruned = self._prune(eqn, tuple(v in needed for v in eqn.outvars))
            kept.append(eqn if pruned is None else (eqn, *pruned))
            read = (True,) * len(eqn.invars) if pruned is None else inputs_read(pruned[0])
            needed.update(v for v in gather(eqn.invars, read) if isinstance(v, Var))
        build = Builder(prog)
        build.changed = len(kept) < len(prog.equations)
        for item in reversed(kept):
            if isinstance(item, tuple):
                eqn, replacement, used = item
                build.alias(
                    gather(eqn.outvars, used), build.splice(replacement, build.atoms(eqn.invars))
                )
            else:
                build.add(build.renamed(item))
        return build.program()

    def _prune(self, eqn: JaxprEqn, used: Mask) -> tuple[Program, Mask] | None:
        """Drop the unused outputs of an equation, and the nested equations that compute them.

        Returns a program that replaces the equation, and the mask of outputs that are left; None if
        nothing is dropped.
        """
        old, flow = bodies(eqn), flow_of(eqn)
        if flow is None or not old:
            return None
        read = operands_through(
            flow, used, eqn.invars, AnyOf(), _inputs_read, unread=False, predicate=True
        )
        carried = {r: read[k] for k, r in flow.carried.items()}
        used = tuple(carried.get(r, on) for r, on in enumerate(used))
        masks = outputs_used(flow, used)
        new = [self.program(_with_outputs(p, m)) for p, m in zip(old, masks, strict=True)]
        if all(n is p for n, p in zip(new, old, strict=True)):
            return None
        replacement = rebuild_equation(eqn, new, used)
        return None if replacement is None else (replacement, used)


def _inputs_read(prog: Program, used: Sequence[bool]) -> Mask:
    """Return the inputs of a program that its used outputs need."""
    return inputs_read(_with_outputs(prog, tuple(used)))


def _with_outputs(prog: Program, used: Mask) -> Program:
    """Return the program that computes only the used outputs of `prog`. Cached on `prog`."""
    equations = live(prog.equations, gather(prog.outputs, used))
    if all(used) and len(equations) == len(prog.equations):
        return prog
    key = "with_outputs", used
    if key not in prog.cache:
        outputs = tuple(gather(prog.outputs, used))
        prog.cache[key] = Program(prog.inputs, prog.consts, equations, outputs)
    return prog.cache[key]


def live(
    equations: Sequence[JaxprEqn],
    wanted: Iterable[Any],
    known: Container[Var] = (),
    effects: bool = True,
) -> tuple[JaxprEqn, ...]:
    """Return the equations that are needed to compute `wanted` values from `known` values.

    They keep their order. With `effects`, equations with effects are included too.
    """
    needed = {v for v in wanted if isinstance(v, Var) and v not in known}
    found: list[JaxprEqn] = []
    for eqn in reversed(equations):
        if (effects and has_effects(eqn)) or not needed.isdisjoint(eqn.outvars):
            found.append(eqn)
            needed.update(v for v in eqn.invars if isinstance(v, Var) and v not in known)
    return tuple(reversed(found))
