"""A program run again with perturbations of some of its values, or with some of them returned.

Equations that hold such a value are made again by the function of JAX that made them, with one more
input (or output) for each: stacked in a loop, zeros from the branches that do not run.
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
from xform.arithmetic import Value, differentiable
from xform.equation import scan_options, switch
from xform.errors import NotDifferentiable
from xform.ir import Program, bind, environment, read, trace, write
from xform.passes.structured import sharding
from xform.rules.call import mark as region
from xform.source import frame, name_stack, source

Values = dict[int, Value]


@jax.custom_jvp
def perturbed(x: Value, by: Value) -> Value:
    """`x`, as if `by` had been added, which is zero: its derivative in both is one."""
    return x


@perturbed.defjvp
def _(primals: tuple[Value, Value], tangents: tuple[Value, Value]) -> tuple[Value, Value]:
    return primals[0], tangents[0] + tangents[1]


@dataclasses.dataclass(frozen=True)
class Mark:
    """What is done to a value.

    Attributes:
      key: the number of the perturbation, or of what is returned.
      path: where its program is.
      index: the place of an equation there, or behind the last.
      does: "perturb" what the equation makes; perturb what it "read"s, and no other equation does;
        or "cut": return what it makes, and let no derivative past it.
      of: the value that is read.
    """

    key: int
    path: Path
    index: int
    does: Literal["perturb", "read", "cut"]
    of: int = -1  # the place of the equation that makes it


def run(prog: Program, args: Sequence[Value], marks: Sequence[Mark], by: Values,
        names: frozenset[str]) -> tuple[list[Value], Values]:  # fmt: skip
    """Outputs of a program under some marks, and the values that are returned besides.

    Args:
      prog: the program; paths are those in it with the calls open that hold `names`.
      args: its inputs.
      marks: what is done.
      by: the perturbations, by key.
      names: those that are asked for.
    """
    prog = level(prog, names)
    here: dict[int, list[Mark]] = collections.defaultdict(list)
    for m in marks:
        here[m.path[0][0] if m.path else m.index].append(m)
    env = environment(prog, args)
    caught: Values = {}
    outer = name_stack()
    for i, eqn in enumerate(prog.equations):
        own = [m for m in here.get(i, ()) if not m.path]
        inner = [m for m in here.get(i, ()) if m.path]
        xs = _read(prog, env, eqn.invars, own, by)
        if inner:
            with source(eqn, outer), eqn.ctx.manager:
                used = {m.key: by[m.key] for m in inner if m.key in by}
                ys, more = _MAKERS[kind(eqn)](eqn, xs, inner, used, names)
            caught |= more
        else:
            ys = bind(eqn, xs, outer)
        if own:
            ys = [_made(ys[0], own, by, caught), *ys[1:]]
        write(env, eqn.outvars, ys)
    returned = [m for m in here.get(len(prog.equations), ()) if not m.path]
    return _read(prog, env, prog.outputs, returned, by), caught


def _read(prog: Program, env: dict[Var, Value], atoms: Sequence[Any], marks: Sequence[Mark],
          by: Values) -> list[Value]:  # fmt: skip
    values = [read(env, v) for v in atoms]
    for m in marks:
        if m.does == "read":
            v = prog.equations[m.of].outvars[0]
            values = [perturbed(x, by[m.key]) if a is v else x
                      for a, x in zip(atoms, values, strict=True)]  # fmt: skip
    return values


def _made(y: Value, marks: Sequence[Mark], by: Values, caught: Values) -> Value:
    """What stands for a value from there on."""
    for m in marks:
        if m.does == "cut":
            caught[m.key] = y
    if any(m.does == "cut" for m in marks):
        y = lax.stop_gradient(y)
    for m in marks:
        if m.does == "perturb":
            y = perturbed(y, by[m.key])
    return y


def _inside(marks: Sequence[Mark], k: int) -> list[Mark]:
    """The marks in one of the programs of an equation, as seen from within it."""
    return [dataclasses.replace(m, path=m.path[1:]) for m in marks if m.path[0][1] == k]


Made = tuple[list[Value], Values]


def _scan(eqn: JaxprEqn, xs: Sequence[Value], marks: Sequence[Mark], by: Values,
          names: frozenset[str]) -> Made:  # fmt: skip
    (steps,), (nc, nk) = bodies(eqn), scan_counts(eqn.params)
    consts, start, seq = list(xs[:nc]), list(xs[nc : nc + nk]), list(xs[nc + nk :])
    own = _inside(marks, 0)

    def step(carry: list[Value], x: Any) -> tuple[list[Value], Any]:
        ys, caught = run(steps, [*consts, *carry, *x[0]], own, x[1], names)
        return ys[:nk], (ys[nk:], caught)

    carry, (ys, caught) = lax.scan(step, start, (seq, by), **scan_options(eqn.params))
    return [*carry, *ys], caught


def _branch(eqn: JaxprEqn, xs: Sequence[Value], marks: Sequence[Mark], by: Values,
            names: frozenset[str]) -> Made:  # fmt: skip
    index, *operands = xs

    def branch(k: int, prog: Program) -> Callable[..., Made]:
        return lambda xs, by: run(prog, xs, _inside(marks, k), by, names)

    runs = [branch(k, prog) for k, prog in enumerate(bodies(eqn))]
    types: dict[int, Any] = {}
    for k, f in enumerate(runs):
        keys = sorted(m.key for m in _inside(marks, k) if m.does == "cut")
        made = trace(lambda *xs, f=f, keys=keys: [f(xs, by)[1][key] for key in keys], *operands)
        types |= dict(zip(keys, made.out_avals, strict=True))

    def alike(f: Callable[..., Made]) -> Callable[..., Made]:
        def run_one(xs: list[Value], by: Values) -> Made:
            ys, caught = f(xs, by)
            return ys, {k: caught[k] if k in caught else zeros(t) for k, t in types.items()}

        return run_one

    return switch(eqn.params, index, list(map(alike, runs)), operands, by)


def _call(eqn: JaxprEqn, xs: Sequence[Value], marks: Sequence[Mark], by: Values,
          names: frozenset[str]) -> Made:  # fmt: skip
    """A jit that says where its values are."""
    where = ([sharding(s) for s in eqn.params[f"{end}_shardings"]] for end in ("in", "out"))
    ins, outs = ((w, None) for w in where)
    f = lambda xs, by: run(bodies(eqn)[0], xs, _inside(marks, 0), by, names)
    return jax.jit(f, in_shardings=ins, out_shardings=outs)(list(xs), by)


def _region(eqn: JaxprEqn, xs: Sequence[Value], marks: Sequence[Mark], by: Values,
            names: frozenset[str]) -> Made:  # fmt: skip
    own = _inside(marks, 0)
    if eqn.params["differentiated"]:  # JAX keeps its values apart by a barrier of its own
        return run(bodies(eqn)[0], lax.optimization_barrier(list(xs)), own, by, names)
    trees: list[Any] = []
    leaves, tree = jax.tree.flatten((list(xs), by))

    def flat(*leaves: Value) -> list[Value]:
        xs, by = tree.unflatten(leaves)
        made, out = jax.tree.flatten(run(bodies(eqn)[0], xs, own, by, names))
        trees.append(out)
        return made

    prevent = eqn.params["prevent_cse"]
    jaxpr = jax.make_jaxpr(flat)(*map(jax.typeof, leaves))
    whole = prevent if isinstance(prevent, bool) else True
    return trees[0].unflatten(region(jaxpr, leaves, eqn.params["policy"], whole))


def _custom(eqn: JaxprEqn, xs: Sequence[Value], marks: Sequence[Mark], by: Values,
            names: frozenset[str]) -> Made:  # fmt: skip
    """A function with a derivative of its own, which says nothing of the values in it.

    Its outputs are its own, with its own derivative in its inputs; that in a value inside is the
    body's.
    """
    if any(m.does == "cut" for m in marks):
        raise NotDifferentiable(
            "a share of a gradient, through a value inside a function with a derivative of its own",
            "that derivative does not say which part of it passes through the value",
            frame(eqn),
            "name what the function is given, or what it returns",
        )
    held = [lax.stop_gradient(x) for x in xs]
    inner, _ = run(bodies(eqn)[0], held, _inside(marks, 0), by, names)
    pairs = zip(bind(eqn, xs), inner, strict=True)
    return [perturbed(y, z) if differentiable(jax.typeof(y)) else y for y, z in pairs], {}


_MAKERS: dict[str, Callable[..., Made]] = {
    "scan": _scan, "branch": _branch, "call": _call, "region": _region, "custom": _custom,
}  # fmt: skip
