"""How values pass through an equation that runs programs: a loop, a branch or a call.

Such an equation is *structured*, and the programs that it runs are its *bodies*. A `Flow` says
which operand of the equation each input of a body reads, and which result each output becomes. The
rule of the primitive makes it (`Rule.flow`). It is all that an analysis has to know about the
primitive; `xform.passes.dataflow` has the analyses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from xform.program.ir import Program

T = TypeVar("T")
# A function in the place of a program that a structured equation runs (`Rule.rebuild`).
BodyFunction = Callable[[list[Any], Any], tuple[list[Any], Any]]


class Body(NamedTuple):
    """A program that a structured equation runs.

    Attributes:
      program: the program.
      operands: for each input, the position of the operand of the equation that it reads.
      results: for each output, the position of the result of the equation that it becomes.
    """

    program: Program
    operands: Sequence[int]
    results: Sequence[int]


@dataclasses.dataclass(frozen=True)
class Flow:
    """How values pass through a structured equation.

    Attributes:
      bodies: the programs that compute the results. If there are several, one of them runs.
      index: the position of the operand that selects the body that runs; None: there is one body.
      carried: for a loop, the position of the result for each operand that is the initial value of
        a carry. Before each iteration, the inputs that read this operand have the current value.
      scanned: positions of the operands that a loop slices along axis 0, a slice an iteration.
      stacked: positions of the results that stack an output of all iterations, along axis 0.
      condition: the program that decides whether another iteration runs. It has one output, which
        becomes no result.
      length: the number of iterations; None: there is a condition, or the equation is no loop.
      reverse: whether the loop goes through its slices from the last to the first.
      is_local: whether the bodies run on each device of a mesh, on its part of the values.
    """

    bodies: tuple[Body, ...]
    index: int | None = None
    carried: Mapping[int, int] = dataclasses.field(default_factory=dict[int, int])
    scanned: frozenset[int] = frozenset()
    stacked: frozenset[int] = frozenset()
    condition: Body | None = None
    length: Any = None
    reverse: bool = False
    is_local: bool = False

    @property
    def is_loop(self) -> bool:
        """Whether the body runs several times."""
        return self.length is not None or self.condition is not None

    @property
    def is_call(self) -> bool:
        """Whether there is one body, which runs once."""
        return not self.is_loop and self.index is None

    @property
    def iterations(self) -> range:
        """The numbers of the iterations of a loop of known length, in the order of their runs."""
        numbers = range(self.length)
        return numbers[::-1] if self.reverse else numbers

    def inputs(self, body: Body, operands: Sequence[T], take: Callable[[T], T]) -> list[T]:
        """Return the inputs of a body in one iteration.

        `take` returns the slice of a scanned operand that this iteration reads.
        """
        return [take(operands[k]) if k in self.scanned else operands[k] for k in body.operands]

    def after(self, operands: Sequence[T], results: Sequence[T]) -> list[T]:
        """Return the operands of a loop with the new values of its carries in their places.

        `results` are the outputs of an iteration, or the results of the loop.
        """
        return [results[self.carried[k]] if k in self.carried else x
                for k, x in enumerate(operands)]  # fmt: skip

    def results(self, operands: Sequence[T], outputs: Sequence[Sequence[T]],
                stack: Callable[[list[T]], T]) -> list[T]:  # fmt: skip
        """Return the results of a loop that has run.

        Args:
          operands: the operands, with the last values of the carries (`after`).
          outputs: the outputs of the body in each iteration, by the number of the iteration.
          stack: stacks an output of all iterations.
        """
        carried = {r: operands[k] for k, r in self.carried.items()}
        return [carried[r] if r in carried else stack([ys[r] for ys in outputs])
                for r in self.bodies[0].results]  # fmt: skip

    @property
    def programs(self) -> tuple[Program, ...]:
        """The condition, if there is one, and the bodies."""
        first = () if self.condition is None else (self.condition.program,)
        return (*first, *(body.program for body in self.bodies))
