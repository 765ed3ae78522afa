"""The costs of a Schedule: the bytes that it saves or offloads, and the FLOPs that it recomputes.

A *Schedule* says for one program which values of the forward pass are saved for the backward pass,
and which equations are recomputed in it. A *node* is a loop, branch or call of that program. The
programs inside a node have Schedules of their own. The values that they save form the node's
*token*, which is one value of the program around the node. A node whose token is not saved is
recomputed as a whole, just before its backward pass. The equation of a node is `fork_p` in the
forward pass, and `join_p` in the backward pass.
"""

from __future__ import annotations

from xform._jax import JaxprEqn
from xform.interpret.cost import aval_bytes, equation_flops
from xform.interpret.joint import Schedule
from xform.interpret.node import Node, fork_p, gather, join_p, user_equation
from xform.interpret.slots import recomputed_steps
from xform.passes.dce import live
from xform.planner.costs.recompute import fusible
from xform.planner.costs.saved_values import device_bytes, expand_token, saved_values
from xform.planner.simulate.profiles import backend_profile


def recompute_flops(schedule: Schedule) -> int:
    """Return the FLOPs of the recomputed equations that XLA does not fuse.

    The sum includes all iterations of loops and all devices of a `shard_map`. A cond counts its
    most expensive branch.
    """
    if "flops" not in schedule.cache:
        schedule.cache["flops"] = sum(_flops(eqn, schedule) for eqn in schedule.order)
    return schedule.cache["flops"]


def _flops(eqn: JaxprEqn, schedule: Schedule) -> int:
    """Return the FLOPs that one equation of the backward pass recomputes.

    A recomputed equation adds its own FLOPs. The backward pass of a node adds the FLOPs that are
    recomputed in the programs inside.
    """
    if eqn.primitive is join_p:
        node, schedules = eqn.params["node"], schedule.inner[eqn.params["node"]]
        runs = node.iterations * node.device_count
        recomputed = runs * max(map(recompute_flops, schedules), default=0)
        return recomputed + sum(_restart_flops(node, p) for p in schedules)
    if id(eqn) not in schedule.recomputed or fusible(eqn):
        return 0
    return equation_flops(user_equation(eqn))


def _restart_flops(node: Node, schedule: Schedule) -> int:
    """Return the FLOPs of recomputing a loop from its stored states; 0 if it stores all states.

    `schedule` is that of the loop's body. Some steps run again to recompute the states that are not
    stored. Then each step runs once more to compute the values that it saves.
    """
    if schedule.snapshots is None:
        return 0
    joint = schedule.joint
    flops_to_compute = lambda values: sum(
        equation_flops(user_equation(e))
        for e in live(joint.forward, values, effects=False)
        if not fusible(e)
    )
    extra_steps = recomputed_steps(node.iterations, schedule.snapshots)
    first = node.first_carry
    stored_carries = gather(joint.inputs[first:], node.stacked_inputs([schedule])[first:])
    next_carry = dict(zip(joint.inputs[first:], joint.outputs, strict=False))
    restart = extra_steps * flops_to_compute([next_carry[v] for v in stored_carries])
    return restart + node.iterations * flops_to_compute(schedule.saved)


def saved_bytes(schedule: Schedule) -> int:
    """Return the bytes that a Schedule saves on each device, in all iterations of loops."""
    if "bytes" not in schedule.cache:
        schedule.cache["bytes"] = device_bytes(saved_values(schedule))
    return schedule.cache["bytes"]


def peak_lower_bound(schedule: Schedule, backend: str) -> int:
    """Return a lower bound on the peak memory, without a simulation.

    It is the bytes of the arguments plus the larger of two terms. One is the saved values, less the
    on-chip memory of the backend. The other is the outputs. The two are not added, because a saved
    value may use the buffer of an output that is written later.
    """
    joint = schedule.joint
    size = lambda atoms: sum(aval_bytes(v.aval) for v in atoms)
    outputs = size(joint.outputs) + size(joint.backward_outputs)
    return size(joint.inputs) + max(
        saved_bytes(schedule) - backend_profile(backend).on_chip_bytes, outputs
    )


def offloaded_bytes(schedule: Schedule) -> int:
    """Return the bytes that a Schedule offloads to other memories, in all iterations of loops."""
    if "offloaded" not in schedule.cache:
        total = sum(v.total_bytes for v in saved_values(schedule))
        schedule.cache["offloaded"] = total - saved_bytes(schedule)
    return schedule.cache["offloaded"]


def residual_bytes(schedule: Schedule) -> int:
    """Return the saved bytes, plus the most bytes that a recomputed loop or call holds at a time.

    A recomputed loop or call saves values inside, but only for the time of its own backward pass.
    """
    return saved_bytes(schedule) + _short_lived_bytes(schedule)


def _short_lived_bytes(schedule: Schedule) -> int:
    """Return the most bytes of saved values that exist only while a part of a Schedule runs.

    The token of a recomputed node exists only during the backward pass of that node. In the body of
    a loop that stores only some states, a saved token exists for one step of that loop.
    """
    saved = set(schedule.saved)
    most = per_step = 0
    for eqn in schedule.joint.forward:
        if eqn.primitive is fork_p:
            node = eqn.params["node"]
            schedules = schedule.inner[node]
            own = device_bytes(expand_token(node, schedules))
            inside = max(map(_short_lived_bytes, schedules), default=0)
            if eqn.outvars[-1] not in saved:
                most = max(most, own + inside)
            else:
                most = max(most, inside)
                per_step += 0 if schedule.snapshots is None else own
    return most + per_step
