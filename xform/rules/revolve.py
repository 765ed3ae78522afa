"""A scan that stores some of its states and recomputes the others in the backward pass.

In the forward pass it stores its state before some steps, the best ones for a loop of its length.
The backward pass recomputes the state before each step from the nearest stored state. There it runs
the step once more, saves the values of the schedule, and pulls back over the step. Source: Griewank
and Walther, "Algorithm 799: revolve", 2000.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from xform._jax import Var, cotangent_aval
from xform.interpret import emit
from xform.interpret.checkpoints import States, known_length_trail, run_backward, slot_of_each_step
from xform.interpret.joint import Schedule
from xform.interpret.lanes import forward_only, store_slice
from xform.interpret.node import gather, present_mask, spread
from xform.program.arithmetic import Value, instantiate
from xform.program.ir import Mask
from xform.program.source import frame


def forward(node: Any, schedule: Schedule, n: int, xs: Sequence[Value], used: Mask):
    """Run a scan's forward part; return outputs (None where not `used`) and n stored states."""
    joint, body, nk = node.joint, node.body, node.body.n_carry
    stored = node.stacked_inputs([schedule])
    ys = gather(joint.outputs[nk:], used[nk:])
    carried = node.live_carry(used[:nk], [*ys, *gather(joint.inputs, stored)], {})
    carries = gather(joint.outputs[:nk], carried)
    consts, carry, seq = body.parts(xs)
    on = body.parts(stored)[1]
    at = slot_of_each_step(node.iterations, n)
    slots = [lax.broadcast(x, (n + 1,)) for x in gather(carry, on)]

    def step(state: Any, x: Any):
        (carry, slots), (i, seq) = state, x
        carry = spread(carry, carried)
        slots = [store_slice(s, v, i) for s, v in zip(slots, gather(carry, on), strict=True)]
        env = _known(joint.inputs, [*consts, *carry, *seq])
        out = emit.values(schedule, [*carries, *ys], env)
        return (out[: len(carries)], slots), out[len(carries) :]

    order = jnp.asarray(at[::-1] if node.options["reverse"] else at)
    state, stacks = lax.scan(step, (gather(carry, carried), slots), (order, seq), **node.options)
    last = spread(state[0], carried)
    outs = [x if u else None for x, u in zip(last, used[:nk], strict=True)]
    return [*outs, *spread(stacks, used[nk:])], state[1]


def backward(node: Any, schedule: Schedule, n: int, slots: States, xs: Sequence[Value],
             seeds: Sequence[Value]) -> list[Value]:  # fmt: skip
    """Run the backward part of a scan's node, from its n stored states."""
    joint, body, nk, length = node.joint, node.body, node.body.n_carry, node.iterations
    consts, fixed, seq = body.parts(xs)
    stored = body.parts(node.stacked_inputs([schedule]))[1]
    hoisted = node.hoisted_values(schedule)
    with emit.recompute_scope():
        once = emit.values_by_variable(
            schedule, gather(schedule.saved, hoisted), _known(joint.inputs, xs)
        )
    each = [v for v, on in zip(schedule.saved, hoisted, strict=True) if not on]
    on = node.moving(present_mask(seeds))
    cts, sums, ct_ys = node.starts(seeds, on)
    scanned = body.parts(node.eqn.invars)[2]
    n_sums = len(sums)
    stacks = instantiate([None] * len(scanned), scanned, on.seq, cotangent_aval)
    if not length:
        return node.as_results([*sums, *cts, *stacks], on)

    def at(i: Value) -> Value:
        return lax.sub(np.int32(length - 1), i) if node.options["reverse"] else i

    def inputs(i: Value, x: States) -> list[Value]:
        carry = [b if a is None else a for a, b in zip(spread(x, stored), fixed, strict=True)]
        return [*consts, *carry, *(None if s is None else _get(s, at(i)) for s in seq)]

    def step(i: Value, x: States) -> States:
        env = _known(joint.inputs, inputs(i, x))
        moving = gather(joint.outputs[:nk], stored)
        with emit.recompute_scope():
            return emit.values(schedule, moving, {**env, **once}, effects=False)

    def pull(i: Value, x: States, after: States, cts: States, accumulators: Any):
        sums, stacks = accumulators[:n_sums], accumulators[n_sums:]
        args = inputs(i, x)
        with emit.recompute_scope():
            kept = {
                **emit.values_by_variable(schedule, each, {**_known(joint.inputs, args), **once}),
                **once,
            }
        step_seeds = node.step_seeds(cts, [_get(ct, at(i)) for ct in ct_ys], on)
        out = emit.backward(schedule, [kept[v] for v in schedule.saved], args, step_seeds, True)
        ct_consts, ct_carry, ct_seq = body.parts(spread(out, joint.results))
        sums = list(map(lax.add, sums, gather(ct_consts, on.consts)))
        pairs = zip(stacks, gather(ct_seq, on.seq), strict=True)
        return node.next_cts(ct_carry, on), [*sums, *(store_slice(s, ct, at(i)) for s, ct in pairs)]

    trail = known_length_trail(length, n, slots)
    nothing = (False,) * sum(stored)
    cts, accumulators = run_backward(trail, [], nothing, step, pull, cts, [*sums, *stacks])
    where = frame(node.eqn)
    results = [*accumulators[:n_sums], *cts, *accumulators[n_sums:]]
    return node.as_results([forward_only(ct, where) for ct in results], on)


def _known(variables: Sequence[Var], values: Sequence[Value]) -> dict[Var, Value]:
    return {v: x for v, x in zip(variables, values, strict=True) if x is not None}


def _get(x: Value, i: Value) -> Value:
    return lax.dynamic_index_in_dim(x, i, 0, False, allow_negative_indices=False)
