"""Propagate sets of input elements through a program, equation by equation.

The rule of most primitives states its dependence: the elements of the operands on which each
element of a result depends. If a rule states none, the derivative of the equation is traced, and
the sets are propagated through that program. It is the push (the program of the output tangents)
or, if the equation has none, the pullback (the program of the operands' cotangents). The pattern of
the pullback is transposed. If neither exists, each element of a result counts as depending on all
elements of all operands. Calls are inlined first; `nested` handles loops and branches.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from xform._jax import JaxprEqn, Primitive, Var, cotangent_aval, tangent_aval
from xform.errors import MissingRule, NotDifferentiable, UnsupportedParam
from xform.interpret.jvp import push
from xform.interpret.node import Structured
from xform.passes.inline import inlined, underived_body
from xform.policies import save_everything
from xform.program.arithmetic import differentiable
from xform.program.dimensions import shape
from xform.program.flow import Flow
from xform.program.ir import Mask, Program, bind, context, gather, lift_constants, spread, trace
from xform.registry.table import Rule, flow_of, rule_of
from xform.registry.words import Composite
from xform.sparse.known import KnownValues, OperandFacts, active_equations, dependence_of
from xform.sparse.sets import Sets, elementwise_union, gather_elements, input_sets, to_matrix
from xform.sparse.steps import MaybeSets, depends_on_all, propagate
from xform.transforms.reverse import immediate_vjp

# A derivative may contain the same primitive again. It is followed this many levels deep.
_LEVELS = 2
# Returns the sets of the results of a loop or branch, given the sets of its operands.
NestedHandler = Callable[
    ["SetPropagator", JaxprEqn, Flow, MaybeSets, OperandFacts], list[Sets | None]
]


class SetPropagator:
    """Propagates sets through programs.

    Args:
      nested: the function that handles loops and branches.
    """

    def __init__(self, nested: NestedHandler):
        self._nested = nested
        self._levels: collections.Counter[Primitive] = collections.Counter()

    def follow(self, prog: Program, sets: MaybeSets, values: Sequence[Any]) -> list[Sets | None]:
        """Return the sets of the outputs; None for an output that depends on no input element.

        Args:
          prog: the program.
          sets: the sets of its inputs; None for an input that depends on no input element.
          values: the values of its inputs; None for unknown values.
        """
        return self.run(prog, sets, values, False)[0]

    def run(self, prog: Program, sets: MaybeSets, values: Sequence[Any], outputs: bool = True
            ) -> tuple[list[Sets | None], list[Any]]:  # fmt: skip
        """Return the sets of the outputs, as `follow` does, and the known values of the outputs.

        If `outputs` is False, all these values are None.
        """
        prog = inlined(prog, underived_body)
        mask = tuple(x is not None for x in sets)
        equations = active_equations(prog, mask)
        facts, known = KnownValues(prog, values).facts(equations, outputs)
        env = {v: x for v, x in zip(prog.inputs, sets, strict=True) if x is not None}
        for eqn, _ in equations:
            operands = [env.get(v) if isinstance(v, Var) else None for v in eqn.invars]
            if any(x is not None for x in operands):
                results = zip(
                    eqn.outvars, self._results_of(eqn, operands, facts[id(eqn)]), strict=True
                )
                env.update((v, y) for v, y in results if y is not None and _depends(v, y))
        return [env.get(v) if isinstance(v, Var) else None for v in prog.outputs], known

    def _results_of(self, eqn: JaxprEqn, sets: MaybeSets, facts: OperandFacts) -> list[Sets | None]:
        """Return the sets of an equation's results, given the sets of its operands."""
        flow = flow_of(eqn)
        if flow is not None and not flow.is_call:
            return self._nested(self, eqn, flow, sets, facts)
        rule = rule_of(eqn.primitive)
        if rule is None:
            return depends_on_all(eqn, sets)
        dependence = dependence_of(rule)
        if dependence is not None:
            return propagate(eqn, dependence, sets, facts)
        if not isinstance(rule, Composite | Structured) or self._levels[eqn.primitive] >= _LEVELS:
            return depends_on_all(eqn, sets)
        self._levels[eqn.primitive] += 1
        try:
            return self._through_derivative(rule, eqn, sets, facts)
        finally:
            self._levels[eqn.primitive] -= 1

    def _through_derivative(
        self, rule: Rule, eqn: JaxprEqn, sets: MaybeSets, facts: OperandFacts
    ) -> list[Sets | None]:
        """Return the sets of the results, found in the program of the operation's derivative.

        This is its push (the tangents of the results) or, if it has none, its pullback.
        """
        active = tuple(x is not None for x in sets)
        try:
            prog, has_tangent = _push_program(rule, eqn, active)
        except (NotDifferentiable, UnsupportedParam):
            return self._through_pullback(eqn, sets, facts, active)
        except MissingRule:
            return depends_on_all(eqn, sets)
        inputs = [*[None] * len(sets), *gather(sets, active)]
        values = [*facts.values, *[None] * sum(active)]
        return spread(self._follow_with_constants(prog, inputs, values), has_tangent)

    def _through_pullback(
        self, eqn: JaxprEqn, sets: MaybeSets, facts: OperandFacts, active: Mask
    ) -> list[Sets | None]:
        """Return the sets of the results, found by transposing the pattern of the pullback.

        The pullback maps cotangents of the results to cotangents of the operands. So its pattern
        has a column for each element of a result, and a row for each element of an operand.
        """
        try:
            prog, has_cotangent, wanted = _pullback_program(eqn, active)
        except (NotDifferentiable, UnsupportedParam, MissingRule):
            return depends_on_all(eqn, sets)
        outputs = gather(eqn.outvars, wanted)
        starts = np.cumsum([0, *(int(np.prod(shape(v))) for v in outputs)])
        width = int(starts[-1])
        cotangents = [input_sets(shape(v), int(start), width)
                      for v, start in zip(outputs, starts, strict=False)]  # fmt: skip
        inputs = [*[None] * len(sets), *cotangents]
        values = [*facts.values, *[None] * len(cotangents)]
        found = self._follow_with_constants(prog, inputs, values)
        parts: list[list[Sets]] = [[] for _ in outputs]
        for x, ct in zip(sets, spread(found, has_cotangent), strict=True):
            if x is None or ct is None:
                continue
            transposed = to_matrix(ct).T.tocsr()
            for one, v, a, b in zip(parts, outputs, starts[:-1], starts[1:], strict=True):
                rows = transposed[a:b]
                one.append(gather_elements(x, (rows.indptr, rows.indices), shape(v)))
        return spread([elementwise_union(one) if one else None for one in parts], wanted)

    def _follow_with_constants(
        self, prog: Program, sets: MaybeSets, values: Sequence[Any]
    ) -> list[Sets | None]:
        """Return the sets of the outputs of a newly traced program. Its constants are known."""
        prog, consts = lift_constants(prog)
        return self.follow(prog, [*[None] * len(consts), *sets], [*consts, *values])


def _depends(v: Var, y: Sets) -> bool:
    """Return whether any element of `v` depends on an input element. Integers never do."""
    return differentiable(v.aval) and bool(y.ids.any())


def _push_program(rule: Any, eqn: JaxprEqn, active: Mask) -> tuple[Program, Mask]:
    """Trace the push of an equation, as a program.

    Its inputs are the operands, then the tangents of the active operands. Its outputs are the
    tangents of the results. Also returns which results have a tangent.
    """
    has_tangent: list[bool] = []

    def run(*args: Any) -> list[Any]:
        xs, dxs = args[: len(active)], spread(args[len(active) :], active)
        with context(eqn):
            _, dys = push(rule, eqn, xs, dxs, (True,) * len(eqn.outvars), False)
        has_tangent[:] = [dy is not None for dy in dys]
        return gather(dys, tuple(has_tangent))

    avals = [v.aval for v in eqn.invars]
    prog = trace(run, *avals, *map(tangent_aval, gather(avals, active)))
    return prog, tuple(has_tangent)


def _pullback_program(eqn: JaxprEqn, active: Mask) -> tuple[Program, Mask, Mask]:
    """Trace the pullback of an equation, as a program.

    Its inputs are the operands, then the cotangents of the results. Its outputs are the cotangents
    of the operands. Also returns which operands and which results have a cotangent.
    """
    wanted = tuple(differentiable(v.aval) for v in eqn.outvars)
    has_cotangent: list[bool] = []

    def run(*args: Any) -> list[Any]:
        xs, output_cts = args[: len(active)], list(args[len(active) :])

        def of_active(*active_xs: Any) -> list[Any]:
            remaining = iter(active_xs)
            operands = [next(remaining) if is_active else x
                        for is_active, x in zip(active, xs, strict=True)]  # fmt: skip
            return gather(bind(eqn, operands), wanted)

        _, pull = immediate_vjp(of_active, *gather(xs, active), policy=save_everything)
        cts = spread(pull(output_cts), active)
        has_cotangent[:] = [ct is not None and differentiable(jax.typeof(ct)) for ct in cts]
        return gather(cts, tuple(has_cotangent))

    output_cts = [cotangent_aval(v.aval) for v in gather(eqn.outvars, wanted)]
    prog = trace(run, *[v.aval for v in eqn.invars], *output_cts)
    return prog, tuple(has_cotangent), wanted
