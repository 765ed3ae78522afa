"""A program: the sets of its outputs from those of its inputs, equation by equation.

Calls are opened. Loops and branches have files of their own (`nested`). A primitive whose rule says
nothing of elements is followed through the derivative that its rule makes: its push as a program of
tangents, or else its pullback, turned round. What even that does not tell is dense.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from xform._jax import JaxprEqn, Primitive, Var, cotangent_aval, tangent_aval
from xform.arithmetic import differentiable
from xform.cost import shape
from xform.errors import MissingRule, NotDifferentiable, UnsupportedParam
from xform.interpret.jvp import push
from xform.interpret.node import Structured
from xform.ir import Mask, Program, bind, gather, lifted, spread, trace
from xform.passes.inline import opened
from xform.passes.structured import body
from xform.policies import save_everything
from xform.sparse import sets as S
from xform.sparse.known import Facts, Known, active_equations, reach_of
from xform.sparse.sets import Sets
from xform.sparse.steps import Some, dense, step
from xform.table import Rule, rule_of, traits
from xform.transforms.reverse import vjp
from xform.words import Composite

# A derivative that needs the primitive itself, at so many levels, tells nothing more.
_LEVELS = 2
Nested = Callable[["Walk", JaxprEqn, Some, Facts], list[Sets | None]]


class Walk:
    """One way through programs.

    Args:
      nested: what to do with equations that are loops and branches, by their primitives.
    """

    def __init__(self, nested: dict[Primitive, Nested]):
        self._nested = nested
        self._within: collections.Counter[Primitive] = collections.Counter()

    def follow(self, prog: Program, sets: Some, values: Sequence[Any]) -> list[Sets | None]:
        """The sets of the outputs; None for those of which no element depends on an input.

        Args:
          prog: the program.
          sets: those of its inputs; None likewise.
          values: its inputs, where they are known; None for others.
        """
        return self.run(prog, sets, values, False)[0]

    def run(self, prog: Program, sets: Some, values: Sequence[Any], outputs: bool = True
            ) -> tuple[list[Sets | None], list[Any]]:  # fmt: skip
        """The same, and those of the outputs' values that are known."""
        prog = flat(prog)
        mask = tuple(x is not None for x in sets)
        equations = active_equations(prog, mask)
        facts, known = Known(prog, values).ask(equations, outputs)
        env = {v: x for v, x in zip(prog.inputs, sets, strict=True) if x is not None}
        for eqn, _ in equations:
            here = [env.get(v) if isinstance(v, Var) else None for v in eqn.invars]
            if any(x is not None for x in here):
                found = self._equation(eqn, here, facts[id(eqn)])
                ys = zip(eqn.outvars, found, strict=True)
                env.update((v, y) for v, y in ys if y is not None and _some(v, y))
        ends = [env.get(v) if isinstance(v, Var) else None for v in prog.outputs]
        return ends, known

    def _equation(self, eqn: JaxprEqn, sets: Some, facts: Facts) -> list[Sets | None]:
        if eqn.primitive in self._nested:
            return self._nested[eqn.primitive](self, eqn, sets, facts)
        rule = rule_of(eqn.primitive)
        if rule is None:
            return dense(eqn, sets)
        reach = reach_of(rule)
        if reach is not None:
            return step(eqn, reach, sets, facts)
        if not isinstance(rule, Composite | Structured) or self._within[eqn.primitive] >= _LEVELS:
            return dense(eqn, sets)
        self._within[eqn.primitive] += 1
        try:
            return self._derived(rule, eqn, sets, facts)
        finally:
            self._within[eqn.primitive] -= 1

    def _derived(self, rule: Rule, eqn: JaxprEqn, sets: Some, facts: Facts) -> list[Sets | None]:
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

    def _pulled(self, eqn: JaxprEqn, sets: Some, facts: Facts, on: Mask) -> list[Sets | None]:
        """By the pullback: the outputs are its inputs, and the pattern is turned round."""
        try:
            prog, there, wanted = _pullback(eqn, on)
        except (NotDifferentiable, UnsupportedParam, MissingRule):
            return dense(eqn, sets)
        ends = gather(eqn.outvars, wanted)
        starts = np.cumsum([0, *(int(np.prod(shape(v))) for v in ends)])
        width = int(starts[-1])
        seeds = [S.inputs(shape(v), int(at), width) for v, at in zip(ends, starts, strict=False)]
        inputs = [*[None] * len(sets), *seeds]
        values = [*facts.values, *[None] * len(seeds)]
        back = spread(self.follow(*_lifted(prog, inputs, values)), there)
        seen: list[list[Sets]] = [[] for _ in ends]
        for x, ct in zip(sets, back, strict=True):
            if x is None or ct is None:
                continue
            turned = S.rows(ct).T.tocsr()
            for found, v, a, b in zip(seen, ends, starts[:-1], starts[1:], strict=True):
                part = turned[a:b]
                found.append(S.paired(x, (part.indptr, part.indices), shape(v)))
        return spread([S.either(found) if found else None for found in seen], wanted)


def _some(v: Var, y: Sets) -> bool:
    """Whether any element depends on an input; an integer does on none."""
    return differentiable(v.aval) and bool(y.ids.any())


def flat(prog: Program) -> Program:
    """The program with its calls opened, remat regions and marks too."""
    if "opened" not in prog.cache:
        prog.cache["opened"] = opened(prog, opens)
    return prog.cache["opened"]


def opens(eqn: JaxprEqn) -> Program | None:
    """What a call stands for, where it means nothing but its body to a derivative."""
    known = traits(eqn.primitive)
    return body(eqn) if known.call and known.calls != "custom" else None


def _lifted(prog: Program, sets: Some, values: Sequence[Any]):
    """A program without constants that belong to a trace, and what goes into it."""
    whole, consts = lifted(prog)
    return whole, [*[None] * len(consts), *sets], [*consts, *values]


def _pushed(rule: Any, eqn: JaxprEqn, on: Mask) -> tuple[Program, Mask]:
    """The tangents of an equation's outputs, from its inputs and those of their tangents."""
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
    """The cotangents of an equation's inputs, from those inputs and those of its outputs."""
    wanted = tuple(differentiable(v.aval) for v in eqn.outvars)
    there: list[bool] = []

    def run(*args: Any) -> list[Any]:
        xs, cts = args[: len(on)], list(args[len(on) :])

        def of(*active: Any) -> list[Any]:
            moving = iter(active)
            whole = [next(moving) if o else x for o, x in zip(on, xs, strict=True)]
            return gather(bind(eqn, whole), wanted)

        _, pull = vjp(of, *gather(xs, on), policy=save_everything)
        back = spread(pull(cts), on)
        there[:] = [ct is not None and differentiable(jax.typeof(ct)) for ct in back]
        return gather(back, tuple(there))

    ends = [cotangent_aval(v.aval) for v in gather(eqn.outvars, wanted)]
    prog = trace(run, *[v.aval for v in eqn.invars], *ends)
    return prog, tuple(there), wanted
