"""Find the phases of a compiled program: forward pass, backward pass and update.

A compiled program is a list of steps, one for each instruction in execution order (`Module.order`).
The name of an instruction tells which pass it was emitted for (`pass_name`). A compiler may move
it: it computes a value once, in the forward pass, although the program would compute it again.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

from xform.interpret.emit import pass_name
from xform.memory.hlo import Instruction, Module

# Opcodes of instructions that compute nothing: the step at which they stand says nothing.
_DOES_NOTHING = frozenset(
    ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "optimization-barrier")
)
# The vote of an operation of each pass on whether its step belongs to the backward pass.
_VOTES = {"backward": 4, "recompute": 1, "": -4}
# The least sum of the votes of a pass, and the most passes that a program is split into.
_LEAST, _MOST_PASSES = 24, 16


class Phase(NamedTuple):
    """A range of steps of a program, from `first` up to but not including `end`."""

    name: str
    first: int
    end: int


class Passes:
    """Tells in which pass each instruction of a compiled program runs.

    A program with several derivatives, such as one for each part of a batch, has several forward
    and backward passes.
    """

    def __init__(self, module: Module):
        self._module = module

    def of(self, instruction: Instruction) -> str:
        """Return the pass that an instruction runs in: "backward", "recompute" or "".

        "" means the forward pass, or an operation outside any derivative. A recomputed operation
        that runs outside the backward pass belongs to the forward pass.
        """
        name = pass_name(self._module.named(instruction))
        in_forward = name == "recompute" and self._ranges and not self.in_backward(instruction)
        return "" if in_forward else name

    def in_backward(self, instruction: Instruction) -> bool:
        """Return whether an instruction runs in a backward pass. One in a fusion runs with it."""
        order, runs = self._module.order, instruction
        while runs.id not in order and runs.computation in self._module.callers:
            runs = self._module.callers[runs.computation]
        step = order.get(runs.id, 0)
        return any(first <= step < end for first, end in self._ranges)

    @cached_property
    def _ranges(self) -> list[tuple[int, int]]:
        """The backward passes, in order."""
        return _backward_ranges(_votes(self._module))


def phases(module: Module) -> list[Phase]:
    """Return the phases of a compiled program, in order; empty if it has no backward pass.

    The backward pass is the range of steps in which its operations have the largest majority over
    other operations. The steps before it are the forward pass. The steps after it are the update.
    If no operation after it has a name, the backward pass extends to the end.
    """
    votes, n_steps = _votes(module), len(module.order)
    first, end = _largest_range(votes)
    if first == end:
        return []
    if not any(vote < 0 for vote in votes[end:]):
        end = n_steps
    ranges = (
        Phase("forward", 0, first),
        Phase("backward", first, end),
        Phase("update", end, n_steps),
    )
    return [phase for phase in ranges if phase.first < phase.end]


def _votes(module: Module) -> list[int]:
    """Return a vote for each step: positive for the backward pass, negative for other passes.

    A recomputed operation can run at any time before the operation that reads it, even before the
    forward pass. So its vote counts less than others.
    """
    votes = [0] * len(module.order)
    for number, step in module.order.items():
        instruction = module.instructions[number]
        if instruction.opcode not in _DOES_NOTHING and (name := module.named(instruction)):
            votes[step] = _VOTES[pass_name(name)]
    return votes


def _backward_ranges(votes: list[int]) -> list[tuple[int, int]]:
    """Return the ranges of steps in which a backward pass has the majority, in order.

    A compiler may move a few operations of one pass among the operations of another. They make no
    range of their own. Neither do recomputed operations alone.
    """

    def weight(votes: list[int]) -> int:
        """Return the sum of the votes, without those of recomputed operations."""
        return sum(vote for vote in votes if abs(vote) != _VOTES["recompute"])

    first, end = _largest_range(votes)
    least = max(_LEAST, sum(map(abs, votes)) // _MOST_PASSES)
    least = max(1, min(least, weight(votes[first:end])))
    ranges: list[tuple[int, int]] = []

    def add(start: int, stop: int) -> None:
        """Add the ranges between two steps."""
        first, end = (start + k for k in _largest_range(votes[start:stop]))
        if weight(votes[first:end]) < least:
            return
        add(start, first)
        others = [-vote for vote in votes[first:end]]
        inner_first, inner_end = _largest_range(others)
        if weight(others[inner_first:inner_end]) < least:
            ranges.append((first, end))
        else:
            add(first, first + inner_first)
            add(first + inner_end, end)
        add(end, stop)

    add(0, len(votes))
    return ranges


def _largest_range(votes: list[int]) -> tuple[int, int]:
    """Return the range with the largest sum of votes; empty if no sum is positive.

    Source: Kadane's algorithm.
    """
    largest, first, end = 0, 0, 0
    total, start = 0, 0
    for i, vote in enumerate(votes):
        if total < 0:
            total, start = 0, i
        total += vote
        if total > largest:
            largest, first, end = total, start, i + 1
    return first, end
