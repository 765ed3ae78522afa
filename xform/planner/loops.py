"""Find the scans of a program, and rebuild the program with some of them split or nested.

A loop here is a `lax.scan`. It is identified by its index: its position among the loops of the
program, where an outer loop comes before its inner loops. Loops inside loops, branches, calls and
remat regions without a policy have an index too. Some loops have no index and are never changed:
those inside custom rules, inside calls that fix where values are placed, and inside remat regions
with a policy of their own.

A remat region is a part of a function that `jax.checkpoint` or `xform.remat` marks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from xform._jax import JaxprEqn, scan_p
from xform.passes.inline import inlinable_body
from xform.passes.structured import bodies, called_body, is_remat_region, rebuild_equation
from xform.planner.shape import Shape, loop_levels, scan_in_parts
from xform.program.ir import Program, bind, context, environment, evaluate, read, retrace, write
from xform.program.source import name_stack, source
from xform.registry.table import lookup

# The new shape of each loop that is split or nested, by the index of the loop.
Shapes = Mapping[int, Shape]


def loops(prog: Program) -> tuple[JaxprEqn, ...]:
    """Return the scans of a program in order, an outer scan before its inner scans."""
    if "loops" not in prog.cache:
        prog.cache["loops"] = tuple(loop for eqn in prog.equations for loop in _loops_of(eqn))
    return prog.cache["loops"]


def _loops_of(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    """Yield the equation itself if it is a scan, then the scans inside it."""
    if eqn.primitive is scan_p:
        yield eqn
    for inner in _bodies(eqn):
        yield from loops(inner)


def _bodies(eqn: JaxprEqn) -> tuple[Program, ...]:
    """Return the programs inside an equation, if their loops may be changed."""
    if (called := inlinable_body(eqn)) is not None:
        return (called,)
    return (called_body(eqn),) if is_region_without_policy(eqn) else bodies(eqn)


def is_region_without_policy(eqn: JaxprEqn) -> bool:
    """Return whether an equation is a remat region without a policy of its own."""
    return is_remat_region(eqn) and eqn.params["policy"] is None


def loops_inside(prog: Program, index: int) -> range:
    """Return the indices of all loops inside the loop with this index."""
    (body,) = _bodies(loops(prog)[index])
    return range(index + 1, index + 1 + len(loops(body)))


def reshape_loops(prog: Program, shapes: Shapes) -> Program:
    """Return the program with the loops in `shapes` split or nested.

    It does the same operations on the same values. The program's cache holds the result.
    """
    if not shapes:
        return prog
    key = "reshaped", tuple(sorted(shapes.items()))
    if key not in prog.cache:
        prog.cache[key] = retrace(prog, lambda *xs: _evaluate(prog, shapes, xs))
    return prog.cache[key]


def _evaluate(prog: Program, shapes: Shapes, args: Sequence[Any]) -> list[Any]:
    """Run the program with the loops in `shapes` split or nested, and return its outputs."""
    env, outer_names, index = environment(prog, args), name_stack(), 0
    for eqn in prog.equations:
        xs, n_loops = [read(env, v) for v in eqn.invars], sum(1 for _ in _loops_of(eqn))
        eqn_shapes = _subset(shapes, index, n_loops)
        index += n_loops
        if eqn_shapes:
            outs = _run_reshaped(eqn, eqn_shapes, xs, outer_names)
        else:
            outs = bind(eqn, xs, outer_names)
        write(env, eqn.outvars, outs)
    return [read(env, v) for v in prog.outputs]


def _subset(shapes: Shapes, first: int, n: int) -> Shapes:
    """Return the shapes of `n` consecutive loops, renumbered so that the loop `first` is 0."""
    return {i - first: shape for i, shape in shapes.items() if first <= i < first + n}


def _run_reshaped(eqn: JaxprEqn, shapes: Shapes, xs: Sequence[Any], outer_names: Any) -> list[Any]:
    """Run one equation with the loops in `shapes` split or nested, and return its outputs.

    The loops are numbered from 0 within the equation. `outer_names` are the name scopes around it.
    """
    index = int(eqn.primitive is scan_p)
    new_bodies: list[Program] = []
    for body in _bodies(eqn):
        n_loops = len(loops(body))
        new_bodies.append(reshape_loops(body, _subset(shapes, index, n_loops)))
        index += n_loops
    if inlinable_body(eqn) is not None:
        return evaluate(new_bodies[0], xs)
    with source(eqn, outer_names), context(eqn):
        if eqn.primitive is scan_p and 0 in shapes:
            body_changed = len(shapes) > 1
            params = {**eqn.params, "jaxpr": _jaxpr(new_bodies[0])} if body_changed else eqn.params
            return scan_in_parts(eqn.replace(params=params), xs, shapes[0])
        if is_region_without_policy(eqn):
            run = lambda xs, each: (evaluate(new_bodies[0], xs), each)
            return lookup(eqn).rebuild(eqn, xs, [run])[0]
    rebuilt = rebuild_equation(eqn, new_bodies, (True,) * len(eqn.outvars))
    return bind(eqn, xs, outer_names) if rebuilt is None else evaluate(rebuilt, xs)


def _jaxpr(prog: Program) -> Any:
    """Return the program as a closed jaxpr."""
    return jax.make_jaxpr(lambda *xs: evaluate(prog, xs))(*prog.in_avals)


def loop_origins(prog: Program, shapes: Shapes) -> list[tuple[int, int, int]]:
    """Return where each loop of `reshape_loops(prog, shapes)` comes from.

    For each loop, in program order, the result has its index in `prog`, its part, and its level. A
    loop that is split has several parts, the first being 0. A part that is nested has several
    levels, the outermost being 0.
    """
    origins: list[tuple[int, int, int]] = []
    index = 0
    while index < len(loops(prog)):
        inside = loops_inside(prog, index)
        (body,) = _bodies(loops(prog)[index])
        inner_shapes = _subset(shapes, index + 1, len(inside))
        inner = [(i + index + 1, part, level)
                 for i, part, level in loop_origins(body, inner_shapes)]  # fmt: skip
        for part, trips in enumerate(shapes.get(index, ((1,),))):
            origins += [(index, part, level) for level in range(loop_levels(trips))]
            origins += inner
        index = inside.stop
    return origins
