"""Where a compiled program goes forward, where backward, and where it updates what it was given."""

from __future__ import annotations

from typing import NamedTuple

from xform.memory.attribute import part
from xform.memory.hlo import Module


class Phase(NamedTuple):
    """Steps of a program, from the first to before the `end`."""

    name: str
    first: int
    end: int


def phases(module: Module) -> list[Phase]:
    """The phases of a compiled program in its order; none if nothing in it is a derivative's.

    A compiler moves single operations about, so the backward pass is the stretch of steps in which
    the operations of backward parts and recomputes are most in the majority: what comes before is
    the forward pass, what comes after the update.
    """
    steps = len(module.order)
    votes = [0] * steps
    for number, step in module.order.items():
        instruction = module.instructions[number]
        if instruction.opcode != "parameter" and (name := module.named(instruction)):
            votes[step] += 1 if part(name) else -1
    first, end = _majority(votes)
    if first == end:
        return []
    if not any(vote < 0 for vote in votes[end:]):
        end = steps
    spans = (Phase("forward", 0, first), Phase("backward", first, end), Phase("update", end, steps))
    return [phase for phase in spans if phase.first < phase.end]


def _majority(votes: list[int]) -> tuple[int, int]:
    """The stretch with the largest sum, empty if none is positive; the longest of those."""
    best, first, end = 0, 0, 0
    total, start = 0, 0
    for i, vote in enumerate(votes):
        if total < 0:
            total, start = 0, i
        total += vote
        if total > best:
            best, first, end = total, start, i + 1
    return first, end
