"""The costs of a Schedule, a plan for one program: the bytes it saves, the work it recomputes."""

from __future__ import annotations

from xform._jax import JaxprEqn
from xform.interpret.checkpoints import steps_run
from xform.interpret.cost import aval_bytes, equation_flops
from xform.interpret.joint import Schedule
from xform.interpret.node import Node, fork_p, gather, join_p, user_equation
from xform.passes.dce import live
from xform.planner.costs.recompute import fusible
from xform.planner.costs.saved_values import device_bytes, expand_token, saved_values
from xform.planner.simulate.profiles import profile


def recompute_flops(schedule: Schedule) -> int:
    """Return the FLOPs of the recomputed equations that XLA does not fuse.

    The count includes all iterations of loops and all devices of a `shard_map`. A cond counts its
    most expensive branch.
    """
    if "flops" not in schedule.cache:
        schedule.cache["flops"] = sum(_flops(eqn, schedule) for eqn in schedule.order)
    return schedule.cache["flops"]


def _flops(eqn: JaxprEqn, schedule: Schedule) -> int:
    """Return the FLOPs that an equation of a schedule recomputes, in its nested programs too."""
    if eqn.primitive is join_p:
        node, schedules = eqn.params["node"], schedule.inner[eqn.params["node"]]
        runs = node.iterations * node.device_count
        recomputed = runs * max(map(recompute_flops, schedules), default=0)
        return recomputed + sum(_restart_flops(node, p) for p in schedules)
    if id(eqn) not in schedule.recomputed or fusible(eqn):
        return 0
    return equation_flops(user_equation(eqn))


def _restart_flops(node: Node, schedule: Schedule) -> int:
    """FLOPs of recomputing a loop from its stored states; 0 if it stores every state.

    Some steps run again to recompute the states that are not stored. Then each step runs once more
    to compute its residuals.
    """
    if schedule.snapshots is None:
        return 0
    joint = schedule.joint
    work = lambda wanted: sum(
        equation_flops(user_equation(e))
        for e in live(joint.forward, wanted, effects=False)
        if not fusible(e)
    )
    extra_steps = steps_run(node.iterations, schedule.snapshots) - max(node.iterations - 1, 0)
    first = node.first_carry
    stored = gather(joint.inputs[first:], node.stacked_inputs([schedule])[first:])
    after = dict(zip(joint.inputs[first:], joint.outputs, strict=False))
    return extra_steps * work([after[v] for v in stored]) + node.iterations * work(schedule.saved)


def saved_bytes(schedule: Schedule) -> int:
    """Return the bytes that a Schedule saves on each device, in all iterations of loops."""
    if "bytes" not in schedule.cache:
        schedule.cache["bytes"] = device_bytes(saved_values(schedule))
    return schedule.cache["bytes"]


def peak_lower_bound(schedule: Schedule, backend: str) -> int:
    """Return a lower bound on the peak memory, from the Schedule alone.

    It adds the arguments and the larger of two terms: the saved values, less the on-chip memory of
    the backend, and the outputs. These two are not added, because a saved value may lie in the
    buffer of an output that is written later.
    """
    joint = schedule.joint
    size = lambda atoms: sum(aval_bytes(v.aval) for v in atoms)
    outputs = size(joint.outputs) + size(joint.backward_outputs)
    return size(joint.inputs) + max(saved_bytes(schedule) - profile(backend).on_chip_bytes, outputs)


def offloaded_bytes(schedule: Schedule) -> int:
    """Return the bytes that a Schedule offloads to other memories, in all iterations of loops."""
    if "sent" not in schedule.cache:
        schedule.cache["sent"] = sum(v.total_bytes for v in saved_values(schedule)) - saved_bytes(
            schedule
        )
    return schedule.cache["sent"]


def residual_bytes(schedule: Schedule) -> int:
    """Return the bytes that a Schedule saves, with the residuals of recomputed loops and calls.

    A loop or call that is recomputed has its own residuals while its backward part runs.
    """
    return saved_bytes(schedule) + _recompute_bytes(schedule)


def _recompute_bytes(schedule: Schedule) -> int:
    """Most bytes of residuals that exist only while one nested node, or one step, runs backward.

    The token of a node that is recomputed lives only during the backward part of that node. In the
    body of a loop that stores some states, a saved token lives for one step of that loop.
    """
    saved = set(schedule.saved)
    most = per_step = 0
    for eqn in schedule.joint.forward:
        if eqn.primitive is fork_p:
            node = eqn.params["node"]
            schedules = schedule.inner[node]
            own = device_bytes(expand_token(node, schedules))
            inside = max(map(_recompute_bytes, schedules), default=0)
            if eqn.outvars[-1] not in saved:
                most = max(most, own + inside)
            else:
                most = max(most, inside)
                per_step += 0 if schedule.snapshots is None else own
    return most + per_step
