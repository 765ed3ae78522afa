"""Split a `scan` into consecutive loops, and nest it into loops of loops.

The new loops compute the same values, but can need less memory for the backward pass. One loop
saves the same values in every iteration; two consecutive loops may save different values. A loop
whose body is a loop may save only its state (the carry) at the start of each outer iteration. The
backward pass then recomputes the rest, one outer iteration at a time.

For example, let a loop have N steps, a state of c bytes, and r saved bytes in each step. With K
outer iterations it holds K c + N r / K bytes instead of N r, and each step runs once more. With d
levels of outer loops it holds about (d + 1) (N r c^d)^(1 / (d + 1)) bytes, and each step runs d
more times.

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

# The consecutive loops that replace a loop, each as the trip counts of nested loops, outermost
# first. ((3, 4), (2,)) is 3 times 4 steps, then 2 steps.
Shape = tuple[tuple[int, ...], ...]
# Runs n steps of a loop. Takes n, the carry and the scanned inputs of these steps, and returns the
# new carry and the stacked outputs.
RunSteps = Callable[[int, list[Any], list[Any]], tuple[list[Any], list[Any]]]


def scan_in_parts(eqn: JaxprEqn, xs: Sequence[Any], shape: Shape) -> list[Any]:
    """Run a scan as the loops of `shape`, and return the scan's outputs.

    Args:
      eqn: the scan.
      xs: the values of its operands.
      shape: the new loops. Their steps add up to the length of the scan.
    """
    n_consts, n_carry = scan_counts(eqn.params)
    first_scanned = n_consts + n_carry
    consts, carry = list(xs[:n_consts]), list(xs[n_consts:first_scanned])
    scanned = xs[first_scanned:]
    length, reverse = eqn.params["length"], eqn.params["reverse"]
    if sum(map(math.prod, shape)) != length:
        raise ValueError(f"the shape {shape} does not have the {length} steps of the loop")

    def run_steps(n: int, carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        ys = apply(eqn.replace(params={**eqn.params, "length": n}), [*consts, *carry, *slices])
        return ys[:n_carry], ys[n_carry:]

    n_done = 0
    stacks: list[list[Any]] = []
    for trips in shape:
        n = math.prod(trips)
        start = length - n_done - n if reverse else n_done
        slices = [_slice(x, start, n) for x in scanned]
        carry, ys = _run_nested(run_steps, carry, slices, trips, scan_options(eqn.params))
        stacks.append(ys)
        n_done += n
    if reverse:
        stacks.reverse()
    joined = [y[0] if len(y) == 1 else lax.concatenate(y, 0) for y in zip(*stacks, strict=True)]
    return [*carry, *joined]


def _slice(x: Any, start: int, n: int) -> Any:
    """Return `n` elements of the leading axis."""
    return x if x.shape[0] == n else lax.slice_in_dim(x, start, start + n)


def loop_levels(trips: Sequence[int]) -> int:
    """Return how many nested loops these trip counts make.

    A trip count of 1 makes no loop, but there is at least one loop.
    """
    return max(1, sum(n > 1 for n in trips))


def _run_nested(run_steps: RunSteps, carry: list[Any], scanned: list[Any], trips: Sequence[int],
                options: dict[str, Any]) -> tuple[list[Any], list[Any]]:  # fmt: skip
    """Run steps in nested loops with these trip counts; return the carry and stacked outputs.

    A trip count of 1 makes no loop. `options` are those of the scan. Its unroll factor is kept: the
    innermost loop is unrolled first.
    """
    outer, *inner = (n for n in trips if n > 1) if math.prod(trips) != 1 else (1,)
    if not inner:
        return run_steps(outer, carry, scanned)
    n = math.prod(inner)
    folded = [lax.reshape(x, (outer, n, *x.shape[1:])) for x in scanned]

    def outer_step(carry: list[Any], slices: list[Any]):
        return _run_nested(run_steps, carry, slices, inner, options)

    unroll = max(1, options["unroll"] // n)
    outer_params: dict[str, Any] = {**options, "length": outer, "unroll": unroll}
    carry, ys = lax.scan(outer_step, carry, folded, **outer_params)
    return carry, [lax.reshape(y, (outer * n, *y.shape[2:])) for y in ys]


def fold_loop(length: int, depth: int, state_bytes: int, step_bytes: int) -> tuple[Shape, int]:
    """Return the split of a loop into nested loops that holds the fewest bytes, and these bytes.

    Steps that do not fill an outer iteration become a loop of their own at the end. A loop that is
    too short for `depth` levels gets fewer levels.

    Args:
      length: the number of steps.
      depth: the number of levels of outer loops.
      state_bytes: the bytes of the carry.
      step_bytes: the bytes that one step saves.

    >>> from xform.planner.shape import fold_loop
    >>> fold_loop(102, 1, state_bytes=1, step_bytes=1)  # 10 states, 10 steps, 2 more steps
    (((10, 10), (2,)), 22)
    """
    if depth == 0:
        return ((length,),), length * step_bytes
    best: tuple[Shape, int] | None = None
    for n in _inner_lengths(length):
        (inner, *_), inner_bytes = fold_loop(n, depth - 1, state_bytes, step_bytes)
        # A remainder of the inner loop would add one more loop to every outer iteration.
        if math.prod(inner) != n:
            continue
        outer, remainder = divmod(length, n)
        total = outer * state_bytes + inner_bytes + remainder * step_bytes
        if best is None or total < best[1]:
            best = ((outer, *inner), *([(remainder,)] if remainder else ())), total
    return best or fold_loop(length, depth - 1, state_bytes, step_bytes)


@functools.lru_cache(maxsize=64)
def _inner_lengths(length: int) -> tuple[int, ...]:
    """Return the lengths of an inner loop to try: all up to 64, then with gaps of about 3%."""
    lengths, n = [], 2
    while n <= length // 2:
        lengths.append(n)
        n += max(1, n // 32)
    return tuple(lengths)
