"""Emit both parts of a Schedule as one program."""

from xform.interpret import emit
from xform.interpret.joint import Schedule
from xform.interpret.node import gather, spread
from xform.program.ir import Program, trace


def emitted(how: Schedule) -> Program:
    """Return the program from inputs and cotangents to outputs and results."""
    joint = how.joint

    def run(*args: object) -> list[object]:
        xs, seeds = args[: len(joint.inputs)], args[len(joint.inputs) :]
        outs, kept = emit.forward(how, xs)
        read = spread(gather(xs, how.reads), how.reads)
        return [*outs, *emit.backward(how, kept, read, seeds, True, whole=True)]

    return trace(run, *(v.aval for v in (*joint.inputs, *joint.seeds)))
