"""How calls, loops and branches run in slices: the axis passes through their bodies.

A body runs in slices if each of its equations does, without a sum over the axis: a sum in a body
would be needed there before it is complete. A loop also needs the same axis in its carried values
before and after an iteration, and its condition may not depend on a sliced value. A function with
a `custom_jvp` rule needs a rule that runs in the same slices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from xform._jax import (
    JaxprEqn,
    Var,
    cond_p,
    custom_jvp_call_p,
    scan_counts,
    scan_p,
    tangent_aval,
    while_p,
)
from xform.passes.structured import called_body
from xform.program.arithmetic import differentiable, instantiate
from xform.program.ir import Program, gather, program, spread, trace
from xform.registry.table import traits
from xform.rules.custom import push_by_rule
from xform.slices.opened import opened
from xform.slices.slicing import SlicedAxis, Slicing

# Axes by position, of inputs or of outputs.
Axes = Mapping[int, int]


class BodySlices(NamedTuple):
    """How a body runs in slices.

    Attributes:
      axes: the axis of each sliced variable.
      members: how each equation that computes sliced values runs, by its position.
      inputs, outputs: the axes of the inputs and outputs.
    """

    axes: dict[Var, int]
    members: dict[int, Slicing]
    inputs: tuple[SlicedAxis, ...]
    outputs: tuple[SlicedAxis, ...]


class FindBodySlices(NamedTuple):
    """Finds how bodies run in slices.

    Attributes:
      find: returns how a body runs in slices if some inputs and outputs are sliced; None if it
        cannot. It takes `rules` as its last argument.
      rules: the texts of the functions with custom rules whose rules are being sliced. A rule may
        call its own function: in its rule, that function is taken to run in slices.
    """

    find: Callable[[Program, Axes, Axes, frozenset[str]], BodySlices | None]
    rules: frozenset[str] = frozenset()

    def __call__(self, body: Program, inputs: Axes, outputs: Axes) -> BodySlices | None:
        """Return how a body runs in slices."""
        return self.find(body, inputs, outputs, self.rules)

    def within(self, rule: str) -> FindBodySlices:
        """Return the same for the program of a rule."""
        return self._replace(rules=self.rules | {rule})


class Bodies(NamedTuple):
    """How an equation with bodies runs in slices, and each of its bodies, as (program, slices)."""

    slicing: Slicing
    parts: tuple[tuple[Program, BodySlices], ...]


def has_body(eqn: JaxprEqn) -> bool:
    """Return whether an equation runs a program in a way that this file knows."""
    return eqn.primitive in (scan_p, while_p, cond_p, custom_jvp_call_p)


def runs_unknown_body(eqn: JaxprEqn) -> bool:
    """Return whether an equation is a call, or the like, that is never sliced."""
    return bool(traits(eqn.primitive).call) and not has_body(eqn)


def nested_slicing(eqn: JaxprEqn, operands: Axes, results: Axes, find: FindBodySlices
                   ) -> Bodies | None:  # fmt: skip
    """Return how an equation with bodies runs if some operands and results are sliced.

    The returned slicing may slice more operands and results than those. None: it cannot run so.
    """
    if eqn.primitive is scan_p:
        return _scan(eqn, operands, results, find)
    if eqn.primitive is while_p:
        return _while(eqn, operands, results, find)
    if eqn.primitive is cond_p:
        return _cond(eqn, operands, results, find)
    return _custom_jvp(eqn, operands, results, find)


def by_position(axes: Sequence[SlicedAxis]) -> dict[int, int]:
    """Return the axes that are not None, by position."""
    return {k: axis for k, axis in enumerate(axes) if axis is not None}


def differentiable_values(variables: Sequence[Any]) -> tuple[bool, ...]:
    """Return which variables may have a tangent."""
    return tuple(differentiable(v.aval) for v in variables)


def rule_program(eqn: JaxprEqn) -> Program | None:
    """Return the rule of a `custom_jvp` as a program.

    It takes the primals and the tangents of all differentiable inputs, and returns the same for the
    outputs. None if the rule fails: it raises again where its derivative is needed.
    """
    cache = called_body(eqn).cache
    if "slices of rule" not in cache:
        _, rule = eqn.primitive.get_bind_params(eqn.params)["subfuns"]
        n, on = len(eqn.invars), differentiable_values(eqn.invars)
        outs = differentiable_values(eqn.outvars)

        def run(*values: Any) -> list[Any]:
            dxs = spread(values[n:], on)
            ys, dys = push_by_rule(rule.call_wrapped, eqn.params["symbolic_zeros"], values[:n], dxs)
            return [*ys, *gather(instantiate(dys, eqn.outvars), outs)]

        avals = [v.aval for v in eqn.invars]
        try:
            cache["slices of rule"] = trace(run, *avals, *map(tangent_aval, gather(avals, on)))
        except Exception:  # whatever a user's rule raises
            cache["slices of rule"] = None
    return cache["slices of rule"]


def _custom_jvp(eqn: JaxprEqn, operands: Axes, results: Axes, find: FindBodySlices
                ) -> Bodies | None:  # fmt: skip
    """Slice a function with a `custom_jvp` rule, and its rule, along the same axes."""
    body = opened(called_body(eqn))
    found = find(body, operands, results)
    text = str(eqn.params["call_jaxpr"])
    if found is None or text in find.rules:
        return found and Bodies(Slicing(found.inputs, found.outputs), ((body, found),))
    if (rule := rule_program(eqn)) is None:
        return None
    rule = opened(rule)
    both = lambda axes, variables: (*axes, *gather(axes, differentiable_values(variables)))
    ins, outs = both(found.inputs, eqn.invars), both(found.outputs, eqn.outvars)
    of_rule = find.within(text)(rule, by_position(ins), by_position(outs))
    if of_rule is None or (of_rule.inputs, of_rule.outputs) != (ins, outs):
        return None
    return Bodies(Slicing(found.inputs, found.outputs), ((body, found), (rule, of_rule)))


def _scan(eqn: JaxprEqn, operands: Axes, results: Axes, find: FindBodySlices) -> Bodies | None:
    """Slice a scan along an axis that its body keeps. The scanned axis itself is never sliced."""
    consts, carried = scan_counts(eqn.params)
    first = consts + carried
    if any(axis == 0 for k, axis in operands.items() if k >= first):
        return None
    if any(axis == 0 for k, axis in results.items() if k >= carried):
        return None
    ins = {k: axis - (k >= first) for k, axis in operands.items()}
    outs = {k: axis - (k >= carried) for k, axis in results.items()}
    body = opened(program(eqn.params["jaxpr"]))
    found = _loop(body, ins, outs, consts, carried, find)
    if found is None:
        return None
    raised = lambda axes, start: tuple(
        axis if axis is None or k < start else axis + 1 for k, axis in enumerate(axes)
    )
    slicing = Slicing(raised(found.inputs, first), raised(found.outputs, carried))
    return Bodies(slicing, ((body, found),))


def _while(eqn: JaxprEqn, operands: Axes, results: Axes, find: FindBodySlices) -> Bodies | None:
    """Slice a while loop whose condition reads no sliced value."""
    n, m = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    if any(k < n for k in operands):
        return None
    body, condition = (opened(program(eqn.params[k])) for k in ("body_jaxpr", "cond_jaxpr"))
    ins = {k - n: axis for k, axis in operands.items()}
    found = _loop(body, ins, results, m, len(eqn.outvars), find)
    if found is None:
        return None
    states = {n + k: axis for k, axis in by_position(found.inputs[m:]).items()}
    of_condition = find(condition, states, {})
    if of_condition is None or of_condition.members:
        return None
    slicing = Slicing(((None,) * n + found.inputs), found.outputs)
    return Bodies(slicing, ((body, found), (condition, of_condition)))


def _loop(body: Program, ins: Axes, outs: Axes, consts: int, carried: int, find: FindBodySlices
          ) -> BodySlices | None:  # fmt: skip
    """Return how the body of a loop runs in slices, with equal axes for carried values."""
    ins, outs = dict(ins), dict(outs)
    for _ in range(2 * carried + 1):
        found = find(body, ins, outs)
        if found is None:
            return None
        before, after = found.inputs[consts : consts + carried], found.outputs[:carried]
        if before == after:
            return found
        for k, (a, b) in enumerate(zip(before, after, strict=True)):
            if a is not None:
                outs[k] = a
            if b is not None:
                ins[consts + k] = b
    return None


def _cond(eqn: JaxprEqn, operands: Axes, results: Axes, find: FindBodySlices) -> Bodies | None:
    """Slice a conditional whose index is not sliced, with equal axes in all branches."""
    if 0 in operands:
        return None
    branches = [opened(program(b)) for b in eqn.params["branches"]]
    ins, outs = {k - 1: axis for k, axis in operands.items()}, dict(results)
    for _ in range(len(eqn.invars) + len(eqn.outvars)):
        found = [find(b, ins, outs) for b in branches]
        known = [f for f in found if f is not None]
        if len(known) < len(branches):
            return None
        if len({(f.inputs, f.outputs) for f in known}) == 1:
            slicing = Slicing((None, *known[0].inputs), known[0].outputs)
            return Bodies(slicing, tuple(zip(branches, known, strict=True)))
        for f in known:
            ins |= by_position(f.inputs)
            outs |= by_position(f.outputs)
    return None
