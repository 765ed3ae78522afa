"""Split a loop of known length into consecutive loops, and nest it into loops of loops.

A loop saves the same values in every iteration. Two consecutive loops may save different values. A
loop whose body is a loop may save only the state at the start of each outer iteration, and
recompute the rest one outer iteration at a time.

Take N steps with a state of c bytes and r saved bytes in each step. K outer iterations hold
K c + N r / K bytes instead of N r, for one more run of the body. d levels of outer iterations hold
about (d + 1) (N r c^d)^(1 / (d + 1)) bytes, for d more runs.

Source: Griewank, "Achieving logarithmic growth of temporal and spatial complexity in reverse
automatic differentiation", 1992, section 3; Chen et al., "Training deep nets with sublinear memory
cost", 2016.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from jax import lax

from xform._jax import JaxprEqn, scan_counts
from xform.program.equation import apply, scan_options

# The consecutive parts of a loop, each as trip counts of nested loops, outermost first.
Shape = tuple[tuple[int, ...], ...]
# Runs n steps: (n, carry, slices) -> (carry, stacked outputs).
Steps = Callable[[int, list[Any], list[Any]], tuple[list[Any], list[Any]]]


def scan_in_parts(eqn: JaxprEqn, xs: Sequence[Any], shape: Shape) -> list[Any]:
    """Run a scan as consecutive loops with the same body; returns the scan's outputs."""
    nc, nk = scan_counts(eqn.params)
    consts, carry, seq = list(xs[:nc]), list(xs[nc : nc + nk]), xs[nc + nk :]
    length, reverse = eqn.params["length"], eqn.params["reverse"]
    if sum(map(math.prod, shape)) != length:
        raise ValueError(f"the shape {shape} does not have the {length} steps of the loop")

    def steps(n: int, carry: list[Any], part: list[Any]) -> tuple[list[Any], list[Any]]:
        ys = apply(eqn.replace(params={**eqn.params, "length": n}), [*consts, *carry, *part])
        return ys[:nk], ys[nk:]

    n_done = 0
    stacks: list[list[Any]] = []
    for trips in shape:
        n = math.prod(trips)
        start = length - n_done - n if reverse else n_done
        part = [_slice(x, start, n) for x in seq]
        carry, ys = _run_nested(steps, carry, part, trips, scan_options(eqn.params))
        stacks.append(ys)
        n_done += n
    if reverse:
        stacks.reverse()
    joined = [y[0] if len(y) == 1 else lax.concatenate(y, 0) for y in zip(*stacks, strict=True)]
    return [*carry, *joined]


def _slice(x: Any, start: int, n: int) -> Any:
    return x if x.shape[0] == n else lax.slice_in_dim(x, start, start + n)


def loop_levels(trips: Sequence[int]) -> int:
    """How many nested loops a part has. Trip counts of 1 make no loop, except the only one."""
    return max(1, sum(n > 1 for n in trips))


def _run_nested(steps: Steps, carry: list[Any], seq: list[Any], trips: Sequence[int],
                options: dict[str, Any]) -> tuple[list[Any], list[Any]]:  # fmt: skip
    """Run `steps` in nested loops; a trip count of 1 makes no loop.

    The scan's unroll factor is kept: the inner loop is unrolled first.
    """
    outer, *inner = (n for n in trips if n > 1) if math.prod(trips) != 1 else (1,)
    if not inner:
        return steps(outer, carry, seq)
    n = math.prod(inner)
    folded = [lax.reshape(x, (outer, n, *x.shape[1:])) for x in seq]

    def outer_step(carry: list[Any], x: list[Any]):
        return _run_nested(steps, carry, x, inner, options)

    unroll = max(1, options["unroll"] // n)
    outer_params: dict[str, Any] = {**options, "length": outer, "unroll": unroll}
    carry, ys = lax.scan(outer_step, carry, folded, **outer_params)
    return carry, [lax.reshape(y, (outer * n, *y.shape[2:])) for y in ys]


def fold_loop(length: int, depth: int, state: int, step: int) -> tuple[Shape, int]:
    """The shape that holds the fewest bytes with `depth` levels of outer loops, and these bytes.

    `state` is the size of the carry, `step` the bytes that one step saves. Steps that do not fill
    an outer iteration become a loop of their own at the end.
    """
    if depth == 0:
        return ((length,),), length * step
    best: tuple[Shape, int] | None = None
    for n in _inner_lengths(length):
        (inner, *_), within = fold_loop(n, depth - 1, state, step)
        # A remainder of the inner loop would add one more loop to every outer iteration.
        if math.prod(inner) != n:
            continue
        outer, remainder = divmod(length, n)
        total = outer * state + within + remainder * step
        if best is None or total < best[1]:
            best = ((outer, *inner), *([(remainder,)] if remainder else ())), total
    return best or fold_loop(length, depth - 1, state, step)


@functools.lru_cache(maxsize=64)
def _inner_lengths(length: int) -> tuple[int, ...]:
    """The inner lengths to try: all up to 64, then with gaps of about 3%."""
    sizes, n = [], 2
    while n <= length // 2:
        sizes.append(n)
        n += max(1, n // 32)
    return tuple(sizes)
