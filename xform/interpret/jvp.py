"""Forward mode: run a program on primals and tangents together.

Names: `xs` and `ys` are the inputs and outputs of an equation, `dxs` and `dys` their tangents. A
tangent that is None is a symbolic zero.
"""

from __future__ import annotations

from collections.abc import Sequence

from xform._jax import JaxprEqn, Var
from xform.interpret.activity import path
from xform.interpret.node import Structured
from xform.program.arithmetic import Value
from xform.program.ir import Mask, Program, apply, bind, context, environment, read, write
from xform.program.source import name_stack, source
from xform.registry.table import Rule, lookup
from xform.registry.words import Composite


def jvp(prog: Program, args: Sequence[Value], tangents: Sequence[Value], split: bool = False,
        wanted: Mask | None = None):  # fmt: skip
    """Run a program in the current trace; return its outputs and their tangents.

    Only `wanted` outputs need a tangent (None: all), and only values that lead to them get one.
    With `split`, each loop, branch or call becomes two equations: a `fork`, which computes outputs,
    and a `join`, which computes tangents (see `interpret.node`). So no equation mixes the two, and
    `joint.analyze` can separate the equations that depend on tangents from all others.
    """
    env = environment(prog, args)
    env_dx = {v: dx for v, dx in zip(prog.inputs, tangents, strict=True) if dx is not None}
    steps = path(prog, tuple(dx is not None for dx in tangents), wanted).steps
    outer = name_stack()
    for i, eqn in enumerate(prog.equations):
        xs = [read(env, v) for v in eqn.invars]
        dxs = [env_dx.get(v) if isinstance(v, Var) else None for v in eqn.invars]
        # A rule may have returned a zero tangent where `path` expected one.
        if i not in steps or all([dx is None for dx in dxs]):
            write(env, eqn.outvars, bind(eqn, xs, outer))
            continue
        with source(eqn, outer), context(eqn):
            ys, dys = push(lookup(eqn), eqn, xs, dxs, steps[i][1], split)
        write(env, eqn.outvars, ys)
        results = zip(eqn.outvars, dys, steps[i][1], strict=True)
        env_dx.update((v, dy) for v, dy, on in results if on and dy is not None)
    outs = [read(env, v) for v in prog.outputs]
    return outs, [env_dx.get(v) if isinstance(v, Var) else None for v in prog.outputs]


def push(rule: Rule, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value], wanted: Mask,
         split: bool):  # fmt: skip
    """Run one equation in the current trace; return its outputs and their tangents.

    At least one of `dxs` is not None. `wanted` and `split` are explained at `jvp`.
    """
    if isinstance(rule, Structured):
        return (rule.split if split else rule.jvp_of)(eqn, xs, dxs, wanted)
    if isinstance(rule, Composite):
        return rule.jvp(eqn, xs, dxs)
    ys = apply(eqn, xs)
    return ys, rule.push(eqn, xs, ys, dxs)
