"""The data types of the program that the planner simulates: operations (steps) and their values.

A flat program is a list of the operations that XLA gets before fusion. Calls are inlined in it, and
a loop is one step. `flat.py` makes it from a traced program, and `liveness.py` simulates its
memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from xform._jax import JaxprEqn, Primitive
from xform.registry.traits import Traits

# Primitives that exist only in flat programs. `repeat_p` broadcasts a value. `wait_p` delays a
# value until others are computed, or writes it to memory; it computes nothing.
repeat_p, wait_p = Primitive("repeat"), Primitive("wait")


@dataclasses.dataclass(eq=False, slots=True, repr=False)
class FlatValue:
    """A value of a flat program.

    Attributes:
      bytes: its size in device memory.
      kind: "input", "constant" or "computed" (by a step).
      shape: its shape.
      maker: the step that computes it; None for an input or a constant.
      readers: the steps that read it.
    """

    bytes: int
    kind: str
    shape: tuple[int, ...] = ()
    maker: FlatStep | None = None
    readers: list[FlatStep] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False, slots=True, repr=False)
class FlatStep:
    """One operation of a flat program.

    Attributes:
      primitive: its primitive. It differs from the primitive of `eqn` if XLA runs another
        operation for that equation.
      traits: what the registry knows about the primitive, such as whether it is elementwise.
      eqn: the equation of the traced program that it comes from.
      operands: its operands, without constants.
      results: its results.
      left_sums_last_axis: only for a matrix product: whether it sums over the last axis of the
        left operand.
      right_sums_first_axis: only for a matrix product: whether it sums over the first axis of the
        right operand.
      initial_values: for each result of a loop that is carried or stacked, its initial value; for
        each result of a conditional, the operand that a branch returns unchanged, or None. Such a
        result may take the buffer of that value. Empty for all other steps.
    """

    primitive: Primitive
    traits: Traits
    eqn: JaxprEqn
    operands: list[FlatValue]
    results: list[FlatValue]
    left_sums_last_axis: bool = False
    right_sums_first_axis: bool = False
    initial_values: Sequence[FlatValue | None] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class FlatProgram:
    """The steps of a program in program order, with its inputs and outputs."""

    inputs: tuple[FlatValue, ...]
    steps: tuple[FlatStep, ...]
    outputs: tuple[FlatValue, ...]
