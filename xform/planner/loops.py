"""Find the loops of a program, and rebuild the program with some of them split or nested.

Loops are numbered in program order, an outer loop before its inner loops. The numbering covers
bodies of loops and branches, calls, and remat regions without a policy. Loops inside other
equations are neither counted nor changed: custom rules, calls that fix where values are placed, and
remat regions with a policy of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from xform._jax import JaxprEqn, scan_p
from xform.passes.inline import inlinable_body
from xform.passes.structured import bodies, called_body, is_remat_region, rebuild_equation
from xform.planner.shape import Shape, loop_levels, scan_in_parts
from xform.program.ir import Program, bind, environment, evaluate, read, trace, write
from xform.program.source import name_stack, source
from xform.rules.call import remat_region_of

Shapes = Mapping[int, Shape]


def loops(prog: Program) -> tuple[JaxprEqn, ...]:
    """The scans of a program in order, an outer scan before its inner scans."""
    if "loops" not in prog.cache:
        prog.cache["loops"] = tuple(eqn for e in prog.equations for eqn in _loops(e))
    return prog.cache["loops"]


def _loops(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    if eqn.primitive is scan_p:
        yield eqn
    for inner in _programs(eqn):
        yield from loops(inner)


def _programs(eqn: JaxprEqn) -> tuple[Program, ...]:
    """The programs inside an equation whose loops may be changed."""
    if (called := inlinable_body(eqn)) is not None:
        return (called,)
    return (called_body(eqn),) if is_region_without_policy(eqn) else bodies(eqn)


def is_region_without_policy(eqn: JaxprEqn) -> bool:
    """Whether an equation is a remat region without a policy."""
    return is_remat_region(eqn) and eqn.params["policy"] is None


def loops_inside(prog: Program, index: int) -> range:
    """The indices in `loops(prog)` of all loops inside the loop with this index."""
    (steps,) = _programs(loops(prog)[index])
    return range(index + 1, index + 1 + len(loops(steps)))


def reshape_loops(prog: Program, shapes: Shapes) -> Program:
    """The program with new shapes for the loops whose indices in `loops` are keys of `shapes`.

    It does the same operations on the same values. The program's cache holds it.
    """
    if not shapes:
        return prog
    key = "reshaped", tuple(sorted(shapes.items()))
    if key not in prog.cache:
        prog.cache[key] = trace(lambda *xs: _evaluate(prog, shapes, xs), *prog.in_avals)
    return prog.cache[key]


def _evaluate(prog: Program, shapes: Shapes, args: Sequence[Any]) -> list[Any]:
    env, outer, index = environment(prog, args), name_stack(), 0
    for eqn in prog.equations:
        xs, n = [read(env, v) for v in eqn.invars], sum(1 for _ in _loops(eqn))
        own = _subset(shapes, index, n)
        index += n
        outs = _reshape_equation(eqn, own, xs, outer) if own else bind(eqn, xs, outer)
        write(env, eqn.outvars, outs)
    return [read(env, v) for v in prog.outputs]


def _subset(shapes: Shapes, first: int, n: int) -> Shapes:
    """The shapes of `n` consecutive loops, renumbered so that the loop `first` is 0."""
    return {i - first: shape for i, shape in shapes.items() if first <= i < first + n}


def _reshape_equation(eqn: JaxprEqn, shapes: Shapes, xs: Sequence[Any], outer: Any) -> list[Any]:
    """The outputs of an equation whose loops have the new `shapes`."""
    index = int(eqn.primitive is scan_p)
    new: list[Program] = []
    for inner in _programs(eqn):
        n = len(loops(inner))
        new.append(reshape_loops(inner, _subset(shapes, index, n)))
        index += n
    if inlinable_body(eqn) is not None:
        return evaluate(new[0], xs)
    with source(eqn, outer), eqn.ctx.manager:
        if eqn.primitive is scan_p and 0 in shapes:
            changed = len(shapes) > 1
            params = {**eqn.params, "jaxpr": _jaxpr(new[0])} if changed else eqn.params
            return scan_in_parts(eqn.replace(params=params), xs, shapes[0])
        if is_region_without_policy(eqn):
            return list(remat_region_of(_jaxpr(new[0]), xs, None, eqn.params["prevent_cse"]))
    changed_program = rebuild_equation(eqn, new, (True,) * len(eqn.outvars))
    return bind(eqn, xs, outer) if changed_program is None else evaluate(changed_program, xs)


def _jaxpr(prog: Program) -> Any:
    return jax.make_jaxpr(lambda *xs: evaluate(prog, xs))(*prog.in_avals)


def loop_origins(prog: Program, shapes: Shapes) -> list[tuple[int, int, int]]:
    """For each loop of the reshaped program: its original index, its part, and its nesting level.

    A loop that is split has several parts; a part that is nested has several levels, the outermost
    being 0.
    """
    origin_of: list[tuple[int, int, int]] = []
    index = 0
    while index < len(loops(prog)):
        within = loops_inside(prog, index)
        (steps,) = _programs(loops(prog)[index])
        inner_shapes = _subset(shapes, index + 1, len(within))
        inner = [(i + index + 1, k, level) for i, k, level in loop_origins(steps, inner_shapes)]
        for k, trips in enumerate(shapes.get(index, ((1,),))):
            origin_of += [(index, k, level) for level in range(loop_levels(trips))]
            origin_of += inner
        index = within.stop
    return origin_of
