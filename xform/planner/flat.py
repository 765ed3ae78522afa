"""A program as its compiler sees it, before fusion: calls opened, equal computations merged.

Views of a value are the value. What is sent to the host takes no bytes there, but on a CPU, which
has one memory, it is a view. What no output needs is left out, and so is a tie that the backend
takes for nothing. Loops and branches stay single steps; their bodies are flattened where they are
looked into.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from xform._jax import (
    JaxprEqn,
    Literal,
    Primitive,
    conv_general_dilated_p,
    dot_general_p,
    has_effects,
)
from xform.cost import aval_bytes
from xform.fingerprint import literal, operation, typed
from xform.interpret.tie import tie_p
from xform.ir import Program
from xform.passes.structured import body
from xform.table import traits

# In no program: a compiler writes out what is repeated, where it looks for it (see `fused`).
repeat_p = Primitive("repeat")
# Of a `device_put` between memories of one device.
_SPACES = ((jax.memory.Space.Host,), (jax.memory.Space.Device,))


@dataclasses.dataclass(eq=False)
class Cell:
    """A value: its bytes, the step that makes it (None: an input or constant), who reads it."""

    bytes: int
    kind: str
    maker: Step | None = None
    readers: list[Step] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False)
class Step:
    """One operation: what it does, the equation that it is or is part of, its values."""

    does: Primitive
    eqn: JaxprEqn
    reads: list[Cell]
    makes: list[Cell]


@dataclasses.dataclass(frozen=True, eq=False)
class Flat:
    """The steps of a program in program order, with its inputs and outputs."""

    inputs: tuple[Cell, ...]
    steps: tuple[Step, ...]
    outputs: tuple[Cell, ...]


def flatten(prog: Program, cpu: bool) -> Flat:
    """The steps that make a program's outputs. Linear in equations, those of calls included.

    A `cpu` takes light ties, and ways to the host and back, for identities.
    """
    work = _Flattening(cpu)
    inputs = [Cell(work.bytes(v.aval), "input") for v in prog.inputs]
    outputs = work.run(prog, inputs)
    need = set(outputs)
    steps: list[Step] = []
    for step in reversed(work.steps):
        if has_effects(step.eqn) or not need.isdisjoint(step.makes):
            need.update(step.reads)
            steps.append(step)
    steps.reverse()
    for step in steps:
        for cell in dict.fromkeys(step.reads):
            cell.readers.append(step)
    return Flat(tuple(inputs), tuple(steps), tuple(outputs))


class _Flattening:
    def __init__(self, cpu: bool):
        self.cpu = cpu
        self.steps: list[Step] = []
        self.known: dict[Any, list[Cell]] = {}

    def bytes(self, aval: Any) -> int:
        """Bytes of a value on the device."""
        host = getattr(aval, "memory_space", None) == jax.memory.Space.Host
        return 0 if host and not self.cpu else aval_bytes(aval)

    def run(self, prog: Program, inputs: Sequence[Cell]) -> list[Cell]:
        env = dict(zip(prog.inputs, inputs, strict=True))
        env |= {v: self._constant(id(x)) for v, x in prog.consts}
        read = lambda v: self._constant(literal(v)) if isinstance(v, Literal) else env[v]
        for eqn in prog.equations:
            env.update(zip(eqn.outvars, self._made(eqn, [read(v) for v in eqn.invars]),
                           strict=False))  # fmt: skip
        return [read(v) for v in prog.outputs]

    def _constant(self, key: Any) -> Cell:
        return self.known.setdefault(("constant", key), [Cell(0, "constant")])[0]

    def _made(self, eqn: JaxprEqn, reads: list[Cell]) -> list[Cell]:
        prim, of = eqn.primitive, traits(eqn.primitive)
        if of.call:
            return self.run(body(eqn), reads)
        moved = prim is lax.device_put_p and eqn.params["devices"] in _SPACES
        if self.cpu and (moved or (prim is tie_p and eqn.params["light"])):
            return reads
        same = of.view and aval_bytes(eqn.invars[0].aval) == aval_bytes(eqn.outvars[0].aval)
        if of.identity or same:
            return reads
        if prim is lax.transpose_p and _of_product(eqn, reads[0]):
            return reads
        if prim is lax.div_p and _repeats(reads[1], eqn):
            # The compiler multiplies by the reciprocal, which it repeats first.
            made = typed(eqn.outvars[0].aval)
            reads = [reads[0], *self._step(repeat_p, (reads[1], made), eqn, reads[1:])]
            prim = lax.mul_p
        if prim is lax.integer_pow_p and eqn.params["y"] > 1:
            return [self._power(reads[0], eqn.params["y"], eqn)]
        reads = [
            self._step(lax.transpose_p, (x, order), eqn, [x], [x.bytes])[0] if order else x
            for x, order in zip(reads, _orders(eqn, len(reads)), strict=True)
        ]
        return self._step(prim, (tuple(reads), operation(eqn)), eqn, reads)

    def _power(self, x: Cell, y: int, eqn: JaxprEqn) -> Cell:
        """A power by squares and products, which powers of one value share."""
        times = lambda a, b: self._step(lax.mul_p, (a, b), eqn, [a, b])[0]
        found = None
        while y:
            if y % 2:
                found = x if found is None else times(found, x)
            y //= 2
            x = times(x, x) if y else x
        return found or x

    def _step(self, does: Primitive, key: Any, eqn: JaxprEqn, reads: list[Cell],
              sizes: Sequence[int] | None = None) -> list[Cell]:  # fmt: skip
        """What a step makes; the same as before if it has been taken before."""
        found = self.known.get((does, key)) if not has_effects(eqn) else None
        if found is None:
            found = [Cell(n, "made") for n in sizes or [self.bytes(v.aval) for v in eqn.outvars]]
            step = Step(does, eqn, [c for c in reads if c.kind != "constant"], found)
            for cell in found:
                cell.maker = step
            self.steps.append(step)
            self.known[does, key] = found
        return found


def _of_product(eqn: JaxprEqn, x: Cell) -> bool:
    """Whether a transpose of a matrix product is the product of the transposes."""
    flat = len(eqn.params["permutation"]) == 2
    return flat and x.maker is not None and x.maker.does is dot_general_p


def _repeats(divisor: Cell, eqn: JaxprEqn) -> bool:
    return divisor.kind != "constant" and 8 < divisor.bytes < aval_bytes(eqn.outvars[0].aval)


def _orders(eqn: JaxprEqn, n: int) -> list[Any]:
    """For each operand, the order of axes that it is copied into; None where it is read as it is.

    Products are run with batch axes first and the contracted axes next to them or last; where
    neither is so, they are copied last on the left, next to the batch on the right. Convolutions
    are run with channels last.
    """
    orders: list[Any] = [None] * n
    if eqn.primitive is dot_general_p:
        contracted, batch = eqn.params["dimension_numbers"]
        for i in (0, 1):
            ndim = len(eqn.invars[i].aval.shape)  # pyright: ignore[reportAttributeAccessIssue]
            free = [a for a in range(ndim) if a not in contracted[i] and a not in batch[i]]
            last, first = (*batch[i], *free, *contracted[i]), (*batch[i], *contracted[i], *free)
            if tuple(range(ndim)) not in (last, first):
                orders[i] = (last, first)[i]
    elif eqn.primitive is conv_general_dilated_p:
        numbers = eqn.params["dimension_numbers"]
        for i, (a, b, *spatial) in enumerate((numbers.lhs_spec, numbers.rhs_spec)):
            order = (a, *spatial, b) if i == 0 else (*spatial, b, a)
            orders[i] = None if order == tuple(range(len(order))) else order
    return orders
