"""The steps of a flat program and the values that they read and make."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from xform._jax import JaxprEqn, Primitive
from xform.traits import Traits

# In no program: what a compiler repeats by itself, and a barrier that is nothing but an order.
repeat_p, wait_p = Primitive("repeat"), Primitive("wait")


@dataclasses.dataclass(eq=False, slots=True, repr=False)
class Cell:
    """A value: bytes, shape, the step that makes it (None: an input or constant), who reads it."""

    bytes: int
    kind: str
    shape: tuple[int, ...] = ()
    maker: Step | None = None
    readers: list[Step] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False, slots=True, repr=False)
class Step:
    """One operation: what it does, with its traits, for which equation, and its values.

    `by_rows` is a product whose left operand has what is summed last, `right_by_rows` one whose
    right operand has it first; `starts` are the values that the first results of a loop start from.
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
