"""Going back through a loop with a fixed number of stored states.

A loop of known length stores the states that it is best to store (`places`). One of unknown length
(`sweep`) stores its state in one of n slots, at every step at first. When all slots are taken every
second one is freed, and from then on a state is stored at every second step, then at every fourth,
and so on; a quarter of the slots stays free for the way back. Backward (`back`), the slots are a
stack. The state before a step is made again from the topmost one, and on the way there the free
slots are filled by the rule that is optimal for a known number of steps.

With four slots or more an unknown length costs 4 to 8% more steps than a known one, on average over
lengths to 100,000, and 40% at worst. Griewank and Walther, "Algorithm 799: revolve", 2000,
section 2 (backward); Stumm and Walther, "New algorithms for optimal online checkpointing", 2010
(the problem of placing states forward).

Loops with no branch in them: a branch would copy the slots, which loops update in place.
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
from xform.arithmetic import Value
from xform.interpret.lanes import keep, predicate, some, store
from xform.interpret.node import gather
from xform.ir import Mask

States = list[Value]
Step = Callable[[Value, States], States]
Pull = Callable[[Value, States, States, States, States], tuple[States, States]]

# How many states a loop stores: read where a derivative is analyzed.
SNAPSHOTS = contextvars.ContextVar("xform_while_checkpoints", default=32)

# The sizes of the table of binomials: what is larger is treated as if it were not.
_COLUMNS, _ROWS = 32, 1024


class Trail(NamedTuple):
    """What a loop leaves for the way back.

    Attributes:
      count: the number of steps; of the longest lane, if there are several.
      trips: the number of steps of each lane.
      filled: how many slots hold a state.
      steps: before which step each was stored, in order; one place more than there are slots.
      places: in which slot each is. The last is the one in which a state waits to be used.
      slots: the states, along a new leading axis.
    """

    count: Value
    trips: Value
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
    """Run `step` while `alive`, and store some states: the final state, and the trail.

    `stored` says which parts of the state the way back needs.
    """
    live = predicate(alive(start))
    zero, none = (zeros(_integer(x)) for x in (some(live), live))
    steps = lax.broadcast(zero, (n + 1,))
    places = lax.add(steps, np.arange(n + 1, dtype=np.int32))
    slots = [lax.broadcast(x, (n + 1,)) for x in gather(start, stored)]
    trail = Trail(zero, none, zero, steps, places, slots)
    # With two slots, one is worth more free than filled.
    stride = lax.add(zero, np.int32(1 if n > 2 else 2**30))

    def one(s: Any) -> Any:
        count, trips, live, x = s
        y = keep(live, step(x), x)
        count = lax.add(count, np.int32(1))
        return count, *keep(live, [lax.broadcast(count, live.shape)], [trips]), alive(y), y

    def leg(s: Any) -> Any:
        """Store the state, and go on to where the next one is due."""
        trail, stride, live, x = s
        if n > 2:
            trail, stride = _make_room(trail, stride, n)
        trail = _store(trail, gather(x, stored))
        due = lax.add(trail.count, stride)
        count, trips, live, x = lax.while_loop(
            lambda s: lax.bitwise_and(some(s[2]), lax.lt(s[0], due)),
            one,
            (trail.count, trail.trips, live, x),
        )
        return trail._replace(count=count, trips=trips), stride, live, x

    trail, _, _, end = lax.while_loop(lambda s: some(s[2]), leg, (trail, stride, live, list(start)))
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
    """Put a state on top."""
    at = _get(trail.places, trail.filled)
    return trail._replace(
        filled=lax.add(trail.filled, np.int32(1)),
        steps=_put(trail.steps, trail.count, trail.filled),
        slots=[store(s, v, at) for s, v in zip(trail.slots, x, strict=True)],
    )


def back(
    trail: Trail,
    last: States,
    ahead: Mask,
    step: Step,
    pull: Pull,
    cts: States,
    sums: States,
) -> tuple[States, States]:
    """Cotangents of the first state, from those of the last; and sums over all steps.

    `step` advances the stored parts of a state by step number i. `pull` takes i, these before that
    step, those of them that are `ahead` after it, the cotangents after it, and the sums so far, to
    the cotangents before it and the sums with it. `last` is what is `ahead` of the last step.
    """
    n = trail.steps.shape[0] - 1
    places = trail.places

    def climb(s: Any) -> Any:
        """From a state on to the next that is stored."""
        i, end, filled, steps, x, slots = s
        target = lax.add(i, _split(lax.sub(end, i), lax.sub(np.int32(n), filled), n))

        def one(s: Any) -> Any:
            i, x = s
            return lax.add(i, np.int32(1)), step(i, x)

        i, x = lax.while_loop(lambda s: lax.lt(s[0], target), one, (i, x))
        at = _get(places, filled)
        slots = [store(s, v, at) for s, v in zip(slots, x, strict=True)]
        return i, end, lax.add(filled, np.int32(1)), _put(steps, i, filled), x, slots

    def on_top(s: Any) -> Value:
        """Whether the topmost state is the one before the last step that is left."""
        end, filled, steps, slots, *_ = s
        if not slots:
            return lax.gt(end, np.int32(0))
        return lax.eq(_get(steps, _top(filled)), lax.sub(end, np.int32(1)))

    def down(s: Any) -> Any:
        """Back over one step."""
        end, filled, steps, slots, after, cts, sums = s
        end, filled = lax.sub(end, np.int32(1)), _top(filled)
        at = _get(places, filled)
        x = [_get(v, at) for v in slots]
        cts, sums = pull(end, x, after, cts, sums)
        return end, filled, steps, slots, gather(x, ahead), cts, sums

    def leg(s: Any) -> Any:
        """Back over all steps of which the state before is stored, or can be."""
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
    trips: Value,
    step: Callable[[States], States],
    pull: Callable[[States, States, States], tuple[States, States]],
) -> tuple[Step, Pull]:
    """Steps and pulls of a loop whose lanes take so many `trips`: a lane that has ended stays.

    `pull` returns the cotangents before a step, and what is added to the sums.
    """

    def one(i: Value, x: States) -> States:
        return keep(lax.lt(i, trips), step(x), x)

    def down(i: Value, x: States, after: States, cts: States, sums: States):
        alive = lax.lt(i, trips)
        if not (alive.ndim and sums):
            new, more = pull(x, after, cts)
            return keep(alive, new, cts), keep(alive, list(map(lax.add, sums, more)), sums)
        # The sums are over lanes too. A lane that has ended adds nothing: its cotangent is zero,
        # and it stands where the longest lane stands, since at its own end the step may be
        # singular.
        lane = lax.argmax(lax.reshape(trips, (trips.size,)), 0, np.int32)

        def move(vs: States) -> States:
            rows = (lax.reshape(v, (trips.size, *v.shape[alive.ndim :])) for v in vs)
            longest = [lax.broadcast(_get(v, lane), alive.shape) for v in rows]
            return keep(alive, vs, longest)

        none = [zeros(jax.typeof(ct)) for ct in cts]
        new, more = pull(move(x), move(after), keep(alive, cts, none))
        return keep(alive, new, cts), list(map(lax.add, sums, more))

    return one, down


@functools.lru_cache(maxsize=64)
def places(length: int, n: int) -> np.ndarray:
    """Where a loop of known length puts the state before each step: in one of n slots, or last.

    The last place is n, for a state that waits to be used; there each is put over the one before.
    """
    indices = np.full(length, n, np.int32)
    i, free = 0, n
    while free and i < length:
        indices[i] = n - free
        free -= 1
        i += _stride(length - i, free) if length - i > 1 else 1
    return indices


def _stride(length: int, free: int) -> int:
    """`_split` of a known length, which is more than 1."""
    if not free:
        return length - 1
    times = _times(length, free + 1)
    return min(math.comb(free + times, free + 1), length - math.comb(free + times - 1, free))


def _times(length: int, n: int) -> int:
    """The least t for which a loop can be gone back through if each step is run t times at most."""
    return next(t for t in itertools.count() if math.comb(n + t, n) >= length)


def steps_run(length: int, n: int) -> int:
    """How many steps are run to have the state before each, by n slots: the least possible.

    Those on the way forward are counted, but for the last. Griewank and Walther, 2000, section 2.

    >>> from xform.interpret.checkpoints import steps_run
    >>> steps_run(1000, 44)
    1954
    """
    if length < 2:
        return 0
    times = _times(length, n)
    return times * length - math.comb(n + times, n + 1)


def known(length: int, n: int, slots: States) -> Trail:
    """The trail of a loop of known length, whose states were put in `places`."""
    at = places(length, n)
    stored = np.flatnonzero((at < n) | (np.arange(length) == length - 1))
    steps = np.zeros(n + 1, np.int32)
    steps[: len(stored)] = stored
    count, filled = jnp.int32(length), jnp.int32(len(stored))
    order = jnp.arange(n + 1, dtype=np.int32)
    return Trail(count, count, filled, jnp.asarray(steps), order, slots)


def _split(length: Value, free: Value, n: int) -> Value:
    """How far to go before the next state is stored, of `length` steps, with `free` slots of n.

    With s = free + 1 slots, C(s + t, s) steps can be reversed if each is run t times at most. For
    the least such t, this is the largest distance that leaves both parts within their bounds.
    Beyond the table it is a fixed share.
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
    """C(s + t, s), but no more than 2^30, by s and t."""
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
