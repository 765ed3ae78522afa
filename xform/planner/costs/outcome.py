"""What a Schedule comes to: the bytes that it keeps, the work that it runs again."""

from __future__ import annotations

from xform._jax import JaxprEqn
from xform.cost import aval_bytes, equation_flops
from xform.interpret.checkpoints import steps_run
from xform.interpret.joint import Schedule
from xform.interpret.node import Node, bound, fork_p, gather, join_p
from xform.passes.dce import live
from xform.planner.costs.held import held, held_bytes, token
from xform.planner.costs.recompute import fusible
from xform.planner.simulate.profiles import profile


def recompute_flops(schedule: Schedule) -> int:
    """FLOPs of the work that does not fuse and that a Schedule runs again.

    In all trips of loops, and over all devices that a `shard_map` runs it on; of branches those of
    the dearest.
    """
    if "flops" not in schedule.cache:
        schedule.cache["flops"] = sum(_flops(eqn, schedule) for eqn in schedule.order)
    return schedule.cache["flops"]


def _flops(eqn: JaxprEqn, schedule: Schedule) -> int:
    if eqn.primitive is join_p:
        node, schedules = eqn.params["node"], schedule.inner[eqn.params["node"]]
        runs = node.trips * node.device_count
        again = runs * max(map(recompute_flops, schedules), default=0)
        return again + sum(_retraced(node, p) for p in schedules)
    if id(eqn) not in schedule.recomputed or fusible(eqn):
        return 0
    return equation_flops(bound(eqn))


def _retraced(node: Node, schedule: Schedule) -> int:
    """FLOPs of the steps that are run again from stored states, on the way to them and in them."""
    if schedule.snapshots is None:
        return 0
    joint = schedule.joint
    work = lambda wanted: sum(
        equation_flops(bound(e))
        for e in live(joint.forward, wanted, effects=False)
        if not fusible(e)
    )
    further = steps_run(node.trips, schedule.snapshots) - max(node.trips - 1, 0)
    first = node.first_carry
    stored = gather(joint.inputs[first:], node.stacked([schedule])[first:])
    after = dict(zip(joint.inputs[first:], joint.outputs, strict=False))
    return further * work([after[v] for v in stored]) + node.trips * work(schedule.kept)


def kept_bytes(schedule: Schedule) -> int:
    """Bytes that a Schedule keeps on each device, in all trips of loops."""
    if "bytes" not in schedule.cache:
        schedule.cache["bytes"] = held_bytes(held(schedule))
    return schedule.cache["bytes"]


def least_bytes(schedule: Schedule, backend: str) -> int:
    """Bytes that are live at once whatever else is: arguments, with what is kept, or results.

    What is kept may lie where a result will, or on the chip.
    """
    joint = schedule.joint
    size = lambda atoms: sum(aval_bytes(v.aval) for v in atoms)
    outputs = size(joint.outputs) + size(joint.backward_outputs)
    return size(joint.inputs) + max(kept_bytes(schedule) - profile(backend).on_chip, outputs)


def sent_bytes(schedule: Schedule) -> int:
    """Bytes that a Schedule keeps in other memories, in all trips of loops."""
    if "sent" not in schedule.cache:
        schedule.cache["sent"] = sum(v.total_bytes for v in held(schedule)) - kept_bytes(schedule)
    return schedule.cache["sent"]


def waiting_bytes(schedule: Schedule) -> int:
    """Bytes that a Schedule keeps, with what loops that are run again keep for their way back."""
    return kept_bytes(schedule) + _recompute_bytes(schedule)


def _recompute_bytes(schedule: Schedule) -> int:
    """What a loop within keeps for one trip, or step, until it is gone back over."""
    kept = set(schedule.kept)
    most = waits = 0
    for eqn in schedule.joint.forward:
        if eqn.primitive is fork_p:
            node = eqn.params["node"]
            schedules = schedule.inner[node]
            own = held_bytes(token(node, schedules))
            inside = max(map(_recompute_bytes, schedules), default=0)
            if eqn.outvars[-1] not in kept:
                most = max(most, own + inside)
            else:
                most = max(most, inside)
                waits += 0 if schedule.snapshots is None else own
    return most + waits
