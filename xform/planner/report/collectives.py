"""The collectives that a plan repeats: communication that the backward pass runs a second time.

A minimum cut and a budget never choose to recompute a collective itself. But a policy that decides
about one value at a time may, and a loop or call that is recomputed as a whole repeats those
inside. A carry that a loop only moves between devices is moved back instead of saved
(`rules/moved_carry.py`), which counts too. Only collectives that the program contains are counted,
such as `psum` in a `shard_map`. For sharded arrays the compiler inserts others:
`MemoryReport.collectives` counts them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from xform._jax import JaxprEqn, Var, jaxprs_of
from xform.interpret.cost import aval_bytes, iterations_of
from xform.interpret.joint import Schedule, reads_of
from xform.interpret.node import Node, fork_p, gather, join_p, user_equation
from xform.interpret.slots import recomputed_steps
from xform.passes.dce import live
from xform.passes.structured import called_body
from xform.program.ir import Atom, program
from xform.program.source import frame
from xform.registry.table import flow_of, traits
from xform.terminal.text import human_bytes, shorten_place

# Equations, and how often each runs.
_Runs = Iterator[tuple[JaxprEqn, int]]


@dataclasses.dataclass(frozen=True)
class RepeatedCollective:
    """A collective of the forward pass that the backward pass runs again.

    Attributes:
      operation: the primitive, such as "psum". What JAX calls "psum_invariant", a `psum` whose
        result is the same on all devices, is "psum" here too.
      axes: the mesh axes whose devices communicate.
      count: how often the backward pass runs it, in all iterations of loops. The body of a `while`
        loop counts once.
      bytes: bytes of its results on each device, over all of these times.
      where: the user's line, `file:line (function)`.
    """

    operation: str
    axes: tuple[str, ...]
    count: int
    bytes: int
    where: str

    def __str__(self) -> str:
        times = "once" if self.count == 1 else f"{self.count} times"
        place = f", {shorten_place(self.where)}" if self.where else ""
        return (f"repeats {self.operation} over {', '.join(self.axes)} {times}, "
                f"{human_bytes(self.bytes)} on each device{place}")  # fmt: skip


def repeated_collectives(schedule: Schedule) -> tuple[RepeatedCollective, ...]:
    """Return the collectives that the backward pass repeats, from the most to the fewest bytes.

    Equal collectives of one line of the user's code are added up.

    Cost: linear in the number of equations, those inside loops and calls included.
    """
    totals: dict[tuple[str, tuple[str, ...], str], tuple[int, int]] = {}
    for eqn, times in _backward(schedule, 1):
        if axes := _axes(eqn):
            key = eqn.primitive.name.removesuffix("_invariant"), axes, frame(eqn)
            count, size = totals.get(key, (0, 0))
            each = sum(aval_bytes(v.aval) for v in eqn.outvars)
            totals[key] = count + times, size + times * each
    found = [
        RepeatedCollective(operation, axes, *total, where)
        for (operation, axes, where), total in totals.items()
    ]
    return tuple(sorted(found, key=lambda c: (-c.bytes, c.operation, c.where)))


def _axes(eqn: JaxprEqn) -> tuple[str, ...]:
    """Return the mesh axes over which a collective communicates.

    An axis that `vmap` gave a name to is a number by now, and takes no communication.
    """
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return tuple(str(a) for a in (axes if isinstance(axes, tuple | list) else (axes,))
                 if not isinstance(a, int))  # fmt: skip


def _backward(schedule: Schedule, times: int) -> _Runs:
    """Yield the collectives that the backward pass of a Schedule repeats, if it runs `times`."""
    needed = _needed(schedule)
    for eqn in schedule.order:
        if eqn.primitive is join_p:
            node = eqn.params["node"]
            branches = [
                [
                    *_backward(p, times * node.iterations),
                    *_restart(node, p, times),
                    *_moves_back(node, p, times),
                ]
                for p in schedule.inner[node]
            ]
            yield from _most(branches)
        elif id(eqn) in schedule.recomputed:
            yield from _forward(eqn, schedule, needed, times)


def _needed(schedule: Schedule) -> set[Var]:
    """Return the values that the backward pass of a Schedule reads or returns."""
    reads = {v for e in schedule.order for v in reads_of(e, schedule.inner)}
    return reads | {v for v in schedule.joint.backward_outputs if isinstance(v, Var)}


def _forward(eqn: JaxprEqn, schedule: Schedule, needed: set[Var], times: int) -> _Runs:
    """Yield the collectives in one equation of the forward part, which runs for `needed` values."""
    if eqn.primitive is not fork_p or not eqn.params["node"].joints:
        yield from _inside(user_equation(eqn), times)
        return
    node = eqn.params["node"]
    used = [v in needed for v in eqn.outvars[:-1]]
    branches: list[list[tuple[JaxprEqn, int]]] = []
    for p in schedule.inner[node]:
        wanted = [*p.saved, *(p.joint.outputs if node.loop else gather(p.joint.outputs, used))]
        branches.append([*_computing(p, wanted, times * node.iterations)])
    yield from _most(branches)


def _computing(schedule: Schedule, wanted: Sequence[Atom], times: int) -> _Runs:
    """Yield the collectives that compute some values of the forward part of a Schedule."""
    equations = live(schedule.joint.forward, wanted, effects=False)
    reads = (*wanted, *(v for e in equations for v in e.invars))
    needed = {v for v in reads if isinstance(v, Var)}
    for eqn in equations:
        yield from _forward(eqn, schedule, needed, times)


def _restart(node: Node, schedule: Schedule, times: int) -> _Runs:
    """Yield the collectives that run again from a loop's stored states, if it stores only some.

    A `while` loop always does. How often its steps run again is not known, and counts once.
    """
    if schedule.snapshots is None and not node.unknown_length:
        return
    joint, first, steps = schedule.joint, node.first_carry, 1
    states = list(joint.outputs)
    if schedule.snapshots is not None:
        steps = recomputed_steps(node.iterations, schedule.snapshots)
        stored = node.stacked_inputs([schedule])[first:]
        states = [v for v, on in zip(joint.outputs, stored, strict=False) if on]
    yield from _computing(schedule, states, times * steps)
    yield from _computing(schedule, [*schedule.saved], times * node.iterations)


def _moves_back(node: Node, schedule: Schedule, times: int) -> _Runs:
    """Yield the collectives that move parts of a loop's carry back between devices."""
    for v in gather(schedule.joint.inputs, node.moved_back(schedule)):
        yield node.moved[v], times * node.iterations


def _inside(eqn: JaxprEqn, times: int) -> _Runs:
    """Yield the collectives in one equation of the user: itself, or those of its programs."""
    known = traits(eqn.primitive)
    if known.collective and _axes(eqn):  # a `shard_map` is one too, for the planner
        yield eqn, times
        return
    bodies = [called_body(eqn)] if known.call else [program(jaxpr) for jaxpr in jaxprs_of(eqn)]
    flow = flow_of(eqn)
    if flow is not None and flow.is_loop:
        times *= iterations_of(eqn) if flow.length is None else flow.length
    runs = [[r for e in live(p.equations, p.outputs) for r in _inside(e, times)] for p in bodies]
    if flow is not None and flow.index is not None:
        yield from _most(runs)
    else:
        for each in runs:
            yield from each


def _most(branches: list[list[tuple[JaxprEqn, int]]]) -> list[tuple[JaxprEqn, int]]:
    """Return the branch that communicates most often; only one of the branches runs."""
    return max(branches, key=lambda runs: sum(times for _, times in runs), default=[])
