"""Evaluation of a program with perturbations added to some values, or with some values returned.

A perturbation is a zero; the gradient with respect to it is the gradient at the value. A returned
value is cut: derivatives stop there. If the value is inside a loop, branch or call, that equation
is rebuilt by the JAX function that made it, with one more input for each perturbation and one more
output for each returned value. In a loop these are stacked over the iterations. A branch that does
not run returns zeros.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
from jax import lax

from xform._jax import JaxprEqn, Var
from xform.adjoints.sites import Path, inline_named_calls
from xform.errors import NotDifferentiable
from xform.passes.structured import called_body
from xform.program.arithmetic import Value, differentiable
from xform.program.arrays import zeros
from xform.program.equation import context
from xform.program.flow import Flow
from xform.program.ir import Program, bind, environment, read, trace, write
from xform.program.source import frame, name_stack, source
from xform.registry.table import flow_of, rule_of, traits

# Perturbations, or returned values, by the key of their edit.
ValuesByKey = dict[int, Value]


@jax.custom_jvp
def add_perturbation(x: Value, perturbation: Value) -> Value:
    """Return `x`. The value of `perturbation` is ignored, and only its tangent is added."""
    return x


@add_perturbation.defjvp
def _(primals: tuple[Value, Value], tangents: tuple[Value, Value]) -> tuple[Value, Value]:
    return primals[0], tangents[0] + tangents[1]


@dataclasses.dataclass(frozen=True)
class ProgramEdit:
    """An instruction to perturb or to return one value.

    Attributes:
      key: number of the perturbation, or of the returned value.
      path: the nested program that holds the equation: for each level, the position of the equation
        that holds the program, and the number of the program among the programs of the equation.
      index: position of the equation in that program; the number of equations stands for the
        outputs of the program.
      action: "perturb": perturb the equation's result, for all its readers. "read": perturb the
        result of `producer` as this equation reads it, and for no other reader. "cut": return
        the equation's result, and stop derivatives there.
      producer: for "read", position of the equation that computes the value that is read.
    """

    key: int
    path: Path
    index: int
    action: Literal["perturb", "read", "cut"]
    producer: int = -1


def run_edited(
    prog: Program,
    args: Sequence[Value],
    edits: Sequence[ProgramEdit],
    perturbations: ValuesByKey,
    names: frozenset[str],
) -> tuple[list[Value], ValuesByKey]:
    """Evaluate a program under some edits.

    Args:
      prog: the program. Paths and positions refer to it after `inline_named_calls(prog, names)`,
        which inlines the calls that hold one of the names.
      args: inputs of the program.
      edits: the values to perturb or to return.
      perturbations: the perturbations, by key.
      names: the names that the user asked for.

    Returns:
      The outputs of the program, and the values returned by "cut" edits, by key.
    """
    prog = inline_named_calls(prog, names)
    by_equation: dict[int, list[ProgramEdit]] = collections.defaultdict(list)
    for edit in edits:
        by_equation[edit.path[0][0] if edit.path else edit.index].append(edit)
    env = environment(prog, args)
    cut_values: ValuesByKey = {}
    outer = name_stack()
    for i, eqn in enumerate(prog.equations):
        own = [edit for edit in by_equation.get(i, ()) if not edit.path]
        nested = [edit for edit in by_equation.get(i, ()) if edit.path]
        xs = _read_perturbed(prog, env, eqn.invars, own, perturbations)
        if nested:
            keys = [edit.key for edit in nested if edit.key in perturbations]
            with source(eqn, outer), context(eqn):
                used = {key: perturbations[key] for key in keys}
                ys, nested_values = _run_nested(eqn, xs, nested, used, names)
            cut_values |= nested_values
        else:
            ys = bind(eqn, xs, outer)
        if own:
            ys = [_edit_result(ys[0], own, perturbations, cut_values), *ys[1:]]
        write(env, eqn.outvars, ys)
    at_outputs = [edit for edit in by_equation.get(len(prog.equations), ()) if not edit.path]
    return _read_perturbed(prog, env, prog.outputs, at_outputs, perturbations), cut_values


def _read_perturbed(
    prog: Program,
    env: dict[Var, Value],
    atoms: Sequence[Any],
    edits: Sequence[ProgramEdit],
    perturbations: ValuesByKey,
) -> list[Value]:
    """Return the values of some variables and literals, perturbed by the "read" edits."""
    values = [read(env, v) for v in atoms]
    for edit in edits:
        if edit.action == "read":
            v = prog.equations[edit.producer].outvars[0]
            values = [add_perturbation(x, perturbations[edit.key]) if atom is v else x
                      for atom, x in zip(atoms, values, strict=True)]  # fmt: skip
    return values


def _edit_result(
    y: Value, edits: Sequence[ProgramEdit], perturbations: ValuesByKey, cut_values: ValuesByKey
) -> Value:
    """Return the value to use in place of `y`, and record `y` in `cut_values` if it is cut."""
    for edit in edits:
        if edit.action == "cut":
            cut_values[edit.key] = y
    if any(edit.action == "cut" for edit in edits):
        y = lax.stop_gradient(y)
    for edit in edits:
        if edit.action == "perturb":
            y = add_perturbation(y, perturbations[edit.key])
    return y


def _edits_inside(edits: Sequence[ProgramEdit], k: int) -> list[ProgramEdit]:
    """Return the edits in program number `k` of an equation, with paths relative to it."""
    return [dataclasses.replace(edit, path=edit.path[1:]) for edit in edits if edit.path[0][1] == k]


# The outputs of an equation, and the values that are cut inside it.
Evaluated = tuple[list[Value], ValuesByKey]


def _run_nested(eqn: JaxprEqn, xs: Sequence[Value], edits: Sequence[ProgramEdit],
                perturbations: ValuesByKey, names: frozenset[str]) -> Evaluated:  # fmt: skip
    """Evaluate an equation that holds nested programs, under edits in these programs."""
    if traits(eqn.primitive).calls == "custom":
        return _custom(eqn, xs, edits, perturbations, names)
    rule, flow = rule_of(eqn.primitive), flow_of(eqn)
    assert rule is not None
    assert flow is not None

    def edited(k: int, prog: Program) -> Callable[..., Evaluated]:
        own = _edits_inside(edits, k)
        return lambda xs, perturbations: run_edited(prog, xs, own, perturbations, names)

    functions = [edited(k, body.program) for k, body in enumerate(flow.bodies)]
    if flow.index is not None:
        functions = _with_equal_cuts(flow, functions, edits, perturbations)
    return rule.rebuild(eqn, xs, functions, perturbations)


def _with_equal_cuts(flow: Flow, branches: Sequence[Callable[..., Evaluated]],
                     edits: Sequence[ProgramEdit], perturbations: ValuesByKey
                     ) -> list[Callable[..., Evaluated]]:  # fmt: skip
    """Make each branch also return the cut values of the other branches, as zeros."""
    types: dict[int, Any] = {}  # of all cut values, by key
    for k, (body, branch) in enumerate(zip(flow.bodies, branches, strict=True)):
        keys = sorted(edit.key for edit in _edits_inside(edits, k) if edit.action == "cut")
        cut_values = lambda *xs, branch=branch: branch(xs, perturbations)[1]
        cuts = trace(lambda *xs, of=cut_values, keys=keys: [of(*xs)[k] for k in keys],
                     *body.program.in_types)  # fmt: skip
        types |= dict(zip(keys, cuts.out_avals, strict=True))

    def with_zeros(branch: Callable[..., Evaluated]) -> Callable[..., Evaluated]:
        def run_branch(xs: list[Value], perturbations: ValuesByKey) -> Evaluated:
            ys, own = branch(xs, perturbations)
            return ys, {key: own[key] if key in own else zeros(t) for key, t in types.items()}

        return run_branch

    return list(map(with_zeros, branches))


def _custom(eqn: JaxprEqn, xs: Sequence[Value], edits: Sequence[ProgramEdit],
            perturbations: ValuesByKey, names: frozenset[str]) -> Evaluated:  # fmt: skip
    """Evaluate a call of a function with a custom derivative.

    The derivative with respect to the inputs is the custom rule. The derivative with respect to a
    value inside the function is the derivative of the function's body.
    """
    if any(edit.action == "cut" for edit in edits):
        raise NotDifferentiable(
            "partials with `via` at a value inside a function with a custom derivative",
            "the custom rule does not tell which part of the gradient passes through that value",
            frame(eqn),
            "name an argument or the result of the function instead",
        )
    stopped = [lax.stop_gradient(x) for x in xs]
    body_edits = _edits_inside(edits, 0)
    by_body, _ = run_edited(called_body(eqn), stopped, body_edits, perturbations, names)
    pairs = zip(bind(eqn, xs), by_body, strict=True)
    return [add_perturbation(y, z) if differentiable(jax.typeof(y)) else y for y, z in pairs], {}
