"""The rows of a plan: each value is saved, offloaded or made again, at some cost."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from xform._jax import JaxprEqn, Literal, Var, name_p
from xform.interpret.cost import aval_bytes, equation_flops
from xform.interpret.joint import Schedule, reads_of
from xform.interpret.node import Node, bound, fork_p
from xform.planner.costs.held import state_why
from xform.policies import TAG
from xform.program.source import frame


@dataclasses.dataclass(frozen=True)
class Row:
    """One value that the backward pass reads.

    Attributes:
      value: its name in the plan: the loops and calls that it is in, its operation, and the place
        of that in the program, as in `scan.4/dot_general.17`.
      decision: "SAVE", "RECOMPUTE" or "OFFLOAD".
      shape, dtype: in one trip.
      trip_bytes: bytes of one trip, on each device.
      loops: trip counts of the loops that stack it, outermost first.
      operation: the primitive that makes it, with the name that `checkpoint_name` gave.
      where: the user's line, `file:line (function)`, inside loop bodies and calls.
      why: why it is kept, or not.
      marginal_flops: for a saved value, what making it again would add; for a recomputed one, what
        saving it would spare. All trips together, over all devices.
    """

    value: str
    decision: str
    shape: tuple[int, ...]
    dtype: str
    trip_bytes: int
    loops: tuple[int, ...]
    operation: str
    where: str
    why: str
    marginal_flops: int

    @property
    def type(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def marginal_bytes(self) -> int:
        """Bytes of all trips: those that it takes, or that saving it would take."""
        return self.trip_bytes * math.prod(self.loops)


def rows_of(schedule: Schedule) -> list[Row]:
    """The rows of a whole function's Schedule, by falling bytes."""
    return sorted(_rows(schedule, "", (), 1), key=lambda r: (-r.marginal_bytes, r.value))


def _rows(schedule: Schedule, path: str, loops: tuple[int, ...], times: int) -> Iterator[Row]:
    """Of a Schedule that runs so many `times`; its values are stacked over `loops`."""
    inside = _Inside(schedule, times)
    kept = set(schedule.kept)
    for i, eqn in enumerate(schedule.joint.forward):
        node = eqn.params["node"] if eqn.primitive is fork_p else None
        name = f"{path}{(node.eqn if node else eqn).primitive.name}.{i}"
        for v in eqn.outvars[: -1 if node else None]:
            if v in kept:
                decision = "OFFLOAD" if v in schedule.offloaded else "SAVE"
                yield _row(name, decision, v, eqn, loops, schedule.why[v], inside.spared_by(v))
            elif v in inside.wanted and id(eqn) in schedule.recomputed and aval_bytes(v.aval):
                why = "cheaper to run again than to keep"
                yield _row(name, "RECOMPUTE", v, eqn, loops, why, inside.served(v))
        if node is not None and node in schedule.inner:
            # What a loop that is run again keeps lasts for one trip of those around it.
            around = loops if eqn.outvars[-1] in kept else ()
            yield from _node(node, schedule.inner[node], name, around, times)


def _node(node: Node, schedules: Sequence[Schedule], name: str, loops: tuple[int, ...], times: int
          ) -> Iterator[Row]:  # fmt: skip
    inner = (*loops, node.trips) if node.loop and node.trips > 1 else loops
    if schedules[0].snapshots is not None:
        inner = ()  # what is kept lasts for one step
    for k, p in enumerate(schedules):
        branch = f"[{k}]" if len(schedules) > 1 else ""
        yield from _rows(p, f"{name}{branch}/", inner, times * node.trips * node.device_count)
    for i, n in enumerate(node.copies(schedules)):
        if n:
            v = schedules[0].joint.inputs[i]
            label = f"{name}/carry.{i - node.first_carry}"
            decision = "OFFLOAD" if v in schedules[0].offloaded else "SAVE"
            yield _row(label, decision, v, node.eqn, (*loops, n), state_why(schedules[0]), 0)


def _row(name: str, decision: str, v: Any, eqn: JaxprEqn, loops: tuple[int, ...], why: str,
         flops: int) -> Row:  # fmt: skip
    called = bound(eqn)
    operation = called.primitive.name
    if called.primitive is name_p and not called.params["name"].startswith(TAG):
        operation = f"name '{called.params['name']}'"
    return Row(
        name,
        decision,
        tuple(v.aval.shape),
        str(v.aval.dtype),
        aval_bytes(v.aval),
        loops,
        operation,
        frame(eqn),
        why,
        flops,
    )


class _Inside:
    """Marginal FLOPs within one Schedule, all trips together."""

    def __init__(self, schedule: Schedule, trips: int):
        self.schedule, self.trips = schedule, trips
        self.at_hand = {*schedule.kept, *schedule.joint.inputs}
        forward = {id(e) for e in schedule.joint.forward}
        self.wanted = {
            v for e in schedule.order if id(e) not in forward for v in reads_of(e, schedule.inner)
        }.union(v for v in schedule.joint.backward_outputs if isinstance(v, Var))

    def spared_by(self, v: Var) -> int:
        """FLOPs that making a saved value again would add."""
        makers: dict[int, JaxprEqn] = {}
        todo = [v]
        while todo:
            eqn = self.schedule.joint.producer[todo.pop()]
            if id(eqn) not in makers and id(eqn) not in self.schedule.recomputed:
                makers[id(eqn)] = eqn
                todo += [
                    u
                    for u in eqn.invars
                    if not isinstance(u, Literal)
                    and u in self.schedule.joint.producer
                    and u not in self.at_hand
                ]
        return self.trips * sum(map(_flops, makers.values()))

    def served(self, v: Var) -> int:
        """FLOPs of what is run again for one value only."""
        dropped: dict[int, JaxprEqn] = {}
        todo = [self.schedule.joint.producer[v]]
        while todo:
            eqn = todo.pop()
            if id(eqn) in dropped or id(eqn) not in self.schedule.recomputed:
                continue
            readers = (r for u in eqn.outvars if u is not v for r in self._readers.get(u, ()))
            if any(r not in dropped for r in readers):
                continue
            dropped[id(eqn)] = eqn
            todo += [
                self.schedule.joint.producer[u]
                for u in reads_of(eqn, self.schedule.inner)
                if u in self.schedule.joint.producer and u not in self.at_hand
            ]
        return self.trips * sum(map(_flops, dropped.values()))

    @cached_property
    def _readers(self) -> dict[Var, list[int]]:
        """For each value, who reads it in the backward part; -1 for what returns it."""
        readers: dict[Var, list[int]] = {}
        for eqn in self.schedule.order:
            for v in reads_of(eqn, self.schedule.inner):
                readers.setdefault(v, []).append(id(eqn))
        for v in self.schedule.joint.backward_outputs:
            if isinstance(v, Var):
                readers.setdefault(v, []).append(-1)
        return readers


def _flops(eqn: JaxprEqn) -> int:
    return equation_flops(bound(eqn))
