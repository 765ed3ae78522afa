"""How far ahead a compiled program fetches values from the memory of the host.

A fetch copies a value, or a slice of a stack, from the host to the device. An asynchronous one has
a start and an end, and the operations between them in the schedule hide its time.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator

from xform.memory.buffers import HOST
from xform.memory.hlo import Computation, Instruction, Module, Shape

_STARTS = ("copy-start", "async-start")
_ENDS = ("copy-done", "async-done")
_VIEWS = ("bitcast", "get-tuple-element", "tuple", "copy", "opt-barrier")
_NO_WORK = (*_VIEWS, "parameter", "constant", "while", "call", "conditional", *_STARTS, *_ENDS)
_PRODUCTS = ("dot", "convolution")
_LIBRARIES = ("gemm", "cublas", "matmul", "dot")
_RUNS = ("while", "call", "fusion", "async-start", "conditional")


@dataclasses.dataclass(frozen=True)
class Fetch:
    """One copy from the host to the device in the schedule.

    Attributes:
      bytes: of the value.
      products: matrix products between its start and its end; 0 if it is synchronous.
      is_async: whether it has a start and an end.
      ahead: whether only the next iteration of the loop around it reads the value.
      looped: whether it is in a loop.
    """

    bytes: int
    products: int
    is_async: bool
    ahead: bool
    looped: bool


def fetches(module: Module) -> list[Fetch]:
    """Return the copies from the host to the device, except those within asynchronous parts."""
    inside = {c for i in module.instructions.values() for c in i.called
              if i.opcode in ("fusion", "async-start")}  # fmt: skip
    bodies = {i.called[0] for i in module.instructions.values() if i.opcode == "while"}
    return [
        fetch
        for number, computation in module.computations.items()
        if number not in inside
        for fetch in _of(module, computation, number in bodies)
    ]


def described(found: list[Fetch]) -> str:
    """Return a text for a table: the copies, and the products between their starts and ends."""
    if not found:
        return "none"
    later = [f for f in found if f.is_async]
    texts = [f"{len(found)}"]
    if len(later) < len(found):
        texts.append(f"{len(found) - len(later)} synchronous")
    if later:
        products = sorted(f.products for f in later)
        texts.append(f"products between: {products[0]} to {products[-1]}, "
                     f"median {statistics.median(products):g}")  # fmt: skip
    if ahead := sum(f.ahead for f in found):
        texts.append(f"{ahead} for the next iteration")
    return "; ".join(texts)


def _of(module: Module, computation: Computation, looped: bool) -> Iterator[Fetch]:
    """Yield the fetches of one computation."""
    started: dict[int, int] = {}
    for k, i in enumerate(computation.instructions):
        if i.opcode in _STARTS:
            started[i.id] = k
        elif i.opcode in _ENDS:
            start = module.instructions[i.operands[0]]
            while start.id not in started:
                start = module.instructions[start.operands[0]]
            if _is_fetch(module, start, i.shape):
                between = computation.instructions[started[start.id] + 1 : k]
                products = sum(_products(module, other) for other in between)
                ahead = looped and _only_carried(module, computation, i)
                yield Fetch(_bytes(i.shape), products, True, ahead, looped)
        elif i.opcode not in _NO_WORK and _is_fetch(module, i, i.shape):
            yield Fetch(_bytes(i.shape), 0, False, False, looped)


def _is_fetch(module: Module, start: Instruction, result: Shape) -> bool:
    """Return whether an operation reads a value on the host, and its result is on the device."""
    read = (module.instructions[o].shape for o in start.operands)
    return any(HOST in _spaces(s) for s in read) and HOST not in _spaces(result)


def _only_carried(module: Module, computation: Computation, i: Instruction) -> bool:
    """Return whether nothing in a loop's body reads a value, except the state that it returns."""
    views, seen = {i.id}, False
    for other in computation.instructions:
        if views.intersection(other.operands):
            if other.id == computation.root:
                seen = True
            elif other.opcode not in _VIEWS:
                return False
            views.add(other.id)
    return seen


def _products(module: Module, i: Instruction) -> int:
    """Return how many matrix products an instruction runs, with trip counts."""
    if i.opcode in _PRODUCTS:
        return 1
    if i.opcode == "custom-call":
        return int(any(word in i.target.lower() for word in _LIBRARIES))
    if i.opcode not in _RUNS:
        return 0
    times = module.trips(i) if i.opcode == "while" else 1
    inner = (module.computations[c].instructions for c in i.called)
    return times * sum(_products(module, j) for instructions in inner for j in instructions)


def _spaces(shape: Shape) -> set[int]:
    """Return the memory spaces of the arrays in a type."""
    if shape.elements:
        return set().union(*map(_spaces, shape.elements))
    return {shape.space} if shape.dims else set()


def _bytes(shape: Shape) -> int:
    return sum(map(_bytes, shape.elements)) if shape.elements else shape.bytes
