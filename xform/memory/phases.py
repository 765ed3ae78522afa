"""Find the phases of a compiled program: forward pass, backward pass and update.

A compiled program is a list of steps, one for each instruction in execution order (`Module.order`).
"""

from __future__ import annotations

from typing import NamedTuple

from xform.interpret.emit import pass_name
from xform.memory.hlo import Module


class Phase(NamedTuple):
    """A range of steps of a program, from `first` up to but not including `end`."""

    name: str
    first: int
    end: int


def phases(module: Module) -> list[Phase]:
    """Return the phases of a compiled program, in order; empty if it has no backward pass.

    A compiler may move an operation of one pass among the operations of another. So the backward
    pass is the range of steps in which its operations, recomputed ones included, have the largest
    majority over other operations. The steps before it are the forward pass. The steps after it are
    the update. If no operation after it has a name, the backward pass extends to the end.
    """
    n_steps = len(module.order)
    votes = [0] * n_steps  # 1 for an operation of the backward pass, -1 for another
    for number, step in module.order.items():
        instruction = module.instructions[number]
        if instruction.opcode != "parameter" and (name := module.named(instruction)):
            votes[step] += 1 if pass_name(name) else -1
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
