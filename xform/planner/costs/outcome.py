"""What a Plan comes to: the bytes that it keeps, the work that it runs again."""

from __future__ import annotations

from xform._jax import JaxprEqn
from xform.cost import aval_bytes, equation_flops
from xform.interpret.checkpoints import steps_run
from xform.interpret.joint import Plan
from xform.interpret.node import Node, bound, fork_p, gather, join_p
from xform.passes.dce import live
from xform.planner.costs.held import held, held_bytes, token
from xform.planner.costs.recompute import fusible
from xform.planner.simulate.profiles import profile


def recompute_flops(plan: Plan) -> int:
    """FLOPs of the work that does not fuse and that a Plan runs again.

    In all trips of loops, and over all devices that a `shard_map` runs it on; of branches those of
    the dearest.
    """
    if "flops" not in plan.cache:
        plan.cache["flops"] = sum(_flops(eqn, plan) for eqn in plan.order)
    return plan.cache["flops"]


def _flops(eqn: JaxprEqn, plan: Plan) -> int:
    if eqn.primitive is join_p:
        node, plans = eqn.params["node"], plan.inner[eqn.params["node"]]
        runs = node.trips * node.device_count
        again = runs * max(map(recompute_flops, plans), default=0)
        return again + sum(_retraced(node, p) for p in plans)
    if id(eqn) not in plan.recomputed or fusible(eqn):
        return 0
    return equation_flops(bound(eqn))


def _retraced(node: Node, plan: Plan) -> int:
    """FLOPs of the steps that are run again from stored states, on the way to them and in them."""
    if plan.snapshots is None:
        return 0
    joint = plan.joint
    work = lambda wanted: sum(
        equation_flops(bound(e))
        for e in live(joint.forward, wanted, effects=False)
        if not fusible(e)
    )
    further = steps_run(node.trips, plan.snapshots) - max(node.trips - 1, 0)
    first = node.first_carry
    stored = gather(joint.inputs[first:], node.stacked([plan])[first:])
    after = dict(zip(joint.inputs[first:], joint.outputs, strict=False))
    return further * work([after[v] for v in stored]) + node.trips * work(plan.kept)


def kept_bytes(plan: Plan) -> int:
    """Bytes that a Plan keeps on each device, in all trips of loops."""
    if "bytes" not in plan.cache:
        plan.cache["bytes"] = held_bytes(held(plan))
    return plan.cache["bytes"]


def least_bytes(plan: Plan, backend: str) -> int:
    """Bytes that are live at once whatever else is: arguments, with what is kept, or results.

    What is kept may lie where a result will, or on the chip.
    """
    joint = plan.joint
    size = lambda atoms: sum(aval_bytes(v.aval) for v in atoms)
    outputs = size(joint.outputs) + size(joint.backward_outputs)
    return size(joint.inputs) + max(kept_bytes(plan) - profile(backend).on_chip, outputs)


def sent_bytes(plan: Plan) -> int:
    """Bytes that a Plan keeps in other memories, in all trips of loops."""
    if "sent" not in plan.cache:
        plan.cache["sent"] = sum(v.total_bytes for v in held(plan)) - kept_bytes(plan)
    return plan.cache["sent"]


def waiting_bytes(plan: Plan) -> int:
    """Bytes that a Plan keeps, with what loops that are run again keep for their way back."""
    return kept_bytes(plan) + _recompute_bytes(plan)


def _recompute_bytes(plan: Plan) -> int:
    """What a loop within keeps for one trip, or step, until it is gone back over."""
    kept = set(plan.kept)
    most = waits = 0
    for eqn in plan.joint.forward:
        if eqn.primitive is fork_p:
            node = eqn.params["node"]
            plans = plan.inner[node]
            own = held_bytes(token(node, plans))
            inside = max(map(_recompute_bytes, plans), default=0)
            if eqn.outvars[-1] not in kept:
                most = max(most, own + inside)
            else:
                most = max(most, inside)
                waits += 0 if plan.snapshots is None else own
    return most + waits
