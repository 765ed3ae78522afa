"""Dead code elimination: drop equations whose results nothing reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Sequence
from typing import Any, ClassVar

from xform._jax import JaxprEqn, Var, has_effects, scan_counts, scan_p, while_p
from xform.passes.base import Pass
from xform.passes.builder import Builder
from xform.passes.structured import bodies, inputs_read, rebuild_equation
from xform.program.ir import Mask, Program, gather


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
        need = {v for v in prog.outputs if isinstance(v, Var)}
        kept: list[JaxprEqn | tuple[JaxprEqn, Program, Mask]] = []
        for eqn in reversed(prog.equations):
            if not has_effects(eqn) and not any(v in need for v in eqn.outvars):
                continue
            pruned = self._pruned(eqn, tuple(v in need for v in eqn.outvars))
            kept.append(eqn if pruned is None else (eqn, *pruned))
            reading = (True,) * len(eqn.invars) if pruned is None else inputs_read(pruned[0])
            need.update(v for v in gather(eqn.invars, reading) if isinstance(v, Var))
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

    def _pruned(self, eqn: JaxprEqn, used: Mask) -> tuple[Program, Mask] | None:
        """An equation as a program without its unused outputs, and the mask of outputs left.

        The nested equations that make the unused outputs are dropped. None if nothing is dropped.
        """
        old = bodies(eqn)
        condition: Mask = ()
        if eqn.primitive is scan_p:
            nc, nk = scan_counts(eqn.params)
            used = _carried(used, nk, old[0], nc)
        elif eqn.primitive is while_p:
            a, b = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
            until = inputs_read(old[0])[a:]
            used = tuple(u or c for u, c in zip(used, until, strict=True))
            used, condition = _carried(used, len(used), old[1], b), (True,)
        masks = (condition, used) if condition else (used,) * len(old)
        new = [self.program(_only(p, m)) for p, m in zip(old, masks, strict=True)]
        if all(n is p for n, p in zip(new, old, strict=True)):
            return None
        replacement = rebuild_equation(eqn, new, used)
        return None if replacement is None else (replacement, used)


def _carried(used: Mask, n: int, steps: Program, first: int) -> Mask:
    """The outputs of a loop that are used, or that a used output needs in a later iteration.

    `steps` is the body. It carries `n` values, from input number `first` on.
    """
    while True:
        read = inputs_read(_only(steps, used))[first : first + n]
        more = (*(u or r for u, r in zip(used[:n], read, strict=True)), *used[n:])
        if more == used:
            return used
        used = more


def _only(prog: Program, used: Mask) -> Program:
    """The program that makes some of the outputs. Cached on the program."""
    equations = live(prog.equations, gather(prog.outputs, used))
    if all(used) and len(equations) == len(prog.equations):
        return prog
    key = "only", used
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
    """Return the equations, in order, that compute `wanted` values from `known` values.

    With `effects`, equations with effects are included too.
    """
    need = {v for v in wanted if isinstance(v, Var) and v not in known}
    alive: list[JaxprEqn] = []
    for eqn in reversed(equations):
        if (effects and has_effects(eqn)) or not need.isdisjoint(eqn.outvars):
            alive.append(eqn)
            need.update(v for v in eqn.invars if isinstance(v, Var) and v not in known)
    return tuple(reversed(alive))
