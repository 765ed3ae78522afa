"""Store a fixed number of a loop's states, and run the backward pass of the loop from them.

A state is the value of the loop's carry before a step. A slot is the memory for one stored state.
If the loop is under `vmap`, a lane is one element of the batch.

- Forward, a loop of unknown length (`run_and_store`) has n slots. At first it stores its state at
  every step. When all slots are full, it frees every second slot, and then stores a state at every
  second step. From then on, when three quarters are full, it frees every second slot, and stores
  states half as often as before. So a quarter stays free for the backward pass. A loop of known
  length stores its states at the optimal steps (`slot_of_each_step`).
- Backward (`run_backward`), the slots are a stack. The state before a step is recomputed from the
  topmost stored state. This recompute has a known number of steps, so it stores states in the free
  slots at the optimal steps.

With four slots or more, a loop of unknown length runs 4 to 8% more steps than one of known length,
on average over lengths up to 100,000, and 40% more at worst. Griewank and Walther, "Algorithm 799:
revolve", 2000, section 2 (the backward pass). Stumm and Walther, "New algorithms for optimal online
checkpointing", 2010, have another method for the forward pass.

The loops of this module contain no `cond`: it would copy the slots, which loops update in place.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from xform.interpret.cost import iterations_scope
from xform.interpret.lanes import any_alive, predicate, select_alive, store_slice
from xform.interpret.node import gather
from xform.interpret.slots import recomputed_steps, slot_of_each_step
from xform.program.arithmetic import Value
from xform.program.arrays import zeros
from xform.program.ir import Mask

States = list[Value]
Step = Callable[[Value, States], States]
Pull = Callable[[Value, States, States, States, States], tuple[States, States]]

# How many states a `while` loop stores; read when its derivative is traced.
SNAPSHOTS = contextvars.ContextVar("xform_checkpoints_per_while_loop", default=32)

# `_distance` has a table of binomial coefficients C(s + t, s), with t < _COLUMNS and s <= _ROWS,
# for s slots and t runs of a step. For more slots it uses the last row.
_COLUMNS, _ROWS = 32, 1024


class Trail(NamedTuple):
    """The stack of states that a loop has stored for its backward pass; a pytree of arrays.

    It has room for n + 1 states: one for each of the n slots, and an extra one. The extra one is
    filled when all slots are full, with a state that the backward pass uses immediately.

    Attributes:
      count: the number of steps of the longest lane.
      lane_steps: the number of steps of each lane.
      filled: the number of states on the stack.
      steps: for each state, from the bottom of the stack up, the index of the step that starts from
        it, `[n + 1]`. Only the first `filled` entries are used.
      slot_indices: for each position of the stack, the index of its state in `slots`, `[n + 1]`.
      slots: the states, each array with a new leading axis of length n + 1.
    """

    count: Value
    lane_steps: Value
    filled: Value
    steps: Value
    slot_indices: Value
    slots: States


def run_and_store(
    alive: Callable[[States], Value],
    step: Callable[[States], States],
    start: States,
    stored: Mask,
    n: int,
) -> tuple[States, Trail]:
    """Run a loop forward and store some states. Return the final state and the trail.

    Args:
      alive: the condition of the loop, from a state to a bool for each lane.
      step: the body of the loop, from a state to the next state.
      start: the first state.
      stored: which parts of the state are stored, because the backward pass needs them.
      n: the number of slots.
    """
    live = predicate(alive(start))
    zero, zero_steps = (zeros(_as_int32(x)) for x in (any_alive(live), live))
    steps = lax.broadcast(zero, (n + 1,))
    slot_indices = lax.add(steps, np.arange(n + 1, dtype=np.int32))
    slots = [lax.broadcast(x, (n + 1,)) for x in gather(start, stored)]
    trail = Trail(zero, zero_steps, zero, steps, slot_indices, slots)
    # With at most two slots only the first state is stored: the backward pass needs a free slot.
    stride = lax.add(zero, np.int32(1 if n > 2 else 2**30))

    def advance(s: Any) -> Any:
        """Run one step; lanes that have ended keep their state."""
        count, lane_steps, live, x = s
        y = select_alive(live, step(x), x)
        count = lax.add(count, np.int32(1))
        return (
            count,
            *select_alive(live, [lax.broadcast(count, live.shape)], [lane_steps]),
            alive(y),
            y,
        )

    def store_and_advance(s: Any) -> Any:
        """Store the state, and run to the step before which the next one is stored."""
        trail, stride, live, x = s
        if n > 2:
            trail, stride = _make_room(trail, stride, n)
        trail = _store(trail, gather(x, stored))
        next_stored = lax.add(trail.count, stride)
        count, lane_steps, live, x = lax.while_loop(
            lambda s: lax.bitwise_and(any_alive(s[2]), lax.lt(s[0], next_stored)),
            advance,
            (trail.count, trail.lane_steps, live, x),
        )
        return trail._replace(count=count, lane_steps=lane_steps), stride, live, x

    trail, _, _, end = lax.while_loop(
        lambda s: any_alive(s[2]), store_and_advance, (trail, stride, live, list(start))
    )
    return end, trail


def _as_int32(x: Value) -> Any:
    """Return the type of `x` with the dtype int32."""
    aval: Any = jax.typeof(x)
    return aval.update(dtype=np.dtype(np.int32), weak_type=False)


def _make_room(trail: Trail, stride: Value, n: int) -> tuple[Trail, Value]:
    """Until enough slots are free, free every second one and double the stride between states."""

    def full(s: Any) -> Value:
        """Return whether all slots are full; or three quarters, if states were dropped before."""
        filled, stride, *_ = s
        all_slots, most_slots = np.int32(n), np.int32(max(2, 3 * n // 8 * 2))
        return lax.ge(filled, lax.select(lax.eq(stride, np.int32(1)), all_slots, most_slots))

    def drop_every_second(s: Any) -> Any:
        filled, stride, steps, slot_indices = s
        half = lax.div(lax.add(filled, np.int32(1)), np.int32(2))
        return half, lax.mul(stride, np.int32(2)), evens_first(steps), evens_first(slot_indices)

    def evens_first(x: Value) -> Value:
        """Move the elements at even positions to the front; the last element stays."""
        last = lax.slice(x, (n,), (n + 1,))
        return lax.concatenate([*(lax.slice(x, (i,), (n,), (2,)) for i in (0, 1)), last], 0)

    state = trail.filled, stride, trail.steps, trail.slot_indices
    filled, stride, steps, slot_indices = lax.while_loop(full, drop_every_second, state)
    return trail._replace(filled=filled, steps=steps, slot_indices=slot_indices), stride


def _store(trail: Trail, x: States) -> Trail:
    """Push the state `x` before step `trail.count` on the stack."""
    slot = _get(trail.slot_indices, trail.filled)
    return trail._replace(
        filled=lax.add(trail.filled, np.int32(1)),
        steps=_put(trail.steps, trail.count, trail.filled),
        slots=[store_slice(s, v, slot) for s, v in zip(trail.slots, x, strict=True)],
    )


def run_backward(
    trail: Trail,
    last: States,
    read_next: Mask,
    step: Step,
    pull: Pull,
    cts: States,
    sums: States,
    length: int | None = None,
) -> tuple[States, States]:
    """Run the backward pass of a loop, from the last step to the first.

    Args:
      trail: the stored states.
      last: the parts `read_next` of the state after the last step.
      read_next: which stored parts the backward pass of a step reads also from the state after it.
      step: `step(i, x)` advances the stored parts `x` of a state by step i.
      pull: `pull(i, x, after, cts, sums)` is the backward pass of step i. `x` are the stored parts
        before the step, `after` the `read_next` parts after it, `cts` the cotangents of the state
        after it, and `sums` the sums over later steps. It returns the cotangents before the step,
        and new sums.
      cts: the cotangents of the final state.
      sums: the initial sums, zeros. Each cotangent of a constant is a sum over all steps.
      length: the number of steps, if it is known. Its stored states are then at the optimal steps.

    Returns:
      The cotangents of the first state, and the sums over all steps.
    """
    n = trail.steps.shape[0] - 1
    slot_indices = trail.slot_indices
    recomputed = None if length is None else recomputed_steps(length, n)

    # In these loops `end` is the number of steps whose backward pass has not run yet.
    def advance_and_store(s: Any) -> Any:
        """Run from the state before step i to the next step whose state is stored; store it."""
        i, end, filled, steps, x, slots = s
        target = lax.add(i, _distance(lax.sub(end, i), lax.sub(np.int32(n), filled), n))

        def advance(s: Any) -> Any:
            i, x = s
            return lax.add(i, np.int32(1)), step(i, x)

        with iterations_scope(recomputed):
            i, x = lax.while_loop(lambda s: lax.lt(s[0], target), advance, (i, x))
        slot = _get(slot_indices, filled)
        slots = [store_slice(s, v, slot) for s, v in zip(slots, x, strict=True)]
        return i, end, lax.add(filled, np.int32(1)), _put(steps, i, filled), x, slots

    def last_is_on_top(s: Any) -> Value:
        """Return whether the topmost state is the one before the last remaining step."""
        end, filled, steps, slots, *_ = s
        if not slots:
            return lax.gt(end, np.int32(0))
        return lax.eq(_get(steps, _top(filled)), lax.sub(end, np.int32(1)))

    def go_back(s: Any) -> Any:
        """Run the backward pass of one step, and free the slot of the state before it."""
        end, filled, steps, slots, after, cts, sums = s
        end, filled = lax.sub(end, np.int32(1)), _top(filled)
        slot = _get(slot_indices, filled)
        x = [_get(v, slot) for v in slots]
        cts, sums = pull(end, x, after, cts, sums)
        return end, filled, steps, slots, gather(x, read_next), cts, sums

    def recompute_and_go_back(s: Any) -> Any:
        """Store states up to the last step that remains; go back while its state is on top."""
        end, filled, steps, slots, *rest = s
        if slots:
            top = _top(filled)
            i, slot = _get(steps, top), _get(slot_indices, top)
            _, _, filled, steps, _, slots = lax.while_loop(
                lambda s: lax.lt(s[0], lax.sub(s[1], np.int32(1))),
                advance_and_store,
                (i, end, filled, steps, [_get(v, slot) for v in slots], slots),
            )
        with iterations_scope(length):
            return lax.while_loop(last_is_on_top, go_back, (end, filled, steps, slots, *rest))

    start = trail.count, trail.filled, trail.steps, trail.slots, last, cts, sums
    *_, cts, sums = lax.while_loop(
        lambda s: lax.gt(s[0], np.int32(0)), recompute_and_go_back, start
    )
    return cts, sums


def in_lanes(
    lane_steps: Value,
    step: Callable[[States], States],
    pull: Callable[[States, States, States], tuple[States, States]],
) -> tuple[Step, Pull]:
    """Return `step` and `pull` for `run_backward` that leave lanes unchanged after their end.

    Lane number k takes `lane_steps[k]` steps. The argument `step(x)` advances all lanes.
    `pull(x, after, cts)` returns the cotangents before a step, for all lanes, and the terms that
    the step adds to the sums.
    """

    def step_alive_lanes(i: Value, x: States) -> States:
        return select_alive(lax.lt(i, lane_steps), step(x), x)

    def pull_alive_lanes(i: Value, x: States, after: States, cts: States, sums: States):
        alive = lax.lt(i, lane_steps)
        if not (alive.ndim and sums):
            new_cts, terms = pull(x, after, cts)
            return select_alive(alive, new_cts, cts), select_alive(
                alive, list(map(lax.add, sums, terms)), sums
            )
        # The sums are over lanes too. A lane that has ended adds nothing, because its cotangent is
        # zero. It gets the state of the longest lane, because the step may be singular at its own
        # final state.
        longest_lane = lax.argmax(lax.reshape(lane_steps, (lane_steps.size,)), 0, np.int32)

        def replace_ended(states: States) -> States:
            rows = (lax.reshape(v, (lane_steps.size, *v.shape[alive.ndim :])) for v in states)
            longest = [lax.broadcast(_get(v, longest_lane), alive.shape) for v in rows]
            return select_alive(alive, states, longest)

        zero_cts = [zeros(jax.typeof(ct)) for ct in cts]
        alive_cts = select_alive(alive, cts, zero_cts)
        new_cts, terms = pull(replace_ended(x), replace_ended(after), alive_cts)
        return select_alive(alive, new_cts, cts), list(map(lax.add, sums, terms))

    return step_alive_lanes, pull_alive_lanes


def known_length_trail(length: int, n: int, slots: States) -> Trail:
    """Return the trail of a loop of known length that stored states by `slot_of_each_step`."""
    slot_of_step = slot_of_each_step(length, n)
    stored = np.flatnonzero((slot_of_step < n) | (np.arange(length) == length - 1))
    steps = np.zeros(n + 1, np.int32)
    steps[: len(stored)] = stored
    order = np.arange(n + 1, dtype=np.int32)
    # With Explicit mesh axes, the type of an operation's result has a mesh, a constant's has none.
    on_mesh = lambda x: lax.add(lax.full(np.shape(x), np.int32(0)), x)
    count, filled = on_mesh(np.int32(length)), on_mesh(np.int32(len(stored)))
    return Trail(count, count, filled, on_mesh(steps), on_mesh(order), slots)


def _distance(length: Value, free: Value, n: int) -> Value:
    """Return how many of `length` steps to run before the next state is stored.

    The loop has n slots, and `free` of them are free. With s slots, a backward pass over
    `C(s + t, s)` steps is possible if each step runs at most t times. Here s is free + 1, for the
    free slots and the slot of the current state, and t is the least number that suffices for
    `length` steps. The result is a distance for which no step runs more than t times, before and
    after the next stored state. If t is `_COLUMNS` or more, it is not in the table, and the result
    is about _COLUMNS / (s + _COLUMNS) of the length.
    """
    table = _binomials(min(n, _ROWS) + 1)
    one_less = lax.min(free, np.int32(len(table) - 2))
    s = lax.add(one_less, np.int32(1))
    row, row_of_one_less = (_get(table, i) for i in (s, one_less))
    t = lax.reduce_sum(lax.convert_element_type(lax.lt(row, length), np.int32), (0,))
    in_table = lax.lt(t, np.int32(_COLUMNS))
    t = lax.sub(t, np.int32(1))
    best = lax.min(_get(row, t), lax.sub(length, _get(row_of_one_less, t)))
    share = lax.mul(lax.div(length, lax.add(s, np.int32(_COLUMNS))), s)
    distance = lax.select(in_table, best, lax.sub(length, share))
    return lax.select(lax.gt(free, np.int32(0)), distance, lax.sub(length, np.int32(1)))


@functools.lru_cache(maxsize=8)
def _binomials(rows: int) -> np.ndarray:
    """Return a table of C(s + t, s) by s and t; values above 2^30 become 2^30."""
    columns = [np.ones(rows, np.int64)]
    while len(columns) < _COLUMNS:
        columns.append(np.minimum(np.cumsum(columns[-1]), 2**30))
    return np.stack(columns, 1).astype(np.int32)


def _top(filled: Value) -> Value:
    """Return the index of the topmost filled entry of the stack; 0 if it is empty."""
    return lax.max(lax.sub(filled, np.int32(1)), np.int32(0))


def _get(x: Value, i: Value) -> Value:
    """Return `x[i]`."""
    return lax.dynamic_index_in_dim(x, i, 0, False, allow_negative_indices=False)


def _put(x: Value, value: Value, i: Value) -> Value:
    """Return `x` with `value` at index i."""
    return lax.dynamic_update_index_in_dim(x, value, i, 0, allow_negative_indices=False)
