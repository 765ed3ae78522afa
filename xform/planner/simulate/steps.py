"""Data types of a flat program: its steps (operations) and its values (cells)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from xform._jax import JaxprEqn, Primitive
from xform.registry.traits import Traits

# Primitives of the simulation only: a broadcast, and a barrier that only delays a value or keeps
# it in memory.
repeat_p, wait_p = Primitive("repeat"), Primitive("wait")


@dataclasses.dataclass(eq=False, slots=True, repr=False)
class Cell:
    """A value.

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
    maker: Step | None = None
    readers: list[Step] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False, slots=True, repr=False)
class Step:
    """One operation.

    Attributes:
      does: its primitive. It may differ from the primitive of the equation.
      of: the traits of the primitive.
      eqn: the equation that it comes from.
      reads: its operands, without constants.
      makes: its results.
      by_rows: for a product: the last axis of the left operand is summed.
      right_by_rows: for a product: the first axis of the right operand is summed.
      starts: for a loop: the initial value of each of its first results.
    """

    does: Primitive
    of: Traits
    eqn: JaxprEqn
    reads: list[Cell]
    makes: list[Cell]
    by_rows: bool = False
    right_by_rows: bool = False
    starts: Sequence[Cell] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Flat:
    """The steps of a program in program order, with its inputs and outputs."""

    inputs: tuple[Cell, ...]
    steps: tuple[Step, ...]
    outputs: tuple[Cell, ...]
