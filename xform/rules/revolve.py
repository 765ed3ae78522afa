"""Reverse mode of a scan that stores only some of its states, and recomputes the others.

`forward` runs the scan and stores its state, the carry, before some of the steps. The choice is
optimal for a loop of its length. `backward` goes back over the steps. It recomputes the state
before each step from the nearest stored state. Then it runs the step again, keeps the values that
the schedule saves until the step is done, and pulls the cotangents back over the step. Source:
Griewank and Walther, "Algorithm 799: revolve", 2000.

`node` is the Node of the scan (`xform.rules.loop`). Its Joint is the forward and backward pass of
the body. A *slot* is a place for one state. The *seeds* are the cotangents of the scan's outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from xform._jax import Var, cotangent_aval
from xform.interpret import emit
from xform.interpret.checkpoints import States, known_length_trail, run_backward
from xform.interpret.joint import Schedule
from xform.interpret.keys import unused_keys
from xform.interpret.lanes import forward_only, store_slice
from xform.interpret.loop_state import recomputed_equations
from xform.interpret.node import gather, present_mask, spread
from xform.interpret.repeat import check_repeatable
from xform.interpret.slots import slot_of_each_step
from xform.program.arithmetic import Value, instantiate
from xform.program.ir import Mask
from xform.program.source import frame


def forward(node: Any, schedule: Schedule, n: int, xs: Sequence[Value], used: Mask):
    """Run the scan and store `n` of its states.

    Returns the outputs (None where not `used`), and the slots: for each part of the state that the
    backward pass needs, the stored values along a new leading axis.
    """
    joint, body, n_carry = node.joint, node.body, node.body.n_carry
    next_value = dict(zip(body.parts(joint.inputs)[1], joint.outputs, strict=False))
    check_repeatable(
        recomputed_equations(joint, next_value),
        "plan for a scan",
        "the body of the scan",
        "the plan stores only some states of the scan, so the backward pass runs the body again",
        "make a new plan: xform.plan proposes no such plan for this scan",
    )
    stacked_inputs = node.stacked_inputs([schedule])
    ys = gather(joint.outputs[n_carry:], used[n_carry:])
    carried = node.live_carry(used[:n_carry], [*ys, *gather(joint.inputs, stacked_inputs)], {})
    carries = gather(joint.outputs[:n_carry], carried)
    consts, carry, scanned = body.parts(xs)
    stored = body.parts(stacked_inputs)[1]
    slot_numbers = slot_of_each_step(node.iterations, n)
    slots = [lax.broadcast(x, (n + 1,)) for x in gather(carry, stored)]

    def step(state: Any, x: Any):
        (carry, slots), (i, slices) = state, x
        carry = spread(carry, carried)
        slots = [store_slice(s, v, i) for s, v in zip(slots, gather(carry, stored), strict=True)]
        env = _environment(joint.inputs, [*consts, *carry, *slices])
        out = emit.values(schedule, [*carries, *ys], env)
        return (out[: len(carries)], slots), out[len(carries) :]

    numbers = jnp.asarray(slot_numbers[::-1] if node.options["reverse"] else slot_numbers)
    start = gather(carry, carried), slots
    state, stacks = lax.scan(step, start, (numbers, scanned), **node.options)
    last = spread(state[0], carried)
    outs = [x if u else None for x, u in zip(last, used[:n_carry], strict=True)]
    return [*outs, *spread(stacks, used[n_carry:])], state[1]


def backward(node: Any, schedule: Schedule, n: int, slots: States, xs: Sequence[Value],
             seeds: Sequence[Value]) -> list[Value]:  # fmt: skip
    """Return the cotangents of the scan's inputs, from its `n` stored states in `slots`."""
    joint, body, n_carry, length = node.joint, node.body, node.body.n_carry, node.iterations
    consts, initial_carry, scanned = body.parts(xs)
    stored = body.parts(node.stacked_inputs([schedule]))[1]
    is_hoisted = node.hoisted_values(schedule)
    with emit.recompute_scope():
        hoisted = emit.values_by_variable(
            schedule, gather(schedule.saved, is_hoisted), _environment(joint.inputs, xs)
        )
    saved_in_step = [v for v, on in zip(schedule.saved, is_hoisted, strict=True) if not on]
    on = node.has_cotangent(present_mask(seeds))
    cts, sums, ct_ys = node.initial_cts(seeds, on)
    variables = body.parts(node.eqn.invars)[2]
    n_sums = len(sums)
    stacks = instantiate([None] * len(variables), variables, on.scanned, cotangent_aval)
    if not length:
        return node.as_results([*sums, *cts, *stacks], on)

    def index(i: Value) -> Value:
        """Return the index of step `i` in the scanned inputs."""
        return lax.sub(np.int32(length - 1), i) if node.options["reverse"] else i

    def inputs(i: Value, x: States) -> list[Value]:
        """Return the body's inputs in step `i`, from the stored parts `x` of the state."""
        pairs = zip(spread(x, stored), initial_carry, strict=True)
        carry = [b if a is None else a for a, b in pairs]
        slices = (None if s is None else _get(s, index(i)) for s in scanned)
        return unused_keys([*consts, *carry, *slices])

    def step(i: Value, x: States) -> States:
        """Return the stored parts of the state after step `i`."""
        env = _environment(joint.inputs, inputs(i, x))
        next_carry = gather(joint.outputs[:n_carry], stored)
        with emit.recompute_scope():
            return emit.values(schedule, next_carry, {**env, **hoisted}, effects=False)

    def pull(i: Value, x: States, after: States, cts: States, accumulators: Any):
        """Pull cotangents back over step `i`, and add the results to the accumulators."""
        sums, stacks = accumulators[:n_sums], accumulators[n_sums:]
        args = inputs(i, x)
        env = {**_environment(joint.inputs, args), **hoisted}
        with emit.recompute_scope():
            saved = {**emit.values_by_variable(schedule, saved_in_step, env), **hoisted}
        step_seeds = node.step_seeds(cts, [_get(ct, index(i)) for ct in ct_ys], on)
        out = emit.backward(schedule, [saved[v] for v in schedule.saved], args, step_seeds, True)
        ct_consts, ct_carry, ct_scanned = body.parts(spread(out, joint.results))
        sums = list(map(lax.add, sums, gather(ct_consts, on.consts)))
        pairs = zip(stacks, gather(ct_scanned, on.scanned), strict=True)
        stacks = [store_slice(s, ct, index(i)) for s, ct in pairs]
        return node.carried_cts(ct_carry, on), [*sums, *stacks]

    trail = known_length_trail(length, n, slots)
    read_next = (False,) * sum(stored)  # `pull` reads no part of the state after a step
    cts, accumulators = run_backward(trail, [], read_next, step, pull, cts, [*sums, *stacks],
                                     length)  # fmt: skip
    where = frame(node.eqn)
    results = [*accumulators[:n_sums], *cts, *accumulators[n_sums:]]
    return node.as_results([forward_only(ct, where) for ct in results], on)


def _environment(variables: Sequence[Var], values: Sequence[Value]) -> dict[Var, Value]:
    """Return a dict from variables to their values, without values that are None."""
    return {v: x for v, x in zip(variables, values, strict=True) if x is not None}


def _get(x: Value, i: Value) -> Value:
    """Return `x[i]`."""
    return lax.dynamic_index_in_dim(x, i, 0, False, allow_negative_indices=False)
