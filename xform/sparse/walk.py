"""Propagate sets of input elements through a program, equation by equation.

Calls are inlined; `nested` handles loops and branches. If the rule of a primitive has no
dependence, the sets go through its derivative instead: through the program of its push or, failing
that, through its pullback, whose pattern is transposed. If neither exists, all outputs depend on
all operands.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from xform._jax import JaxprEqn, Primitive, Var, cotangent_aval, tangent_aval
from xform.errors import MissingRule, NotDifferentiable, UnsupportedParam
from xform.interpret.cost import shape
from xform.interpret.jvp import push
from xform.interpret.node import Structured
from xform.passes.inline import inline_bodies
from xform.passes.structured import called_body
from xform.policies import save_everything
from xform.program.arithmetic import differentiable
from xform.program.ir import Mask, Program, bind, gather, lift_constants, spread, trace
from xform.registry.table import Rule, rule_of, traits
from xform.registry.words import Composite
from xform.sparse import sets as S
from xform.sparse.known import Facts, KnownValues, active_equations, dependence_of
from xform.sparse.sets import Sets
from xform.sparse.steps import MaybeSets, dense, step
from xform.transforms.reverse import vjp

# How deeply the derivative of a primitive is followed if it contains the same primitive.
_LEVELS = 2
Nested = Callable[["SetPropagator", JaxprEqn, MaybeSets, Facts], list[Sets | None]]


class SetPropagator:
    """Propagates sets through programs.

    Args:
      nested: functions that handle loops and branches, by primitive.
    """

    def __init__(self, nested: dict[Primitive, Nested]):
        self._nested = nested
        self._within: collections.Counter[Primitive] = collections.Counter()

    def follow(self, prog: Program, sets: MaybeSets, values: Sequence[Any]) -> list[Sets | None]:
        """The sets of the outputs; None for an output that depends on no input element.

        Args:
          prog: the program.
          sets: the sets of its inputs; None likewise.
          values: the values of its inputs; None for unknown values.
        """
        return self.run(prog, sets, values, False)[0]

    def run(self, prog: Program, sets: MaybeSets, values: Sequence[Any], outputs: bool = True
            ) -> tuple[list[Sets | None], list[Any]]:  # fmt: skip
        """Like `follow`; also returns the known values of the outputs, if `outputs`."""
        prog = flat(prog)
        mask = tuple(x is not None for x in sets)
        equations = active_equations(prog, mask)
        facts, known = KnownValues(prog, values).ask(equations, outputs)
        env = {v: x for v, x in zip(prog.inputs, sets, strict=True) if x is not None}
        for eqn, _ in equations:
            here = [env.get(v) if isinstance(v, Var) else None for v in eqn.invars]
            if any(x is not None for x in here):
                found = self._equation(eqn, here, facts[id(eqn)])
                ys = zip(eqn.outvars, found, strict=True)
                env.update((v, y) for v, y in ys if y is not None and _depends(v, y))
        ends = [env.get(v) if isinstance(v, Var) else None for v in prog.outputs]
        return ends, known

    def _equation(self, eqn: JaxprEqn, sets: MaybeSets, facts: Facts) -> list[Sets | None]:
        if eqn.primitive in self._nested:
            return self._nested[eqn.primitive](self, eqn, sets, facts)
        rule = rule_of(eqn.primitive)
        if rule is None:
            return dense(eqn, sets)
        dependence = dependence_of(rule)
        if dependence is not None:
            return step(eqn, dependence, sets, facts)
        if not isinstance(rule, Composite | Structured) or self._within[eqn.primitive] >= _LEVELS:
            return dense(eqn, sets)
        self._within[eqn.primitive] += 1
        try:
            return self._derived(rule, eqn, sets, facts)
        finally:
            self._within[eqn.primitive] -= 1

    def _derived(
        self, rule: Rule, eqn: JaxprEqn, sets: MaybeSets, facts: Facts
    ) -> list[Sets | None]:
        """The sets by the program of the push, or else by the pullback; see the module."""
        on = tuple(x is not None for x in sets)
        try:
            prog, moving = _pushed(rule, eqn, on)
        except (NotDifferentiable, UnsupportedParam):
            return self._pulled(eqn, sets, facts, on)
        except MissingRule:
            return dense(eqn, sets)
        inputs = [*[None] * len(sets), *gather(sets, on)]
        values = [*facts.values, *[None] * sum(on)]
        return spread(self.follow(*_lifted(prog, inputs, values)), moving)

    def _pulled(self, eqn: JaxprEqn, sets: MaybeSets, facts: Facts, on: Mask) -> list[Sets | None]:
        """The sets by the pullback: its inputs are the outputs, so its pattern is transposed."""
        try:
            prog, has_cotangent, wanted = _pullback(eqn, on)
        except (NotDifferentiable, UnsupportedParam, MissingRule):
            return dense(eqn, sets)
        ends = gather(eqn.outvars, wanted)
        starts = np.cumsum([0, *(int(np.prod(shape(v))) for v in ends)])
        width = int(starts[-1])
        seeds = [S.inputs(shape(v), int(at), width) for v, at in zip(ends, starts, strict=False)]
        inputs = [*[None] * len(sets), *seeds]
        values = [*facts.values, *[None] * len(seeds)]
        back = spread(self.follow(*_lifted(prog, inputs, values)), has_cotangent)
        seen: list[list[Sets]] = [[] for _ in ends]
        for x, ct in zip(sets, back, strict=True):
            if x is None or ct is None:
                continue
            transposed = S.rows(ct).T.tocsr()
            for found, v, a, b in zip(seen, ends, starts[:-1], starts[1:], strict=True):
                part = transposed[a:b]
                found.append(S.paired(x, (part.indptr, part.indices), shape(v)))
        return spread([S.either(found) if found else None for found in seen], wanted)


def _depends(v: Var, y: Sets) -> bool:
    """Whether any element depends on an input element. Integers do not."""
    return differentiable(v.aval) and bool(y.ids.any())


def flat(prog: Program) -> Program:
    """The program with all calls inlined, including remat regions and marks."""
    if "opened" not in prog.cache:
        prog.cache["opened"] = inline_bodies(prog, opens)
    return prog.cache["opened"]


def opens(eqn: JaxprEqn) -> Program | None:
    """The body of a call; None if the equation is not a call or has a custom derivative."""
    known = traits(eqn.primitive)
    return called_body(eqn) if known.call and known.calls != "custom" else None


def _lifted(prog: Program, sets: MaybeSets, values: Sequence[Any]):
    """The arguments of `follow` for a program with its constants as leading inputs."""
    prog, consts = lift_constants(prog)
    return prog, [*[None] * len(consts), *sets], [*consts, *values]


def _pushed(rule: Any, eqn: JaxprEqn, on: Mask) -> tuple[Program, Mask]:
    """The program `(inputs, tangents at `on`) -> output tangents`, and which outputs have one."""
    moving: list[bool] = []

    def run(*args: Any) -> list[Any]:
        xs, dxs = args[: len(on)], spread(args[len(on) :], on)
        with eqn.ctx.manager:
            _, dys = push(rule, eqn, xs, dxs, (True,) * len(eqn.outvars), False)
        moving[:] = [dy is not None for dy in dys]
        return gather(dys, tuple(moving))

    avals = [v.aval for v in eqn.invars]
    prog = trace(run, *avals, *map(tangent_aval, gather(avals, on)))
    return prog, tuple(moving)


def _pullback(eqn: JaxprEqn, on: Mask) -> tuple[Program, Mask, Mask]:
    """The program `(inputs, output cotangents) -> input cotangents`.

    Also returns which inputs and which outputs have a cotangent.
    """
    wanted = tuple(differentiable(v.aval) for v in eqn.outvars)
    has_cotangent: list[bool] = []

    def run(*args: Any) -> list[Any]:
        xs, cts = args[: len(on)], list(args[len(on) :])

        def of(*active: Any) -> list[Any]:
            rest = iter(active)
            inputs = [next(rest) if o else x for o, x in zip(on, xs, strict=True)]
            return gather(bind(eqn, inputs), wanted)

        _, pull = vjp(of, *gather(xs, on), policy=save_everything)
        back = spread(pull(cts), on)
        has_cotangent[:] = [ct is not None and differentiable(jax.typeof(ct)) for ct in back]
        return gather(back, tuple(has_cotangent))

    ends = [cotangent_aval(v.aval) for v in gather(eqn.outvars, wanted)]
    prog = trace(run, *[v.aval for v in eqn.invars], *ends)
    return prog, tuple(has_cotangent), wanted
