"""Where the backward part waits for gradients before it goes on to the layer before.

The gradient of a weight is a product of a layer's input and a cotangent. Nothing needs it before
the update, so on several devices the GPU compiler puts it off and combines the sums over devices of
several layers. The operands of all these products then stay in memory. A barrier between two layers
prevents that: the one cotangent that goes on waits for the gradients that are complete.

Only XLA:GPU needs this, for several devices. The cost in time was not measured. The switch is
`gradients_first`: with JAX 0.10.2, six layers of a Llama on eight H100s took 2.40 GiB with it and
2.98 without (`experiments/production`).
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from xform._jax import JaxprEqn, Var
from xform.interpret.joint import Schedule, reads_of
from xform.interpret.node import join_p
from xform.steering.barrier import can_wait
from xform.steering.settings import steering
from xform.steering.wait import Wait, Waits, is_work


def with_gradients_first(schedule: Schedule, waits: Waits) -> Waits:
    """Return `waits`, and those of a cotangent for the gradients of the layers after it.

    A cotangent waits where no other cotangent is needed any more, such as between two layers. It
    must be in memory anyway: work reads it, or several equations do.

    There are no such waits on one device, where the compiler does not put gradients off.
    """
    if not steering().gradients_first:
        return waits
    key = "gradients first"
    if key not in schedule.cache:
        several = any(map(_is_shared, schedule.joint.program.equations))
        schedule.cache[key] = _gradient_waits(schedule) if several else {}
    added: Mapping[int, Wait] = schedule.cache[key]
    at = sorted({*added, *waits})
    return {i: [*([added[i]] if i in added else []), *waits.get(i, ())] for i in at}


def _gradient_waits(schedule: Schedule) -> dict[int, Wait]:
    """Return the wait before each equation of `Schedule.order` that begins another layer."""
    joint, order = schedule.joint, schedule.order
    gradients = _gradients(schedule)
    first = {v for e in joint.backward for v in e.outvars
             if v in gradients and gradients.isdisjoint(reads_of(e, schedule.inner))}  # fmt: skip
    last_read: dict[Var, int] = {}
    in_memory: set[Var] = set()
    for i, eqn in enumerate(order):
        if id(eqn) in joint.backward_ids:
            reads = reads_of(eqn, schedule.inner)
            in_memory.update(v for v in reads if v in last_read or is_work(eqn))
            last_read |= dict.fromkeys(reads, i)
    live = {v for v in joint.seeds if v in last_read}
    waits: dict[int, Wait] = {}
    complete: list[tuple[Var, JaxprEqn]] = []
    for i, eqn in enumerate(order[:-1]):
        if id(eqn) not in joint.backward_ids:
            continue
        live |= {v for v in eqn.outvars if v in last_read and v not in gradients}
        live = {v for v in live if last_read[v] > i}
        complete += [(v, eqn) for v in eqn.outvars if v in first and can_wait(v.aval)]
        if len(live) == 1 and complete and not live.isdisjoint(in_memory):
            (cotangent,) = live
            # The results of a loop are complete together.
            seeds = [v for v, made in complete if made is not eqn or not _is_loop(eqn)]
            if seeds and can_wait(cotangent.aval):
                waits[i + 1] = Wait((cotangent,), tuple(seeds), "gpu")
            complete = []
    return waits


def _gradients(schedule: Schedule) -> Set[Var]:
    """Return the values of the backward part that only results depend on, without more work.

    They are the gradients, before and after conversions and sums.
    """
    joint = schedule.joint
    results = {v for v in joint.backward_outputs if isinstance(v, Var)}
    readers: dict[Var, list[JaxprEqn]] = {}
    found: set[Var] = set()
    for eqn in reversed(joint.backward):
        for v in eqn.outvars:
            after = readers.get(v, [])
            if not after and v not in results:
                continue
            if not any(map(is_work, after)) and all(
                u in found or not (u in readers or u in results) for e in after for u in e.outvars
            ):
                found.add(v)
        for v in reads_of(eqn, schedule.inner):
            readers.setdefault(v, []).append(eqn)
    return found


def _is_shared(eqn: JaxprEqn) -> bool:
    """Return whether an equation says how a value is sharded over several devices."""
    meshes = [getattr(eqn.params.get("sharding"), "mesh", None)]
    meshes += [getattr(getattr(v.aval, "sharding", None), "mesh", None) for v in eqn.outvars]
    return any(mesh is not None and mesh.size > 1 for mesh in meshes)


def _is_loop(eqn: JaxprEqn) -> bool:
    """Return whether an equation is the backward pass of a loop."""
    return eqn.primitive is join_p and eqn.params["node"].loop
