"""How functions with custom derivative rules run in slices.

A function with a `custom_jvp` rule needs a rule that runs in the same slices. With a `custom_vjp`
rule, its forward and its backward function need to. The function and its backward function may
return sums over the slices: the cotangent of an input that every slice reads in full is such a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from xform._jax import (
    JaxprEqn,
    cotangent_aval,
    custom_jvp_call_p,
    custom_vjp_call_p,
    has_effects,
    tangent_aval,
)
from xform.interpret.absent import remove_markers
from xform.interpret.cost import aval_bytes
from xform.interpret.pullback import RULE_RETURNED_NONE
from xform.passes.structured import called_body
from xform.program.arithmetic import differentiable, instantiate
from xform.program.ir import Program, gather, spread, trace
from xform.rules.user_rules import pull_by_rule, push_by_rule
from xform.slices.bodies import Axes, Bodies, BodySlices, FindBodySlices, by_position
from xform.slices.opened import opened

# The programs of a `custom_vjp`: its forward function, which returns outputs and residuals, and its
# backward function. That takes residuals and the cotangents of differentiable outputs, and returns
# the cotangents of differentiable inputs.
VjpPrograms = tuple[Program, Program]


def largest_inside(eqn: JaxprEqn) -> int:
    """Return the bytes of the largest value that a function with a custom rule computes.

    It is 0 for any other equation.
    """
    if eqn.primitive not in (custom_jvp_call_p, custom_vjp_call_p):
        return 0
    body = opened(called_body(eqn))
    if "largest value" not in body.cache:
        sizes = [aval_bytes(y.aval) for e in body.equations for y in e.outvars]
        inner = map(largest_inside, body.equations)
        body.cache["largest value"] = max([*sizes, *inner], default=0)
    return body.cache["largest value"]


def differentiable_values(variables: Sequence[Any]) -> tuple[bool, ...]:
    """Return which variables may have a tangent."""
    return tuple(differentiable(v.aval) for v in variables)


def custom_jvp(eqn: JaxprEqn, operands: Axes, results: Axes, find: FindBodySlices
               ) -> Bodies | None:  # fmt: skip
    """Slice a function with a `custom_jvp` rule, and its rule, along the same axes."""
    body = opened(called_body(eqn))
    found = find(body, operands, results)
    text = str(eqn.params["call_jaxpr"])
    if found is None or text in find.rules:
        return found and Bodies(found.slicing, ((body, found),))
    if (rule := _rule_program(eqn)) is None:
        return None
    both = lambda axes, variables: (*axes, *gather(axes, differentiable_values(variables)))
    ins, outs = both(found.inputs, eqn.invars), both(found.outputs, eqn.outvars)
    of_rule = find.within(text)(rule, by_position(ins), by_position(outs))
    if of_rule is None or (of_rule.inputs, of_rule.outputs) != (ins, outs):
        return None
    return Bodies(found.slicing, ((body, found), (rule, of_rule)))


def _rule_program(eqn: JaxprEqn) -> Program | None:
    """Return the rule of a `custom_jvp` as a program.

    It takes the primals and the tangents of all differentiable inputs, and returns the same for the
    outputs. None if the rule fails: it raises again where its derivative is needed.
    """

    def make() -> Program:
        _, rule = eqn.primitive.get_bind_params(eqn.params)["subfuns"]
        n, on = len(eqn.invars), differentiable_values(eqn.invars)
        outs = differentiable_values(eqn.outvars)

        def run(*values: Any) -> list[Any]:
            dxs = spread(values[n:], on)
            ys, dys = push_by_rule(rule.call_wrapped, eqn.params["symbolic_zeros"], values[:n], dxs)
            return [*ys, *gather(instantiate(dys, eqn.outvars), outs)]

        avals = [v.aval for v in eqn.invars]
        return opened(trace(run, *avals, *map(tangent_aval, gather(avals, on))))

    return _once(eqn, make)


def _once(eqn: JaxprEqn, make: Callable[[], Any]) -> Any:
    """Return what `make` returns for the rule of an equation, from a cache; None if it fails."""
    cache = called_body(eqn).cache
    if "slices of rule" not in cache:
        try:
            cache["slices of rule"] = make()
        except Exception:  # whatever a user's rule raises
            cache["slices of rule"] = None
    return cache["slices of rule"]


def custom_vjp(eqn: JaxprEqn, operands: Axes, results: Axes, find: FindBodySlices
               ) -> Bodies | None:  # fmt: skip
    """Slice a function with a `custom_vjp` rule, and both functions of its rule.

    Each output is sliced, or it is a sum over the slices.
    """
    body = opened(called_body(eqn))
    found = find.summing()(body, operands, results)
    if found is None or not _every_slice_counts(found):
        return None
    text = str(eqn.params["call_jaxpr"])
    if text in find.rules:
        return Bodies(found.slicing, ((body, found),))
    if (programs := _vjp_programs(eqn)) is None:
        return None
    rules = _rule_slices(eqn, programs, found, find.within(text))
    return rules and Bodies(found.slicing, ((body, found), *zip(programs, rules, strict=True)))


def _every_slice_counts(found: BodySlices) -> bool:
    """Return whether each output is sliced or is a sum. Any other is the same in each slice."""
    pairs = zip(found.outputs, found.sums, strict=True)
    return all(axis is not None or is_sum for axis, is_sum in pairs)


def _rule_slices(eqn: JaxprEqn, programs: VjpPrograms, found: BodySlices, find: FindBodySlices
                 ) -> tuple[BodySlices, BodySlices] | None:  # fmt: skip
    """Return how the functions of a `custom_vjp` rule run in the slices of the function."""
    (forward, backward), n = programs, len(eqn.outvars)
    find = find.summing()
    of_forward = find(forward, by_position(found.inputs), by_position(found.outputs))
    if of_forward is None or of_forward.inputs != found.inputs:
        return None
    if (of_forward.outputs[:n], of_forward.sums[:n]) != (found.outputs, found.sums):
        return None
    if any(of_forward.sums[n:]):  # the backward function would need the complete sum
        return None
    ins = *of_forward.outputs[n:], *gather(found.outputs, differentiable_values(eqn.outvars))
    outs = gather(found.inputs, differentiable_values(eqn.invars))
    of_backward = find(backward, by_position(ins), by_position(outs))
    if of_backward is None or (of_backward.inputs, of_backward.outputs) != (ins, tuple(outs)):
        return None
    return of_forward, of_backward


def _vjp_programs(eqn: JaxprEqn) -> VjpPrograms | None:
    """Return the functions of a `custom_vjp` rule as programs.

    None if one of them fails, has side effects, takes symbolic zeros, or returns a cotangent of
    another type than the input, or if the function closes over a differentiable value.
    """
    on = differentiable_values(eqn.invars)
    if eqn.params["symbolic_zeros"] or any(on[: eqn.params["num_consts"]]):
        return None

    def make() -> VjpPrograms | None:
        _, fwd, bwd = eqn.primitive.get_bind_params(eqn.params)["subfuns"]
        outs = differentiable_values(eqn.outvars)
        pulls: list[Callable[..., list[Any]]] = []

        def forward(*xs: Any) -> list[Any]:
            ys, residuals, pull = pull_by_rule(fwd, bwd, eqn.params["out_trees"], False, xs, on)
            pulls[:] = [pull]
            return [*ys, *residuals]

        def backward(*values: Any) -> list[Any]:
            n = len(values) - sum(outs)
            cts = pulls[0](values[:n], spread(values[n:], outs))
            known = [None if ct is RULE_RETURNED_NONE else ct for ct in cts]
            return gather(instantiate(known, eqn.invars, kind=cotangent_aval), on)

        of_forward = trace(forward, *(v.aval for v in eqn.invars))
        residuals = of_forward.outputs[len(eqn.outvars) :]
        cts = [cotangent_aval(v.aval) for v in gather(eqn.outvars, outs)]
        of_backward, *_ = remove_markers(trace(backward, *(v.aval for v in residuals), *cts))
        programs = opened(of_forward), opened(of_backward)
        kind = lambda aval: (aval.shape, aval.dtype)
        wanted = [kind(cotangent_aval(v.aval)) for v in gather(eqn.invars, on)]
        if [kind(v.aval) for v in of_backward.outputs] != wanted:
            return None
        effects = any(has_effects(e) for prog in programs for e in prog.equations)
        return None if effects else programs

    return _once(eqn, make)
