"""Data types of a flat program: its steps (operations) and its values."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from xform._jax import JaxprEqn, Primitive
from xform.registry.traits import Traits

# Primitives of the simulation only: a broadcast, and a barrier that only delays a value or keeps
# it in memory.
repeat_p, wait_p = Primitive("repeat"), Primitive("wait")


@dataclasses.dataclass(eq=False, slots=True, repr=False)
class FlatValue:
    """A value of a flat program.

    Attributes:
      bytes: its size in memory.
      kind: "input", "constant" or "made" (by a step).
      shape: its shape.
      maker: the step that makes it; None for an input or a constant.
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
      primitive: its primitive. It may differ from the primitive of the equation.
      traits: the traits of the primitive.
      eqn: the equation that it comes from.
      operands: its operands, without constants.
      results: its results.
      by_rows: for a product: the last axis of the left operand is summed.
      right_by_rows: for a product: the first axis of the right operand is summed.
      starts: for a loop: the initial value of each of its first results.
    """

    primitive: Primitive
    traits: Traits
    eqn: JaxprEqn
    operands: list[FlatValue]
    results: list[FlatValue]
    by_rows: bool = False
    right_by_rows: bool = False
    starts: Sequence[FlatValue] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class FlatProgram:
    """The steps of a program in program order, with its inputs and outputs."""

    inputs: tuple[FlatValue, ...]
    steps: tuple[FlatStep, ...]
    outputs: tuple[FlatValue, ...]
