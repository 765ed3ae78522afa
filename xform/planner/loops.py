"""Loops of known length taken apart: into consecutive loops, and into loops of loops.

What a loop keeps, it keeps in every trip. Two loops in its place may keep different things; and a
loop whose body is a loop may keep the state at the start of each outer trip, and make the rest
again, trip by trip: of N steps with states of c bytes and r bytes kept for each step, K outer trips
keep K c + N r / K instead of N r, for one more run of the body; d levels of outer trips keep about
(d + 1) (N r c^d)^(1 / (d + 1)), for d more. Source: Griewank, "Achieving logarithmic growth of
temporal and spatial complexity in reverse automatic differentiation", 1992, section 3; Chen et al.,
"Training deep nets with sublinear memory cost", 2016.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax import lax

from xform._jax import JaxprEqn, jit_p, scan_counts, scan_p
from xform.equation import scan_options
from xform.ir import Program, bind, environment, evaluate, program, read, trace, write
from xform.passes.structured import body, placed
from xform.source import name_stack, source
from xform.table import rule_of

# Of a loop: consecutive parts, each of trips within trips, outermost first.
Shape = tuple[tuple[int, ...], ...]


def loops(prog: Program) -> tuple[JaxprEqn, ...]:
    """The scans of a program in order, those in calls that are opened included; none in loops."""
    return tuple(_loops(prog))


def _loops(prog: Program) -> Iterator[JaxprEqn]:
    for eqn in prog.equations:
        if eqn.primitive is scan_p:
            yield eqn
        elif (inner := _opened(eqn)) is not None:
            yield from _loops(inner)


def _opened(eqn: JaxprEqn) -> Program | None:
    """The body of a call that may be opened: small, or holding a scan and without a placement."""
    rule = rule_of(eqn.primitive)
    small = None if rule is None else rule.inlined(eqn, True)
    if small is not None or eqn.primitive is not jit_p:
        return small
    whole = body(eqn)
    found = next(_loops(whole), None) is not None
    return whole if found and not placed(eqn) else None


def reshaped(prog: Program, shapes: Mapping[int, Shape]) -> Program:
    """The program with some of its loops, by their place in `loops`, in other shapes.

    Values are the same, operation by operation. Kept in the program's cache.
    """
    key = "reshaped", tuple(sorted(shapes.items()))
    if key not in prog.cache:
        prog.cache[key] = trace(lambda *xs: _Reshaping(shapes).run(prog, xs), *prog.in_avals)
    return prog.cache[key]


@dataclasses.dataclass(eq=False)
class _Reshaping:
    shapes: Mapping[int, Shape]
    place: int = -1

    def run(self, prog: Program, args: Sequence[Any]) -> list[Any]:
        env = environment(prog, args)
        outer = name_stack()
        for eqn in prog.equations:
            xs = [read(env, v) for v in eqn.invars]
            inner = _opened(eqn)
            if eqn.primitive is scan_p:
                self.place += 1
                shape = self.shapes.get(self.place)
                with source(eqn, outer), eqn.ctx.manager:
                    ys = bind(eqn, xs, outer) if shape is None else _scan(eqn, xs, shape)
            elif inner is not None and next(_loops(inner), None) is not None:
                ys = self.run(inner, xs)
            else:
                ys = bind(eqn, xs, outer)
            write(env, eqn.outvars, ys)
        return [read(env, v) for v in prog.outputs]


def _scan(eqn: JaxprEqn, xs: Sequence[Any], shape: Shape) -> list[Any]:
    """A scan as consecutive parts."""
    steps = program(eqn.params["jaxpr"])
    nc, nk = scan_counts(eqn.params)
    consts, carry, seq = list(xs[:nc]), list(xs[nc : nc + nk]), xs[nc + nk :]
    options = scan_options(eqn.params)
    length, reverse = options.pop("length"), options["reverse"]
    if sum(map(math.prod, shape)) != length:
        raise ValueError(f"{shape} is no shape of a loop of {length} steps")

    def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        ys = evaluate(steps, [*consts, *carry, *x])
        return ys[:nk], ys[nk:]

    done = 0
    stacks: list[list[Any]] = []
    for trips in shape:
        n = math.prod(trips)
        start = length - done - n if reverse else done
        part = [_cut(x, start, n) for x in seq]
        carry, ys = _nested(step, carry, part, trips, options)
        stacks.append(ys)
        done += n
    if reverse:
        stacks.reverse()
    joined = [y[0] if len(y) == 1 else lax.concatenate(y, 0) for y in zip(*stacks, strict=True)]
    return [*carry, *joined]


def _cut(x: Any, start: int, n: int) -> Any:
    return x if x.shape[0] == n else lax.slice_in_dim(x, start, start + n)


def _nested(step: Any, carry: list[Any], seq: list[Any], trips: Sequence[int],
            options: dict[str, Any]):  # fmt: skip
    """Loops within loops; a loop of one trip is none.

    As many steps as before are unrolled into one: those of the inner loop first.
    """
    outer, *inner = (n for n in trips if n > 1) if math.prod(trips) != 1 else (1,)
    if not inner:
        return lax.scan(step, carry, seq, length=outer, **options)
    n = math.prod(inner)
    folded = [lax.reshape(x, (outer, n, *x.shape[1:])) for x in seq]

    def trip(carry: list[Any], x: list[Any]):
        return _nested(step, carry, x, inner, options)

    around: dict[str, Any] = {**options, "unroll": max(1, options["unroll"] // n)}
    carry, ys = lax.scan(trip, carry, folded, length=outer, **around)
    return carry, [lax.reshape(y, (outer * n, *y.shape[2:])) for y in ys]


def fold(length: int, depth: int, state: int, step: int) -> tuple[Shape, int]:
    """The shape of a loop that keeps least with `depth` levels of outer trips, and its bytes.

    `state` are the bytes of what it carries, `step` those that a step keeps. What does not fill the
    outer trips is a loop of its own.
    """
    if depth == 0:
        return ((length,),), length * step
    best: tuple[Shape, int] | None = None
    for n in _sizes(length):
        (inner, *_), within = fold(n, depth - 1, state, step)
        # Parts of an inner loop that do not fill its trips would be loops in every outer trip.
        if math.prod(inner) != n:
            continue
        outer, rest = divmod(length, n)
        kept = outer * state + within + rest * step
        if best is None or kept < best[1]:
            best = ((outer, *inner), *([(rest,)] if rest else ())), kept
    return best or fold(length, depth - 1, state, step)


@functools.lru_cache(maxsize=64)
def _sizes(length: int) -> tuple[int, ...]:
    """Numbers of inner steps that are worth a try: all small ones, then ever fewer."""
    found, n = [], 2
    while n <= length // 2:
        found.append(n)
        n += max(1, n // 32)
    return tuple(found)
