"""The loops of a program, wherever they stand, and the program with some of them taken apart.

Loops are numbered in the order of the program, each before those inside it: in bodies of loops and
branches, in calls, and in remat regions without a policy. What says more than its program stays as
it is, with the loops inside: a custom rule, a call that places its values, a region whose author
said what it saves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from xform._jax import JaxprEqn, scan_p
from xform.ir import Program, bind, environment, evaluate, read, trace, write
from xform.passes.inline import small
from xform.passes.structured import bodies, body, rebuilt, region
from xform.planner.shape import Shape, in_parts, levels
from xform.rules.call import mark
from xform.source import name_stack, source

Shapes = Mapping[int, Shape]


def loops(prog: Program) -> tuple[JaxprEqn, ...]:
    """The scans of a program in order, each before those inside it."""
    if "loops" not in prog.cache:
        prog.cache["loops"] = tuple(eqn for e in prog.equations for eqn in _loops(e))
    return prog.cache["loops"]


def _loops(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    if eqn.primitive is scan_p:
        yield eqn
    for inner in _programs(eqn):
        yield from loops(inner)


def _programs(eqn: JaxprEqn) -> tuple[Program, ...]:
    """The programs of an equation in which loops may be taken apart."""
    if (called := small(eqn)) is not None:
        return (called,)
    return (body(eqn),) if free_region(eqn) else bodies(eqn)


def free_region(eqn: JaxprEqn) -> bool:
    """Whether an equation is a remat region whose author did not say what it saves."""
    return region(eqn) and eqn.params["policy"] is None


def inside(prog: Program, place: int) -> range:
    """The places of the loops that stand inside a loop."""
    (steps,) = _programs(loops(prog)[place])
    return range(place + 1, place + 1 + len(loops(steps)))


def reshaped(prog: Program, shapes: Shapes) -> Program:
    """The program with some of its loops, by their place in `loops`, in other shapes.

    Values are the same, operation by operation. Kept in the program's cache.
    """
    if not shapes:
        return prog
    key = "reshaped", tuple(sorted(shapes.items()))
    if key not in prog.cache:
        prog.cache[key] = trace(lambda *xs: _run(prog, shapes, xs), *prog.in_avals)
    return prog.cache[key]


def _run(prog: Program, shapes: Shapes, args: Sequence[Any]) -> list[Any]:
    env, outer, place = environment(prog, args), name_stack(), 0
    for eqn in prog.equations:
        xs, n = [read(env, v) for v in eqn.invars], sum(1 for _ in _loops(eqn))
        mine = _among(shapes, place, n)
        place += n
        write(env, eqn.outvars, _apart(eqn, mine, xs, outer) if mine else bind(eqn, xs, outer))
    return [read(env, v) for v in prog.outputs]


def _among(shapes: Shapes, first: int, n: int) -> Shapes:
    """The shapes of `n` loops, counted from the first of them."""
    return {i - first: shape for i, shape in shapes.items() if first <= i < first + n}


def _apart(eqn: JaxprEqn, shapes: Shapes, xs: Sequence[Any], outer: Any) -> list[Any]:
    """What an equation makes, with some of its loops in other shapes."""
    place = int(eqn.primitive is scan_p)
    new: list[Program] = []
    for inner in _programs(eqn):
        n = len(loops(inner))
        new.append(reshaped(inner, _among(shapes, place, n)))
        place += n
    if small(eqn) is not None:
        return evaluate(new[0], xs)
    with source(eqn, outer), eqn.ctx.manager:
        if eqn.primitive is scan_p and 0 in shapes:
            changed = len(shapes) > 1
            params = {**eqn.params, "jaxpr": _jaxpr(new[0])} if changed else eqn.params
            return in_parts(eqn.replace(params=params), xs, shapes[0])
        if free_region(eqn):
            return list(mark(_jaxpr(new[0]), xs, None, eqn.params["prevent_cse"]))
    again = rebuilt(eqn, new, (True,) * len(eqn.outvars))
    return bind(eqn, xs, outer) if again is None else evaluate(again, xs)


def _jaxpr(prog: Program) -> Any:
    return jax.make_jaxpr(lambda *xs: evaluate(prog, xs))(*prog.in_avals)


def origins(prog: Program, shapes: Shapes) -> list[tuple[int, int, int]]:
    """Of each loop of the program in other shapes: the place that it had, its part, its level."""
    places: list[tuple[int, int, int]] = []
    place = 0
    while place < len(loops(prog)):
        within = inside(prog, place)
        (steps,) = _programs(loops(prog)[place])
        own = [(i + place + 1, k, level) for i, k, level in
               origins(steps, _among(shapes, place + 1, len(within)))]  # fmt: skip
        for k, trips in enumerate(shapes.get(place, ((1,),))):
            places += [(place, k, level) for level in range(levels(trips))]
            places += own
        place = within.stop
    return places
