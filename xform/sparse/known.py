"""Known values in a program: constants, and values computed from constants alone.

They make a sparsity pattern smaller: a known index selects one element. And where the partial
derivative in an operand (its *slope*) is known to be zero, the result does not depend on that
operand. If the sparsity at a given point is wanted, the inputs are known too, and so are all
values. All needed values of a program are computed in one call, which runs only the necessary
equations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jax import lax

from xform._jax import JaxprEqn, Literal, Tracer, Var, jit
from xform._jax.effects import uses_named_axis
from xform.errors import NotDifferentiable
from xform.program.arithmetic import differentiable, scale
from xform.program.arrays import filled
from xform.program.ir import (
    Atom,
    Mask,
    Program,
    apply,
    bind,
    context,
    environment,
    gather,
    read,
    spread,
)
from xform.program.source import name_stack
from xform.registry.dependence import Dependence, Elementwise
from xform.registry.repeatable import repeatable
from xform.registry.table import Rule, rule_of, traits
from xform.registry.words import Bilinear, Pointwise

Values = Sequence[Any]
# An equation and the position of one of its operands.
EquationOperand = tuple[JaxprEqn, int]


def dependence_of(rule: Rule) -> Dependence | None:
    """Return on which elements of the operands each element of a result depends; None if unknown.

    The rule of the primitive states it. A pointwise rule that states nothing counts as
    `Elementwise`.
    """
    stated = rule.traits.dependence
    return Elementwise() if stated is None and isinstance(rule, Pointwise) else stated


@dataclasses.dataclass(frozen=True)
class OperandFacts:
    """Known facts about an equation's operands.

    Attributes:
      values: for each operand its value, if the value is known and the dependence needs it, such as
        an index; else None.
      slopes: for each operand a mask, True where the partial derivative may be nonzero; None: it
        may be nonzero everywhere.
    """

    values: list[Any]
    slopes: list[np.ndarray | None]


class KnownValues:
    """The known values of a program, given the values of its inputs (None if unknown)."""

    def __init__(self, prog: Program, inputs: Values):
        self._prog = prog
        self._inputs = {v: x for v, x in zip(prog.inputs, inputs, strict=True) if x is not None}
        self._inputs |= {v: x for v, x in prog.consts if not isinstance(x, Tracer)}
        self._known: set[Any] = set(self._inputs)
        for eqn in prog.equations:
            if all(map(self.is_known, eqn.invars)) and _can_run(eqn):
                self._known.update(eqn.outvars)

    def is_known(self, v: Atom) -> bool:
        """Return whether a variable or literal is known."""
        return isinstance(v, Literal) or v in self._known

    def facts(self, active: Sequence[tuple[JaxprEqn, Mask]], outputs: bool
              ) -> tuple[dict[int, OperandFacts], list[Any]]:  # fmt: skip
        """Return the facts for each equation of `active`, by `id`, and the values of the outputs.

        `active` pairs equations with masks of their active operands: the operands that depend on an
        input element. The value of an output is None if it is unknown, or if `outputs` is False.
        """
        operands = {id(eqn): self._operands_needed(eqn) for eqn, _ in active}
        known_outputs = [v for v in self._prog.outputs if outputs and self.is_known(v)]
        atoms = (v for vs in (*operands.values(), known_outputs) for v in vs)
        wanted = dict.fromkeys(v for v in atoms if isinstance(v, Var))
        sloped = [(eqn, i) for eqn, mask in active for i in self._operands_with_slopes(eqn, mask)]
        computed, slopes = self._compute(list(wanted), sloped)
        value = lambda v: v.val if isinstance(v, Literal) else computed.get(v)
        facts: dict[int, OperandFacts] = {}
        for eqn, _ in active:
            needed = set(map(id, operands[id(eqn)]))
            values = [value(v) if id(v) in needed else None for v in eqn.invars]
            operand_slopes = [slopes.get((id(eqn), i)) for i in range(len(eqn.invars))]
            facts[id(eqn)] = OperandFacts(values, operand_slopes)
        return facts, [
            value(v) if outputs and self.is_known(v) else None for v in self._prog.outputs
        ]

    def _operands_needed(self, eqn: JaxprEqn) -> list[Atom]:
        """Return the known operands whose values the equation's dependence needs."""
        rule = rule_of(eqn.primitive)
        dependence = None if rule is None else dependence_of(rule)
        if isinstance(dependence, Elementwise):
            return []
        needed = eqn.invars if dependence is None else eqn.invars[slice(*dependence.reads)]
        return [v for v in needed if self.is_known(v)]

    def _operands_with_slopes(self, eqn: JaxprEqn, active: Mask) -> Iterator[int]:
        """Yield the positions of the active operands with a known partial derivative."""
        rule = rule_of(eqn.primitive)
        if (
            len(eqn.outvars) != 1
            or rule is None
            or not isinstance(dependence_of(rule), Elementwise)
        ):
            return
        known = list(map(self.is_known, eqn.invars))
        for i, is_active in enumerate(active):
            if not is_active:
                continue
            if isinstance(rule, Bilinear) and known[1 - i]:
                other = eqn.invars[1 - i]
                if not (isinstance(other, Literal) and np.all(other.val != 0)):
                    yield i
            elif isinstance(rule, Pointwise) and all(known):
                yield i

    def _compute(self, wanted: Sequence[Var], sloped: Sequence[EquationOperand]
                 ) -> tuple[dict[Var, Any], dict[tuple[int, int], np.ndarray]]:  # fmt: skip
        """Return the values of the `wanted` variables, and the slopes of the `sloped` operands.

        The key of a slope is the `id` of its equation and the position of the operand.
        """
        if not wanted and not sloped:
            return {}, {}
        given = {v: _to_numpy(self._inputs[v]) for v in wanted if v in self._inputs}
        to_compute = [v for v in wanted if v not in given]
        needed: set[Any] = {*to_compute}
        for eqn, _ in sloped:
            atoms = (*eqn.invars, *eqn.outvars)
            needed |= {v for v in atoms if isinstance(v, Var) and self.is_known(v)}
        known = [e for e in self._prog.equations
                 if all(map(self.is_known, e.outvars)) and e.outvars]  # fmt: skip
        equations: list[JaxprEqn] = []
        for eqn in reversed(known):
            if any(v in needed for v in eqn.outvars):
                equations.append(eqn)
                needed |= {v for v in eqn.invars if isinstance(v, Var)}
        inputs = [v for v in self._inputs if v in needed]
        args = [self._inputs[v] for v in inputs]
        run = self._compiled(args, inputs, equations[::-1], to_compute, sloped)
        values, slopes = run(args)
        computed = zip(to_compute, map(_to_numpy, values), strict=True)
        pairs = zip(sloped, slopes, strict=True)
        return {**given, **dict(computed)}, {
            (id(eqn), i): np.asarray(slope) for (eqn, i), slope in pairs if slope is not None
        }

    def _compiled(self, args: list[Any], inputs: Sequence[Var], equations: Sequence[JaxprEqn],
                  wanted: Sequence[Var], sloped: Sequence[EquationOperand]
                  ) -> Callable[..., Any]:  # fmt: skip
        """Return the compiled function that computes the wanted values and the slopes.

        It is cached on the program, because all iterations of a loop call it again. Since it is
        compiled, it returns numbers even if it is called inside another trace.
        """
        key = ("known", tuple(inputs), tuple(wanted), tuple((id(e), i) for e, i in sloped))
        if key not in self._prog.cache:
            prog = Program(tuple(inputs), (), tuple(equations), tuple(wanted))

            def run(args: list[Any]) -> tuple[list[Any], list[Any]]:
                env, outer = environment(prog, args), name_stack()
                for eqn in equations:
                    values = bind(eqn, [read(env, v) for v in eqn.invars], outer)
                    env.update(zip(eqn.outvars, values, strict=True))
                slopes: list[Any] = []
                for eqn, i in sloped:
                    with context(eqn):
                        slopes.append(_slope_mask(eqn, i, env))
                return [env[v] for v in wanted], slopes

            self._prog.cache[key] = jit(run).lower(args).compile()
        return self._prog.cache[key]


def _to_numpy(x: Any) -> Any:
    """Convert an array to NumPy, unless it has an extended dtype."""
    return np.asarray(x) if isinstance(getattr(x, "dtype", None), np.dtype) else x


def _can_run(eqn: JaxprEqn) -> bool:
    """Return whether an equation may run during the analysis.

    Equations whose next run could give other values may not, and neither may callbacks and
    transfers. Equations that use the axes of a `shard_map` cannot run outside it.
    """
    return repeatable(eqn) and not uses_named_axis(eqn) and not traits(eqn.primitive).foreign


def _slope_mask(eqn: JaxprEqn, i: int, env: dict[Var, Any]) -> Any:
    """Return where the partial derivative in operand `i` is nonzero, as a mask; None if unknown."""
    rule: Any = rule_of(eqn.primitive)
    (out,), operand = eqn.outvars, eqn.invars[i]
    if isinstance(rule, Bilinear):
        # The derivative of a product in one operand is the product with ones in its place.
        xs: list[Any] = spread([read(env, eqn.invars[1 - i])], (i == 1, i == 0))
        xs[i] = filled(operand.aval, 1)
        (slope,) = apply(eqn, xs)
    else:
        xs = [read(env, v) for v in eqn.invars]
        try:
            partial = rule.call(rule.formulas[i], eqn, env[out], *xs)
        except NotDifferentiable:
            return None
        slope = scale(filled(out.aval, 1), partial)
    return lax.ne(slope, lax.full_like(slope, 0))


def active_equations(prog: Program, active: Mask) -> list[tuple[JaxprEqn, Mask]]:
    """Return the equations that depend on an active input, with masks of their active operands."""
    active_vars: set[Any] = set(gather(prog.inputs, active))
    equations: list[tuple[JaxprEqn, Mask]] = []
    for eqn in prog.equations:
        mask = tuple(isinstance(v, Var) and v in active_vars for v in eqn.invars)
        rule = rule_of(eqn.primitive)
        if any(mask) and not (rule is not None and rule.word == "constant"):
            equations.append((eqn, mask))
            active_vars.update(v for v in eqn.outvars if differentiable(v.aval))
    return equations
