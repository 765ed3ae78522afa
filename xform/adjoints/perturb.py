"""Evaluation of a program with perturbations added to some values, or with some values returned.

If the value is inside a loop, branch or call, that equation is rebuilt by the JAX function that
made it, with one more input for each perturbation and one more output for each returned value. In a
loop these are stacked over the iterations. A branch that does not run returns zeros.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
from jax import lax

from xform._jax import JaxprEqn, Var, scan_counts, zeros
from xform.adjoints.sites import Path, bodies, kind, level
from xform.errors import NotDifferentiable
from xform.passes.structured import chosen_sharding
from xform.program.arithmetic import Value, differentiable
from xform.program.equation import scan_options, switch
from xform.program.ir import Program, bind, environment, read, trace, write
from xform.program.source import frame, name_stack, source
from xform.rules.call import remat_region_of as region

Values = dict[int, Value]


@jax.custom_jvp
def add_perturbation(x: Value, by: Value) -> Value:
    """Return `x`, with derivative one with respect to both `x` and `by`.

    This differentiates like `x + by`, for a perturbation `by` that is zero.
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
      path: the nested program that holds the equation.
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


def run(prog: Program, args: Sequence[Value], edits: Sequence[ProgramEdit], by: Values,
        names: frozenset[str]) -> tuple[list[Value], Values]:  # fmt: skip
    """Evaluate a program under some edits.

    Args:
      prog: the program. Paths and positions refer to it after `level(prog, names)`, which inlines
        the calls that hold one of the names.
      args: inputs of the program.
      edits: the values to perturb or to return.
      by: the perturbations, by key.
      names: the names that the user asked for.

    Returns:
      The outputs of the program, and the values returned by "cut" edits, by key.
    """
    prog = level(prog, names)
    by_equation: dict[int, list[ProgramEdit]] = collections.defaultdict(list)
    for m in edits:
        by_equation[m.path[0][0] if m.path else m.index].append(m)
    env = environment(prog, args)
    cut_values: Values = {}
    outer = name_stack()
    for i, eqn in enumerate(prog.equations):
        own = [m for m in by_equation.get(i, ()) if not m.path]
        inner = [m for m in by_equation.get(i, ()) if m.path]
        xs = _read(prog, env, eqn.invars, own, by)
        if inner:
            with source(eqn, outer), eqn.ctx.manager:
                used = {m.key: by[m.key] for m in inner if m.key in by}
                ys, inner_values = _REBUILD[kind(eqn)](eqn, xs, inner, used, names)
            cut_values |= inner_values
        else:
            ys = bind(eqn, xs, outer)
        if own:
            ys = [_apply_edits(ys[0], own, by, cut_values), *ys[1:]]
        write(env, eqn.outvars, ys)
    at_outputs = [m for m in by_equation.get(len(prog.equations), ()) if not m.path]
    return _read(prog, env, prog.outputs, at_outputs, by), cut_values


def _read(prog: Program, env: dict[Var, Value], atoms: Sequence[Any], edits: Sequence[ProgramEdit],
          by: Values) -> list[Value]:  # fmt: skip
    values = [read(env, v) for v in atoms]
    for m in edits:
        if m.action == "read":
            v = prog.equations[m.producer].outvars[0]
            values = [add_perturbation(x, by[m.key]) if a is v else x
                      for a, x in zip(atoms, values, strict=True)]  # fmt: skip
    return values


def _apply_edits(y: Value, edits: Sequence[ProgramEdit], by: Values, cut_values: Values) -> Value:
    """Return the value to use in place of `y`, and record `y` in `cut_values` if it is cut."""
    for m in edits:
        if m.action == "cut":
            cut_values[m.key] = y
    if any(m.action == "cut" for m in edits):
        y = lax.stop_gradient(y)
    for m in edits:
        if m.action == "perturb":
            y = add_perturbation(y, by[m.key])
    return y


def _inside(edits: Sequence[ProgramEdit], k: int) -> list[ProgramEdit]:
    """Return the edits in program number `k` of an equation, with paths relative to it."""
    return [dataclasses.replace(m, path=m.path[1:]) for m in edits if m.path[0][1] == k]


Evaluated = tuple[list[Value], Values]  # outputs of an equation, and cut values inside it


def _scan(eqn: JaxprEqn, xs: Sequence[Value], edits: Sequence[ProgramEdit], by: Values,
          names: frozenset[str]) -> Evaluated:  # fmt: skip
    (steps,), (nc, nk) = bodies(eqn), scan_counts(eqn.params)
    consts, start, seq = list(xs[:nc]), list(xs[nc : nc + nk]), list(xs[nc + nk :])
    own = _inside(edits, 0)

    def step(carry: list[Value], x: Any) -> tuple[list[Value], Any]:
        ys, cut_values = run(steps, [*consts, *carry, *x[0]], own, x[1], names)
        return ys[:nk], (ys[nk:], cut_values)

    carry, (ys, cut_values) = lax.scan(step, start, (seq, by), **scan_options(eqn.params))
    return [*carry, *ys], cut_values


def _branch(eqn: JaxprEqn, xs: Sequence[Value], edits: Sequence[ProgramEdit], by: Values,
            names: frozenset[str]) -> Evaluated:  # fmt: skip
    index, *operands = xs

    def branch(k: int, prog: Program) -> Callable[..., Evaluated]:
        return lambda xs, by: run(prog, xs, _inside(edits, k), by, names)

    runs = [branch(k, prog) for k, prog in enumerate(bodies(eqn))]
    types: dict[int, Any] = {}
    for k, f in enumerate(runs):
        keys = sorted(m.key for m in _inside(edits, k) if m.action == "cut")
        cuts = trace(lambda *xs, f=f, keys=keys: [f(xs, by)[1][key] for key in keys], *operands)
        types |= dict(zip(keys, cuts.out_avals, strict=True))

    def with_zeros(f: Callable[..., Evaluated]) -> Callable[..., Evaluated]:
        """Make a branch also return zeros for the cut values of the other branches."""

        def run_one(xs: list[Value], by: Values) -> Evaluated:
            ys, own = f(xs, by)
            return ys, {k: own[k] if k in own else zeros(t) for k, t in types.items()}

        return run_one

    return switch(eqn.params, index, list(map(with_zeros, runs)), operands, by)


def _call(eqn: JaxprEqn, xs: Sequence[Value], edits: Sequence[ProgramEdit], by: Values,
          names: frozenset[str]) -> Evaluated:  # fmt: skip
    """Rebuild a jitted call that has input or output shardings."""
    where = ([chosen_sharding(s) for s in eqn.params[f"{end}_shardings"]] for end in ("in", "out"))
    ins, outs = ((w, None) for w in where)
    f = lambda xs, by: run(bodies(eqn)[0], xs, _inside(edits, 0), by, names)
    return jax.jit(f, in_shardings=ins, out_shardings=outs)(list(xs), by)


def _region(eqn: JaxprEqn, xs: Sequence[Value], edits: Sequence[ProgramEdit], by: Values,
            names: frozenset[str]) -> Evaluated:  # fmt: skip
    own = _inside(edits, 0)
    if eqn.params["differentiated"]:  # JAX lowers such a region with an optimization barrier
        return run(bodies(eqn)[0], lax.optimization_barrier(list(xs)), own, by, names)
    trees: list[Any] = []
    leaves, tree = jax.tree.flatten((list(xs), by))

    def flat(*leaves: Value) -> list[Value]:
        xs, by = tree.unflatten(leaves)
        results, out_tree = jax.tree.flatten(run(bodies(eqn)[0], xs, own, by, names))
        trees.append(out_tree)
        return results

    prevent = eqn.params["prevent_cse"]
    jaxpr = jax.make_jaxpr(flat)(*map(jax.typeof, leaves))
    prevent_cse = prevent if isinstance(prevent, bool) else True
    return trees[0].unflatten(region(jaxpr, leaves, eqn.params["policy"], prevent_cse))


def _custom(eqn: JaxprEqn, xs: Sequence[Value], edits: Sequence[ProgramEdit], by: Values,
            names: frozenset[str]) -> Evaluated:  # fmt: skip
    """Evaluate a call of a function with a custom derivative.

    The derivative with respect to the inputs is the custom rule. The derivative with respect to a
    value inside is that of the function's body.
    """
    if any(m.action == "cut" for m in edits):
        raise NotDifferentiable(
            "partials with `via` at a value inside a function with a custom derivative",
            "the custom rule does not tell which part of the gradient passes through that value",
            frame(eqn),
            "name an argument or the result of the function instead",
        )
    stopped = [lax.stop_gradient(x) for x in xs]
    inner, _ = run(bodies(eqn)[0], stopped, _inside(edits, 0), by, names)
    pairs = zip(bind(eqn, xs), inner, strict=True)
    return [add_perturbation(y, z) if differentiable(jax.typeof(y)) else y for y, z in pairs], {}


_REBUILD: dict[str, Callable[..., Evaluated]] = {
    "scan": _scan, "branch": _branch, "call": _call, "region": _region, "custom": _custom,
}  # fmt: skip
