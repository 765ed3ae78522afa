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

from xform._jax import JaxprEqn, Var, jit, scan_counts
from xform.adjoints.sites import Path, bodies, inline_named_calls, kind
from xform.errors import NotDifferentiable
from xform.passes.structured import chosen_sharding
from xform.program.arithmetic import Value, differentiable
from xform.program.arrays import zeros
from xform.program.equation import context, scan_like, switch
from xform.program.ir import Program, bind, environment, read, trace, write
from xform.program.source import frame, name_stack, source
from xform.rules.call import remat_region_of

# Perturbations, or returned values, by the key of their edit.
ValuesByKey = dict[int, Value]


@jax.custom_jvp
def add_perturbation(x: Value, perturbation: Value) -> Value:
    """Return `x`, with derivative one with respect to both `x` and `perturbation`.

    This differentiates like `x + perturbation`, for a perturbation that is zero.
    """
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
                ys, nested_values = _REBUILD[kind(eqn)](eqn, xs, nested, used, names)
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


# The outputs of an equation, and the values that are cut inside it. Each function below rebuilds an
# equation that holds nested programs, under edits in these programs.
Evaluated = tuple[list[Value], ValuesByKey]


def _scan(eqn: JaxprEqn, xs: Sequence[Value], edits: Sequence[ProgramEdit],
          perturbations: ValuesByKey, names: frozenset[str]) -> Evaluated:  # fmt: skip
    (body,), (num_consts, num_carry) = bodies(eqn), scan_counts(eqn.params)
    first_scanned = num_consts + num_carry
    consts, start = list(xs[:num_consts]), list(xs[num_consts:first_scanned])
    body_edits = _edits_inside(edits, 0)

    def iteration(carry: list[Value], slices: Any) -> tuple[list[Value], Any]:
        scanned, perturbations = slices
        inputs = [*consts, *carry, *scanned]
        ys, cut_values = run_edited(body, inputs, body_edits, perturbations, names)
        return ys[:num_carry], (ys[num_carry:], cut_values)

    scanned = list(xs[first_scanned:]), perturbations
    carry, (ys, cut_values) = scan_like(eqn.params, iteration, start, scanned)
    return [*carry, *ys], cut_values


def _branch(eqn: JaxprEqn, xs: Sequence[Value], edits: Sequence[ProgramEdit],
            perturbations: ValuesByKey, names: frozenset[str]) -> Evaluated:  # fmt: skip
    index, *operands = xs

    def edited_branch(k: int, prog: Program) -> Callable[..., Evaluated]:
        branch_edits = _edits_inside(edits, k)
        return lambda xs, perturbations: run_edited(prog, xs, branch_edits, perturbations, names)

    branches = [edited_branch(k, prog) for k, prog in enumerate(bodies(eqn))]
    types: dict[int, Any] = {}  # of all cut values, by key
    for k, branch in enumerate(branches):
        keys = sorted(edit.key for edit in _edits_inside(edits, k) if edit.action == "cut")
        cut_values = lambda *xs, branch=branch: branch(xs, perturbations)[1]
        cuts = trace(lambda *xs, of=cut_values, keys=keys: [of(*xs)[k] for k in keys], *operands)
        types |= dict(zip(keys, cuts.out_avals, strict=True))

    def with_zeros(branch: Callable[..., Evaluated]) -> Callable[..., Evaluated]:
        """Make a branch also return zeros for the cut values of the other branches."""

        def run_branch(xs: list[Value], perturbations: ValuesByKey) -> Evaluated:
            ys, own = branch(xs, perturbations)
            return ys, {key: own[key] if key in own else zeros(t) for key, t in types.items()}

        return run_branch

    return switch(eqn.params, index, list(map(with_zeros, branches)), operands, perturbations)


def _call(eqn: JaxprEqn, xs: Sequence[Value], edits: Sequence[ProgramEdit],
          perturbations: ValuesByKey, names: frozenset[str]) -> Evaluated:  # fmt: skip
    """Rebuild a jitted call that has input or output shardings."""
    ins = [chosen_sharding(s) for s in eqn.params["in_shardings"]]
    outs = [chosen_sharding(s) for s in eqn.params["out_shardings"]]
    (body,), body_edits = bodies(eqn), _edits_inside(edits, 0)
    f = lambda xs, perturbations: run_edited(body, xs, body_edits, perturbations, names)
    call = jit(f, in_shardings=(ins, None), out_shardings=(outs, None))
    return call(list(xs), perturbations)


def _region(eqn: JaxprEqn, xs: Sequence[Value], edits: Sequence[ProgramEdit],
            perturbations: ValuesByKey, names: frozenset[str]) -> Evaluated:  # fmt: skip
    """Rebuild a remat region (`jax.checkpoint`) with its policy."""
    (body,), body_edits = bodies(eqn), _edits_inside(edits, 0)
    if eqn.params["differentiated"]:  # JAX lowers such a region with an optimization barrier
        inputs = lax.optimization_barrier(list(xs))
        return run_edited(body, inputs, body_edits, perturbations, names)
    out_trees: list[Any] = []
    leaves, tree = jax.tree.flatten((list(xs), perturbations))

    def of_leaves(*leaves: Value) -> list[Value]:
        xs, perturbations = tree.unflatten(leaves)
        evaluated = run_edited(body, xs, body_edits, perturbations, names)
        results, out_tree = jax.tree.flatten(evaluated)
        out_trees.append(out_tree)
        return results

    prevent = eqn.params["prevent_cse"]
    jaxpr = jax.make_jaxpr(of_leaves)(*map(jax.typeof, leaves))
    prevent_cse = prevent if isinstance(prevent, bool) else True
    outs = remat_region_of(jaxpr, leaves, eqn.params["policy"], prevent_cse)
    return out_trees[0].unflatten(outs)


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
    by_body, _ = run_edited(bodies(eqn)[0], stopped, body_edits, perturbations, names)
    pairs = zip(bind(eqn, xs), by_body, strict=True)
    return [add_perturbation(y, z) if differentiable(jax.typeof(y)) else y for y, z in pairs], {}


_REBUILD: dict[str, Callable[..., Evaluated]] = {
    "scan": _scan, "branch": _branch, "call": _call, "region": _region, "custom": _custom,
}  # fmt: skip
