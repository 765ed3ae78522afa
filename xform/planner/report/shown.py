"""A joint program under a plan as text: the forward part, what is saved, the backward part.

What is nested in a loop or call stands below it, in both parts: the forward part of its body where
it runs forward, the backward part where it runs back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from xform._jax import JaxprEqn, Var
from xform.interpret.cost import aval_bytes
from xform.interpret.joint import Schedule
from xform.interpret.node import Node, fork_p, gather, join_p
from xform.passes.dce import live
from xform.passes.listing import Names, line, place
from xform.terminal.text import columns, human_bytes


def shown(schedule: Schedule, lines: bool = False, word: str = "backward") -> str:
    """A whole function's Joint under its Schedule; `lines` adds the user's lines.

    Behind an equation of the forward part stands what of it is saved, and why; behind one of the
    backward part, that it is run again, or made again because that is free.
    """
    names, joint = Names(), schedule.joint
    inputs = names.typed(joint.inputs)
    rows = [["forward"], *_forward(schedule, names, "  ")]
    rows += [
        [f"saved: {_saved(schedule, names)}"],
        [f"{word}, of {names.typed(joint.seeds)}"],
    ]
    rows += _backward(schedule, names, "  ", word)
    width = max(map(len, rows))
    if not lines:
        rows, width = [row[:2] for row in rows], 2
    text = columns([[*row, *[""] * (width - len(row))] for row in rows])
    outputs, results = ([names(v) for v in vs] for vs in (joint.outputs, joint.backward_outputs))
    tail = f"outputs {' '.join(outputs)}\nresults {' '.join(results)}"
    return f"inputs {inputs}\n{text}\n{tail}"


def _saved(schedule: Schedule, names: Names) -> str:
    values = [v for v in schedule.kept if schedule.joint.producer[v].primitive is not fork_p]
    read = names.typed(gather(schedule.joint.inputs, schedule.reads))
    parts = [names.typed(values)] if values else []
    parts += ["what loops and calls keep"] if len(values) < len(schedule.kept) else []
    return "; ".join([*parts, *([f"read where they are: {read}"] if read else [])]) or "nothing"


def _forward(schedule: Schedule, names: Names, indent: str) -> Iterator[list[str]]:
    joint = schedule.joint
    for eqn in live(joint.forward, [*joint.outputs, *schedule.kept], joint.inputs):
        notes = [_why(schedule, v) for v in eqn.outvars if v in schedule.kept]
        note = ", ".join(dict.fromkeys(filter(None, notes)))
        if eqn.primitive is not fork_p:
            yield _row(indent + line(eqn, names), note, eqn)
            continue
        node = eqn.params["node"]
        outputs = names.typed(eqn.outvars[:-1])
        called = line(node.eqn.replace(invars=eqn.invars, outvars=[]), names)
        yield _row(f"{indent}{outputs} = {called}", note, node.eqn)
        for head, inner in _bodies(node, schedule.inner[node]):
            yield _row(f"{indent}  {head}, forward: {names.typed(inner.joint.inputs)}")
            yield from _forward(inner, names, f"{indent}    ")
            yield _row(f"{indent}  return {' '.join(map(names, inner.joint.outputs))}")


def _why(schedule: Schedule, v: Var) -> str:
    if schedule.joint.producer[v].primitive is fork_p:
        return ""
    where = "OFFLOADED" if v in schedule.offloaded else "SAVED"
    return f"{where}, {human_bytes(aval_bytes(v.aval))}: {schedule.why[v]}"


def _backward(schedule: Schedule, names: Names, indent: str, word: str) -> Iterator[list[str]]:
    forward = {id(eqn) for eqn in schedule.joint.forward}
    for eqn in schedule.order:
        again = "run AGAIN" if id(eqn) in schedule.recomputed else "again, which is free"
        note = again if id(eqn) in forward else ""
        if eqn.primitive not in (fork_p, join_p):
            yield _row(indent + line(eqn, names), note, eqn)
            continue
        node = eqn.params["node"]
        back = eqn.primitive is join_p
        inputs = eqn.invars[1 + len(node.eqn.invars) :] if back else eqn.invars
        called = line(node.eqn.replace(invars=list(inputs), outvars=[]), names)
        outputs = names.typed(eqn.outvars if back else eqn.outvars[:-1])
        way = "" if back else " forward"
        yield _row(f"{indent}{outputs} ={way} {called}", note, node.eqn)
        for head, inner in _bodies(node, schedule.inner[node]) if back else ():
            joint = inner.joint
            yield _row(f"{indent}  {head}, {word}: {names.typed(joint.seeds)}")
            yield from _backward(inner, names, f"{indent}    ", word)
            yield _row(f"{indent}  return {' '.join(map(names, joint.backward_outputs))}")


def _bodies(node: Node, schedules: Sequence[Schedule]) -> Iterator[tuple[str, Schedule]]:
    """The Schedules of a node, each with a heading that names its program."""
    for k, inner in enumerate(schedules):
        head = f"branch {k}" if len(schedules) > 1 else "body"
        if node.loop:
            stored = sum(n > 0 for n in node.copies(schedules))
            head += f" of {node.trips} trips" if node.trips > 1 else ""
            head += f", {stored} of its carry saved in each" if stored else ""
        yield head, inner


def _row(text: str, note: str = "", eqn: JaxprEqn | None = None) -> list[str]:
    return [text, note, place(eqn) if eqn is not None else ""]
