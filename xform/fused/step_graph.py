"""Which equations of a step depend on which others."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

from xform._jax import JaxprEqn, Var, scan_counts, scan_p, while_p
from xform.fused.coupling import read_by_several
from xform.fused.fused_step import Step
from xform.fused.layer_axis import is_constraint, is_elementwise
from xform.program.dimensions import shape
from xform.steering.barrier import barrier_p


class Graph:
    """The equations of a traced step, and the dependence between them."""

    def __init__(self, step: Step):
        self.equations = (*step.gradient, *step.update)
        self.producer = {v: eqn for eqn in self.equations for v in eqn.outvars}
        self.position = {id(eqn): i for i, eqn in enumerate(self.equations)}
        self._step = step
        self._after: dict[int, set[Var]] = {}

    def is_update(self, eqn: JaxprEqn) -> bool:
        """Return whether an equation belongs to the update, not to the gradient."""
        return self.position[id(eqn)] >= len(self._step.gradient)

    def origin(self, v: Any) -> tuple[Any, tuple[JaxprEqn, ...]]:
        """Return the value that `v` is without barriers and sharding constraints.

        Also return these constraints, in order.
        """
        constraints: list[JaxprEqn] = []
        while isinstance(v, Var) and v in self._operand:
            eqn, operand = self._operand[v]
            constraints += [eqn] if eqn.primitive is not barrier_p else []
            v = operand
        return v, tuple(reversed(constraints))

    def in_order(self, equations: Iterable[JaxprEqn]) -> list[JaxprEqn]:
        """Return equations in the order of the step, each once."""
        positions = {self.position[id(eqn)] for eqn in equations}
        return [self.equations[i] for i in sorted(positions)]

    def after(self, eqn: JaxprEqn) -> set[Var]:
        """Return the values that depend on an equation, its own results included."""
        key = id(eqn)
        if key not in self._after:
            found = set[Var](eqn.outvars)
            for later in self.equations[self.position[key] + 1 :]:
                if any(isinstance(v, Var) and v in found for v in later.invars):
                    found.update(later.outvars)
            self._after[key] = found
        return self._after[key]

    def needed(self, wanted: Iterable[Any], known: set[Var] | None = None) -> list[JaxprEqn]:
        """Return the equations that compute `wanted` values from `known` ones, in order."""
        found: dict[int, JaxprEqn] = {}
        stack = [v for v in wanted if isinstance(v, Var)]
        while stack:
            v = stack.pop()
            eqn = self.producer.get(v)
            if eqn is None or id(eqn) in found or (known is not None and v in known):
                continue
            found[id(eqn)] = eqn
            stack += [x for x in eqn.invars if isinstance(x, Var)]
        return self.in_order(found.values())

    def region(self, wanted: Sequence[Var], after: set[Var]) -> list[JaxprEqn]:
        """Return the equations that compute `wanted` values from the results of a loop, in order.

        These are equations of the update, and equations of the gradient that depend on the loop or
        are elementwise. `after` are all values that depend on the loop. No loop is among them.
        """
        region: dict[int, JaxprEqn] = {}
        stack = list(wanted)
        while stack:
            eqn = self.producer.get(stack.pop())
            if eqn is None or id(eqn) in region:
                continue
            if eqn.primitive is scan_p and any(v in after for v in eqn.outvars):
                continue  # the loop, or one that depends on it, whose results nothing can slice
            after_loop = any(v in after for v in eqn.outvars)
            if self.is_update(eqn) or after_loop or is_elementwise(eqn):
                region[id(eqn)] = eqn
                stack += [v for v in eqn.invars if isinstance(v, Var)]
        return self.in_order(region.values())

    def comes_from_while(self, v: Any) -> bool:
        """Return whether a value is the result of a while loop, or elementwise operations on one.

        A backward loop that starts from stored states is a while loop.
        """
        seen, stack = set[int](), [v]
        while stack:
            eqn = self.producer.get(stack.pop())
            if eqn is None or id(eqn) in seen:
                continue
            seen.add(id(eqn))
            if eqn.primitive is while_p:
                return True
            same_shape = eqn.invars[:1] and shape(eqn.invars[0]) == shape(eqn.outvars[0])
            if is_elementwise(eqn) or same_shape:
                stack += [x for x in eqn.invars if isinstance(x, Var)]
        return False

    def last_loop(self, v: Any) -> JaxprEqn | None:
        """Return the last scan with stacked outputs that a value depends on directly.

        Directly means that no other scan lies between them. Without such a scan, return None.
        """
        position = self._last_loops.get(v)
        return None if position is None else self.equations[position]

    @functools.cached_property
    def _last_loops(self) -> dict[Var, int]:
        """For each value that depends directly on a scan, the position of the last such scan."""
        found: dict[Var, int] = {}
        for i, eqn in enumerate(self.equations):
            if eqn.primitive is scan_p:
                if len(eqn.outvars) > scan_counts(eqn.params)[1]:
                    found.update(dict.fromkeys(eqn.outvars, i))
                continue
            last = max((found.get(v, -1) for v in eqn.invars if isinstance(v, Var)), default=-1)
            if last >= 0:
                found.update(dict.fromkeys(eqn.outvars, last))
        return found

    def readers_of(self, v: Var) -> list[JaxprEqn]:
        """Return the equations that read a value, also behind barriers and sharding constraints.

        An output of the step needs each of them. The barriers and constraints are left out.
        """
        same = v, *(x for x in self._operand if self.origin(x)[0] is v)
        passing = {id(eqn) for eqn, operand in self._operand.values() if operand in same}
        several = [eqn for x in same for eqn in self._readers.get(x, ())]
        return [eqn for eqn in several if id(eqn) not in passing]

    @functools.cached_property
    def _operand(self) -> dict[Var, tuple[JaxprEqn, Any]]:
        """For each result of a barrier or a sharding constraint, the equation and the operand."""
        passing = (e for e in self.equations if e.primitive is barrier_p or is_constraint(e))
        return {y: (e, x) for e in passing for x, y in zip(e.invars, e.outvars, strict=False)}

    @functools.cached_property
    def _readers(self) -> dict[Var, list[JaxprEqn]]:
        """For each value, the equations that read it and that an output of the step needs."""
        found: dict[Var, list[JaxprEqn]] = {}
        for eqn in self.needed(self._step.outputs):
            for v in dict.fromkeys(v for v in eqn.invars if isinstance(v, Var)):
                found.setdefault(v, []).append(eqn)
        return found

    @functools.cached_property
    def read_by_several(self) -> dict[int, list[Var]]:
        """For each leaf, its values that an equation of several leaves reads."""
        return read_by_several(self._step)
