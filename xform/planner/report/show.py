"""Print the forward and the backward pass of a function, with the decisions of its plan.

The passes are the two parts of one program, the *Joint*. The plan is a *Schedule*: the saved
values, and the backward part with the recomputed equations. The text has the forward part, the
saved values, and the backward part. A loop, branch or call is a *node* of the Joint, with Joints of
its own. The forward parts of these Joints are indented below the node in the forward part, their
backward parts below the node in the backward part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from xform._jax import JaxprEqn, Var
from xform.interpret.cost import aval_bytes
from xform.interpret.joint import Schedule
from xform.interpret.node import Node, fork_p, gather, join_p
from xform.passes.dce import live
from xform.passes.listing import VariableNames, line, place
from xform.program.dimensions import at_sample
from xform.terminal.text import columns, human_bytes


def show_schedule(schedule: Schedule, lines: bool = False, word: str = "backward") -> str:
    """Return the text of a whole function's Joint and its Schedule.

    A note after a forward equation says whether its value is saved, and why. A note after an
    equation of the backward part says whether it is recomputed; "for free" marks constants and
    views.

    Args:
      schedule: the plan of the function.
      lines: whether to add the user's source line of each equation.
      word: the name of the backward part in the text.
    """
    names, joint = VariableNames(), schedule.joint
    inputs = names.typed(joint.inputs)
    with at_sample(schedule.sample):  # bytes are counted here
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


def _saved(schedule: Schedule, names: VariableNames) -> str:
    """Return the saved values, and the inputs that the backward part reads, as text."""
    values = [v for v in schedule.saved if schedule.joint.producer[v].primitive is not fork_p]
    read = names.typed(gather(schedule.joint.inputs, schedule.reads))
    parts = [names.typed(values)] if values else []
    parts += ["values inside loops and calls"] if len(values) < len(schedule.saved) else []
    return "; ".join([*parts, *([f"read in place: {read}"] if read else [])]) or "nothing"


def _forward(schedule: Schedule, names: VariableNames, indent: str) -> Iterator[list[str]]:
    """Yield the rows of the forward part: text, note, source line."""
    joint = schedule.joint
    for eqn in live(joint.forward, [*joint.outputs, *schedule.saved], joint.inputs):
        notes = [_why(schedule, v) for v in eqn.outvars if v in schedule.saved]
        note = ", ".join(dict.fromkeys(filter(None, notes)))
        if eqn.primitive is not fork_p:
            yield _row(indent + line(eqn, names), note, eqn)
            continue
        node = eqn.params["node"]
        outputs = names.typed(eqn.outvars[:-1])
        called = line(node.eqn.replace(invars=eqn.invars, outvars=[]), names)
        yield _row(f"{indent}{outputs} = {called}", note, node.eqn)
        for heading, inner in _bodies(node, schedule.inner[node]):
            yield _row(f"{indent}  {heading}, forward: {names.typed(inner.joint.inputs)}")
            yield from _forward(inner, names, f"{indent}    ")
            yield _row(f"{indent}  return {' '.join(map(names, inner.joint.outputs))}")


def _why(schedule: Schedule, v: Var) -> str:
    """Return the note of a saved value; "" for a value that a loop, branch or call returns."""
    if schedule.joint.producer[v].primitive is fork_p:
        return ""
    where = "OFFLOADED" if v in schedule.offloaded else "SAVED"
    return f"{where}, {human_bytes(aval_bytes(v.aval))}: {schedule.why[v]}"


def _backward(
    schedule: Schedule, names: VariableNames, indent: str, word: str
) -> Iterator[list[str]]:
    """Yield the rows of the backward part: text, note, source line."""
    forward = {id(eqn) for eqn in schedule.joint.forward}
    for eqn in schedule.order:
        recompute_note = "RECOMPUTED" if id(eqn) in schedule.recomputed else "recomputed for free"
        note = recompute_note if id(eqn) in forward else ""
        if eqn.primitive not in (fork_p, join_p):
            yield _row(indent + line(eqn, names), note, eqn)
            continue
        node = eqn.params["node"]
        is_backward = eqn.primitive is join_p  # else the recomputed forward part of a node
        inputs = eqn.invars[1 + len(node.eqn.invars) :] if is_backward else eqn.invars
        called = line(node.eqn.replace(invars=list(inputs), outvars=[]), names)
        outputs = names.typed(eqn.outvars if is_backward else eqn.outvars[:-1])
        direction = "" if is_backward else " forward"
        yield _row(f"{indent}{outputs} ={direction} {called}", note, node.eqn)
        for heading, inner in _bodies(node, schedule.inner[node]) if is_backward else ():
            joint = inner.joint
            yield _row(f"{indent}  {heading}, {word}: {names.typed(joint.seeds)}")
            yield from _backward(inner, names, f"{indent}    ", word)
            yield _row(f"{indent}  return {' '.join(map(names, joint.backward_outputs))}")


def _bodies(node: Node, schedules: Sequence[Schedule]) -> Iterator[tuple[str, Schedule]]:
    """Yield each Schedule of a node with a heading, such as "body of 12 trips"."""
    for k, inner in enumerate(schedules):
        heading = f"branch {k}" if len(schedules) > 1 else "body"
        if node.loop:
            stored = sum(node.stacked_inputs(schedules))
            heading += f" of {node.iterations} trips" if node.iterations > 1 else ""
            values = "values" if stored > 1 else "value"
            heading += f", {stored} carry {values} saved in each" if stored else ""
        yield heading, inner


def _row(text: str, note: str = "", eqn: JaxprEqn | None = None) -> list[str]:
    """Return one row: text, note, and the source line of an equation."""
    return [text, note, place(eqn) if eqn is not None else ""]
