"""Run the backward pass of a loop with a fixed number of stored states.

A loop of known length stores its states at the optimal steps (`slot_of_each_step`). A loop of
unknown length (`sweep`) has n slots. At first it stores its state at every step. When all slots are
full, it frees every second one, and then stores a state at every second step, later at every
fourth, and so on. A quarter of the slots stays free for the backward pass. In the backward pass
(`run_backward`) the slots are a stack. The state before a step is recomputed from the topmost
stored state. During the recompute, states are stored in the free slots by the rule that is optimal
for a known number of steps.

With four slots or more, an unknown length costs 4 to 8% more steps than a known one, on average
over lengths up to 100,000, and 40% at worst. Griewank and Walther, "Algorithm 799: revolve", 2000,
section 2 (backward); Stumm and Walther, "New algorithms for optimal online checkpointing", 2010
(the problem of placing states forward).

These loops contain no branch: a branch would copy the slots, which loops update in place.
"""

from __future__ import annotations

import contextvars
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xform._jax import zeros
from xform.interpret.lanes import any_alive, predicate, select_alive, store_slice
from xform.interpret.node import gather
from xform.program.arithmetic import Value
from xform.program.ir import Mask

States = list[Value]
Step = Callable[[Value, States], States]
Pull = Callable[[Value, States, States, States, States], tuple[States, States]]

# How many states a loop stores; read when a derivative is analyzed.
SNAPSHOTS = contextvars.ContextVar("xform_checkpoints_per_while_loop", default=32)

# The size of the table of binomials. More slots than rows count as the last row. Beyond the
# columns, `_split` takes a fixed share.
_COLUMNS, _ROWS = 32, 1024


class Trail(NamedTuple):
    """The states that a loop stores for its backward pass.

    Attributes:
      count: the number of steps of the longest lane.
      lane_steps: the number of steps of each lane.
      filled: how many slots hold a state.
      steps: the step before which each state was stored, in order; one entry more than slots.
      places: the slot of each state. The last slot is extra, for the state that is used next.
      slots: the states, along a new leading axis.
    """

    count: Value
    lane_steps: Value
    filled: Value
    steps: Value
    places: Value
    slots: States


def sweep(
    alive: Callable[[States], Value],
    step: Callable[[States], States],
    start: States,
    stored: Mask,
    n: int,
) -> tuple[States, Trail]:
    """Run `step` while `alive` and store some states. Return the final state and the trail.

    `stored` says which parts of the state the backward pass needs.
    """
    live = predicate(alive(start))
    zero, none = (zeros(_integer(x)) for x in (any_alive(live), live))
    steps = lax.broadcast(zero, (n + 1,))
    places = lax.add(steps, np.arange(n + 1, dtype=np.int32))
    slots = [lax.broadcast(x, (n + 1,)) for x in gather(start, stored)]
    trail = Trail(zero, none, zero, steps, places, slots)
    # With two slots or fewer only the first state is stored: a free slot saves more steps.
    stride = lax.add(zero, np.int32(1 if n > 2 else 2**30))

    def one(s: Any) -> Any:
        count, lane_steps, live, x = s
        y = select_alive(live, step(x), x)
        count = lax.add(count, np.int32(1))
        return (
            count,
            *select_alive(live, [lax.broadcast(count, live.shape)], [lane_steps]),
            alive(y),
            y,
        )

    def leg(s: Any) -> Any:
        """Store the state, and run to the step where the next one is stored."""
        trail, stride, live, x = s
        if n > 2:
            trail, stride = _make_room(trail, stride, n)
        trail = _store(trail, gather(x, stored))
        due = lax.add(trail.count, stride)
        count, lane_steps, live, x = lax.while_loop(
            lambda s: lax.bitwise_and(any_alive(s[2]), lax.lt(s[0], due)),
            one,
            (trail.count, trail.lane_steps, live, x),
        )
        return trail._replace(count=count, lane_steps=lane_steps), stride, live, x

    trail, _, _, end = lax.while_loop(
        lambda s: any_alive(s[2]), leg, (trail, stride, live, list(start))
    )
    return end, trail


def _integer(x: Value) -> Any:
    aval: Any = jax.typeof(x)
    return aval.update(dtype=np.dtype(np.int32), weak_type=False)


def _make_room(trail: Trail, stride: Value, n: int) -> tuple[Trail, Value]:
    """While too few slots are free, free every second one, and double the stride."""

    def full(s: Any) -> Value:
        filled, stride, *_ = s
        first, later = np.int32(n), np.int32(max(2, 3 * n // 8 * 2))
        return lax.ge(filled, lax.select(lax.eq(stride, np.int32(1)), first, later))

    def thin(s: Any) -> Any:
        filled, stride, steps, places = s
        half = lax.div(lax.add(filled, np.int32(1)), np.int32(2))
        return half, lax.mul(stride, np.int32(2)), evens_first(steps), evens_first(places)

    def evens_first(x: Value) -> Value:
        last = lax.slice(x, (n,), (n + 1,))
        return lax.concatenate([*(lax.slice(x, (i,), (n,), (2,)) for i in (0, 1)), last], 0)

    state = trail.filled, stride, trail.steps, trail.places
    filled, stride, steps, places = lax.while_loop(full, thin, state)
    return trail._replace(filled=filled, steps=steps, places=places), stride


def _store(trail: Trail, x: States) -> Trail:
    """Push a state on the stack."""
    at = _get(trail.places, trail.filled)
    return trail._replace(
        filled=lax.add(trail.filled, np.int32(1)),
        steps=_put(trail.steps, trail.count, trail.filled),
        slots=[store_slice(s, v, at) for s, v in zip(trail.slots, x, strict=True)],
    )


def run_backward(
    trail: Trail,
    last: States,
    ahead: Mask,
    step: Step,
    pull: Pull,
    cts: States,
    sums: States,
) -> tuple[States, States]:
    """Return the cotangents of the first state, from those of the last; and sums over all steps.

    `step(i, x)` advances the stored parts of a state by step i. `pull(i, x, after, cts, sums)` goes
    back over step i: `x` are the stored parts before the step, `after` are its `ahead` parts after
    the step, `cts` are the cotangents after it, and `sums` are the sums so far. It returns the
    cotangents before the step and the new sums. `last` are the `ahead` parts after the last step.
    """
    n = trail.steps.shape[0] - 1
    places = trail.places

    def climb(s: Any) -> Any:
        """Run from a state to the next step whose state is stored, and store it."""
        i, end, filled, steps, x, slots = s
        target = lax.add(i, _split(lax.sub(end, i), lax.sub(np.int32(n), filled), n))

        def one(s: Any) -> Any:
            i, x = s
            return lax.add(i, np.int32(1)), step(i, x)

        i, x = lax.while_loop(lambda s: lax.lt(s[0], target), one, (i, x))
        at = _get(places, filled)
        slots = [store_slice(s, v, at) for s, v in zip(slots, x, strict=True)]
        return i, end, lax.add(filled, np.int32(1)), _put(steps, i, filled), x, slots

    def on_top(s: Any) -> Value:
        """Whether the topmost state is the one before the last remaining step."""
        end, filled, steps, slots, *_ = s
        if not slots:
            return lax.gt(end, np.int32(0))
        return lax.eq(_get(steps, _top(filled)), lax.sub(end, np.int32(1)))

    def down(s: Any) -> Any:
        """Go back over one step."""
        end, filled, steps, slots, after, cts, sums = s
        end, filled = lax.sub(end, np.int32(1)), _top(filled)
        at = _get(places, filled)
        x = [_get(v, at) for v in slots]
        cts, sums = pull(end, x, after, cts, sums)
        return end, filled, steps, slots, gather(x, ahead), cts, sums

    def leg(s: Any) -> Any:
        """Store states up to the last remaining step, then go back while its state is on top."""
        end, filled, steps, slots, *rest = s
        if slots:
            top = _top(filled)
            i, at = _get(steps, top), _get(places, top)
            _, _, filled, steps, _, slots = lax.while_loop(
                lambda s: lax.lt(s[0], lax.sub(s[1], np.int32(1))),
                climb,
                (i, end, filled, steps, [_get(v, at) for v in slots], slots),
            )
        return lax.while_loop(on_top, down, (end, filled, steps, slots, *rest))

    start = trail.count, trail.filled, trail.steps, trail.slots, last, cts, sums
    *_, cts, sums = lax.while_loop(lambda s: lax.gt(s[0], np.int32(0)), leg, start)
    return cts, sums


def in_lanes(
    lane_steps: Value,
    step: Callable[[States], States],
    pull: Callable[[States, States, States], tuple[States, States]],
) -> tuple[Step, Pull]:
    """Return step and pull of a loop whose lanes take `lane_steps` steps; ended lanes stay as is.

    The given `pull` returns the cotangents before a step, and the terms of the step for the sums.
    """

    def one(i: Value, x: States) -> States:
        return select_alive(lax.lt(i, lane_steps), step(x), x)

    def down(i: Value, x: States, after: States, cts: States, sums: States):
        alive = lax.lt(i, lane_steps)
        if not (alive.ndim and sums):
            new, more = pull(x, after, cts)
            return select_alive(alive, new, cts), select_alive(
                alive, list(map(lax.add, sums, more)), sums
            )
        # The sums are over lanes too. A lane that has ended adds nothing, because its cotangent is
        # zero. It gets the state of the longest lane, because the step may be singular at its own
        # final state.
        lane = lax.argmax(lax.reshape(lane_steps, (lane_steps.size,)), 0, np.int32)

        def move(vs: States) -> States:
            rows = (lax.reshape(v, (lane_steps.size, *v.shape[alive.ndim :])) for v in vs)
            longest = [lax.broadcast(_get(v, lane), alive.shape) for v in rows]
            return select_alive(alive, vs, longest)

        none = [zeros(jax.typeof(ct)) for ct in cts]
        new, more = pull(move(x), move(after), select_alive(alive, cts, none))
        return select_alive(alive, new, cts), list(map(lax.add, sums, more))

    return one, down


@functools.lru_cache(maxsize=64)
def slot_of_each_step(length: int, n: int) -> np.ndarray:
    """Return the slot for the state before each step of a loop of known length.

    Slots 0 to n - 1 keep their state. The extra slot n holds a state only until it is used: each
    state there overwrites the one before.
    """
    indices = np.full(length, n, np.int32)
    i, free = 0, n
    while free and i < length:
        indices[i] = n - free
        free -= 1
        i += _stride(length - i, free) if length - i > 1 else 1
    return indices


def _stride(length: int, free: int) -> int:
    """Compute `_split` for a known length, which is greater than 1."""
    if not free:
        return length - 1
    times = _times(length, free + 1)
    return min(math.comb(free + times, free + 1), length - math.comb(free + times - 1, free))


def _times(length: int, n: int) -> int:
    """Return the least t such that the loop can be reversed if each step runs at most t times."""
    return next(t for t in itertools.count() if math.comb(n + t, n) >= length)


def steps_run(length: int, n: int) -> int:
    """Return the least number of steps to run to have the state before each step, with n slots.

    The steps of the forward pass count, except the last. Griewank and Walther, 2000, section 2.

    >>> from xform.interpret.checkpoints import steps_run
    >>> steps_run(1000, 44)
    1954
    """
    if length < 2:
        return 0
    times = _times(length, n)
    return times * length - math.comb(n + times, n + 1)


def known_length_trail(length: int, n: int, slots: States) -> Trail:
    """Return the trail of a loop of known length that stored states by `slot_of_each_step`."""
    at = slot_of_each_step(length, n)
    stored = np.flatnonzero((at < n) | (np.arange(length) == length - 1))
    steps = np.zeros(n + 1, np.int32)
    steps[: len(stored)] = stored
    count, filled = jnp.int32(length), jnp.int32(len(stored))
    order = jnp.arange(n + 1, dtype=np.int32)
    return Trail(count, count, filled, jnp.asarray(steps), order, slots)


def _split(length: Value, free: Value, n: int) -> Value:
    """Return how far to run before the next state is stored, of `length` steps with `free` slots.

    With s = free + 1 slots, C(s + t, s) steps can be reversed if each runs at most t times. For the
    least such t, the result is the largest distance that keeps both parts within their bounds.
    Beyond the table it is a fixed share of the length.
    """
    table = _binomials(min(n, _ROWS) + 1)
    below = lax.min(free, np.int32(len(table) - 2))
    s = lax.add(below, np.int32(1))
    row, smaller = (_get(table, i) for i in (s, below))
    t = lax.reduce_sum(lax.convert_element_type(lax.lt(row, length), np.int32), (0,))
    known = lax.lt(t, np.int32(_COLUMNS))
    t = lax.sub(t, np.int32(1))
    best = lax.min(_get(row, t), lax.sub(length, _get(smaller, t)))
    share = lax.mul(lax.div(length, lax.add(s, np.int32(_COLUMNS))), s)
    split = lax.select(known, best, lax.sub(length, share))
    return lax.select(lax.gt(free, np.int32(0)), split, lax.sub(length, np.int32(1)))


@functools.lru_cache(maxsize=8)
def _binomials(rows: int) -> np.ndarray:
    """Return a table of C(s + t, s), at most 2^30, by s and t."""
    columns = [np.ones(rows, np.int64)]
    while len(columns) < _COLUMNS:
        columns.append(np.minimum(np.cumsum(columns[-1]), 2**30))
    return np.stack(columns, 1).astype(np.int32)


def _top(filled: Value) -> Value:
    return lax.max(lax.sub(filled, np.int32(1)), np.int32(0))


def _get(x: Value, i: Value) -> Value:
    return lax.dynamic_index_in_dim(x, i, 0, False, allow_negative_indices=False)


def _put(x: Value, value: Value, i: Value) -> Value:
    return lax.dynamic_update_index_in_dim(x, value, i, 0, allow_negative_indices=False)
