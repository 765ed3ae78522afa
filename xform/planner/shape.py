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

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from jax import lax

from xform._jax import JaxprEqn, scan_counts
from xform.equation import apply, scan_options

# Of a loop: consecutive parts, each of trips within trips, outermost first.
Shape = tuple[tuple[int, ...], ...]
# So many steps, of a carry and slices, to a carry and stacks.
Steps = Callable[[int, list[Any], list[Any]], tuple[list[Any], list[Any]]]


def in_parts(eqn: JaxprEqn, xs: Sequence[Any], shape: Shape) -> list[Any]:
    """A scan as consecutive parts, of the same body."""
    nc, nk = scan_counts(eqn.params)
    consts, carry, seq = list(xs[:nc]), list(xs[nc : nc + nk]), xs[nc + nk :]
    length, reverse = eqn.params["length"], eqn.params["reverse"]
    if sum(map(math.prod, shape)) != length:
        raise ValueError(f"{shape} is no shape of a loop of {length} steps")

    def steps(n: int, carry: list[Any], part: list[Any]) -> tuple[list[Any], list[Any]]:
        ys = apply(eqn.replace(params={**eqn.params, "length": n}), [*consts, *carry, *part])
        return ys[:nk], ys[nk:]

    done = 0
    stacks: list[list[Any]] = []
    for trips in shape:
        n = math.prod(trips)
        start = length - done - n if reverse else done
        part = [_cut(x, start, n) for x in seq]
        carry, ys = _nested(steps, carry, part, trips, scan_options(eqn.params))
        stacks.append(ys)
        done += n
    if reverse:
        stacks.reverse()
    joined = [y[0] if len(y) == 1 else lax.concatenate(y, 0) for y in zip(*stacks, strict=True)]
    return [*carry, *joined]


def _cut(x: Any, start: int, n: int) -> Any:
    return x if x.shape[0] == n else lax.slice_in_dim(x, start, start + n)


def levels(trips: Sequence[int]) -> int:
    """How many loops trips within trips are: a loop of one trip is none, but when it is alone."""
    return max(1, sum(n > 1 for n in trips))


def _nested(steps: Steps, carry: list[Any], seq: list[Any], trips: Sequence[int],
            options: dict[str, Any]) -> tuple[list[Any], list[Any]]:  # fmt: skip
    """Loops within loops; a loop of one trip is none.

    As many steps as before are unrolled into one: those of the inner loop first.
    """
    outer, *inner = (n for n in trips if n > 1) if math.prod(trips) != 1 else (1,)
    if not inner:
        return steps(outer, carry, seq)
    n = math.prod(inner)
    folded = [lax.reshape(x, (outer, n, *x.shape[1:])) for x in seq]

    def trip(carry: list[Any], x: list[Any]):
        return _nested(steps, carry, x, inner, options)

    unroll = max(1, options["unroll"] // n)
    around: dict[str, Any] = {**options, "length": outer, "unroll": unroll}
    carry, ys = lax.scan(trip, carry, folded, **around)
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
    sizes, n = [], 2
    while n <= length // 2:
        sizes.append(n)
        n += max(1, n // 32)
    return tuple(sizes)
