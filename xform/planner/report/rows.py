"""The rows of a Plan's table: the values that the backward pass reads, with decision and cost.

They come from a *Schedule*: the saved values of a program, and its backward pass with the
recomputed equations. A loop, branch or call of the program is a *node*. The programs inside a node
have Schedules of their own, and their values have rows too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from xform._jax import JaxprEqn, Literal, Var
from xform.interpret.cost import aval_bytes, equation_flops
from xform.interpret.joint import Schedule, reads_of
from xform.interpret.node import Node, fork_p, user_equation
from xform.planner.costs.saved_values import state_reason
from xform.policies import TAG
from xform.program.dimensions import as_data
from xform.program.source import frame
from xform.registry.table import label


@dataclasses.dataclass(frozen=True)
class PlanRow:
    """One value of the forward pass that the backward pass reads.

    Attributes:
      value: its name in the plan, such as `scan.4/dot_general.17`: the loops and calls around it,
        its operation, and the index of the operation in the program. `scan.4/mlp.17` is a value
        that the user named "mlp" by `checkpoint_name`, and `carry.0` the first part of a loop's
        state.
      decision: "SAVE", "RECOMPUTE" or "OFFLOAD".
      shape: the shape in one iteration; a symbolic dimension is a text, such as "2*b".
      dtype: the dtype.
      trip_bytes: bytes of one iteration, on each device.
      loops: trip counts of the loops that stack the value, outermost first.
      operation: the primitive that computes the value; `name '...'` if `checkpoint_name` names it.
      where: the user's line, `file:line (function)`, also inside loop bodies and calls.
      why: why the value is saved or not.
      marginal_flops: for a saved value, the FLOPs that recomputing it would add; for a recomputed
        value, the FLOPs that saving it would spare. In all iterations, on all devices.
    """

    value: str
    decision: str
    shape: tuple[int | str, ...]
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
        """Bytes of all iterations that the value takes, or would take if it were saved."""
        return self.trip_bytes * math.prod(self.loops)


def rows_of(schedule: Schedule) -> list[PlanRow]:
    """Return the rows of a whole function's Schedule, from the most to the fewest bytes."""
    return sorted(_rows(schedule, "", (), 1), key=lambda r: (-r.marginal_bytes, r.value))


def _rows(schedule: Schedule, path: str, loops: tuple[int, ...], runs: int) -> Iterator[PlanRow]:
    """Yield the rows of a Schedule.

    Args:
      schedule: the Schedule of a whole function, or of the body of a loop or call.
      path: the name of that loop or call with a final "/"; "" for a whole function.
      loops: trip counts of the loops that stack the values.
      runs: how often the function or body runs, on all devices together.
    """
    marginal = _MarginalFlops(schedule, runs)
    saved = set(schedule.saved)
    for i, eqn in enumerate(schedule.joint.forward):
        node = eqn.params["node"] if eqn.primitive is fork_p else None
        name = f"{path}{_users_name(eqn) or (node.eqn if node else eqn).primitive.name}.{i}"
        for v in eqn.outvars[: -1 if node else None]:
            if v in saved:
                decision = "OFFLOAD" if v in schedule.offloaded else "SAVE"
                why, flops = schedule.why[v], marginal.flops_to_recompute(v)
                yield _row(name, decision, v, eqn, loops, why, flops)
            elif (
                v in marginal.read_values and id(eqn) in schedule.recomputed and aval_bytes(v.aval)
            ):
                why = (
                    "the policy does not save it"
                    if schedule.decided_per_value
                    else "cheaper to recompute than to save"
                )
                yield _row(name, "RECOMPUTE", v, eqn, loops, why, marginal.flops_if_saved(v))
        if node is not None and node in schedule.inner:
            # A recomputed loop or call holds its values only during its own backward pass, so the
            # loops around it do not stack them.
            outer_loops = loops if eqn.outvars[-1] in saved else ()
            yield from _node_rows(node, schedule.inner[node], name, outer_loops, runs)


def _node_rows(node: Node, schedules: Sequence[Schedule], name: str, loops: tuple[int, ...],
               runs: int) -> Iterator[PlanRow]:  # fmt: skip
    """Yield the rows of the programs inside a node, then of the states that a loop stores."""
    body_loops = (*loops, node.iterations) if node.loop and node.iterations > 1 else loops
    if schedules[0].snapshots is not None:
        body_loops = ()  # saved values are held for one step
    for k, p in enumerate(schedules):
        branch = f"[{k}]" if len(schedules) > 1 else ""
        yield from _rows(
            p, f"{name}{branch}/", body_loops, runs * node.iterations * node.device_count
        )
    for i, n in enumerate(node.stored_states(schedules)):
        if n:
            v = schedules[0].joint.inputs[i]
            label = f"{name}/carry.{i - node.first_carry}"
            decision = "OFFLOAD" if v in schedules[0].offloaded else "SAVE"
            why = state_reason(node, schedules[0], i)
            yield _row(label, decision, v, node.eqn, (*loops, n), why, 0)


def _row(name: str, decision: str, v: Any, eqn: JaxprEqn, loops: tuple[int, ...], why: str,
         flops: int) -> PlanRow:  # fmt: skip
    """Return the row of the value `v`, which `eqn` computes. `flops` are its marginal FLOPs."""
    given = _users_name(eqn)
    operation = f"name '{given}'" if given else user_equation(eqn).primitive.name
    return PlanRow(
        name,
        decision,
        as_data(v.aval.shape),
        str(v.aval.dtype),
        aval_bytes(v.aval),
        loops,
        operation,
        frame(eqn),
        why,
        flops,
    )


def _users_name(eqn: JaxprEqn) -> str:
    """Return the name that the user gave by `checkpoint_name`; "" if `eqn` gives none."""
    equation = user_equation(eqn)
    name = label(equation.primitive, equation.params) or ""
    return "" if name.startswith(TAG) else name


class _MarginalFlops:
    """The FLOPs that the opposite decision about one value would add or spare.

    `runs` is how often the program of the Schedule runs.

    Attributes:
      available: the values that the backward pass can read: saved values and inputs.
      read_values: the values that the backward pass reads.
    """

    def __init__(self, schedule: Schedule, runs: int):
        self.schedule, self.runs = schedule, runs
        self.available = {*schedule.saved, *schedule.joint.inputs}
        forward = {id(e) for e in schedule.joint.forward}
        self.read_values = {
            v for e in schedule.order if id(e) not in forward for v in reads_of(e, schedule.inner)
        }.union(v for v in schedule.joint.backward_outputs if isinstance(v, Var))

    def flops_to_recompute(self, v: Var) -> int:
        """Return the FLOPs that recomputing the saved value `v` would add."""
        added: dict[int, JaxprEqn] = {}
        todo = [v]
        while todo:
            eqn = self.schedule.joint.producer[todo.pop()]
            if id(eqn) not in added and id(eqn) not in self.schedule.recomputed:
                added[id(eqn)] = eqn
                todo += [
                    u
                    for u in eqn.invars
                    if not isinstance(u, Literal)
                    and u in self.schedule.joint.producer
                    and u not in self.available
                ]
        return self.runs * sum(map(_flops, added.values()))

    def flops_if_saved(self, v: Var) -> int:
        """Return the FLOPs that saving `v` would spare: those of equations that only `v` needs."""
        unneeded: dict[int, JaxprEqn] = {}
        todo = [self.schedule.joint.producer[v]]
        while todo:
            eqn = todo.pop()
            if id(eqn) in unneeded or id(eqn) not in self.schedule.recomputed:
                continue
            results = (u for u in eqn.outvars if u is not v)
            readers = (reader for u in results for reader in self._readers.get(u, ()))
            if any(reader not in unneeded for reader in readers):
                continue
            unneeded[id(eqn)] = eqn
            todo += [
                self.schedule.joint.producer[u]
                for u in reads_of(eqn, self.schedule.inner)
                if u in self.schedule.joint.producer and u not in self.available
            ]
        return self.runs * sum(map(_flops, unneeded.values()))

    @cached_property
    def _readers(self) -> dict[Var, list[int]]:
        """For each value, the `id`s of the equations that read it, and -1 if it is returned."""
        readers: dict[Var, list[int]] = {}
        for eqn in self.schedule.order:
            for v in reads_of(eqn, self.schedule.inner):
                readers.setdefault(v, []).append(id(eqn))
        for v in self.schedule.joint.backward_outputs:
            if isinstance(v, Var):
                readers.setdefault(v, []).append(-1)
        return readers


def _flops(eqn: JaxprEqn) -> int:
    """Return the FLOPs of the user's equation."""
    return equation_flops(user_equation(eqn))
