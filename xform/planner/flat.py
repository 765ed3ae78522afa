"""A program as its compiler sees it, before fusion: calls opened, equal computations merged.

Views of a value are the value. What is sent to the host takes no bytes there, but on a CPU, which
has one memory, it is a view. What no output needs is left out, and so is a tie that the backend
takes for nothing. Loops and branches stay single steps; their bodies are flattened where they are
looked into.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
from jax import lax

from xform._jax import (
    JaxprEqn,
    Literal,
    Primitive,
    Var,
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


@dataclasses.dataclass(eq=False, slots=True)
class Cell:
    """A value: its bytes, the step that makes it (None: an input or constant), who reads it."""

    bytes: int
    kind: str
    maker: Step | None = None
    readers: list[Step] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False, slots=True)
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
    work = Flattening(cpu)
    inputs = work.inputs(prog.inputs)
    return work.flat(inputs, work.run(prog, inputs))


class Flattening:
    """Steps as they are added, each once: what is equal to one that was taken is that one."""

    def __init__(self, cpu: bool):
        self.cpu = cpu
        self._steps: list[Step] = []
        self._known: dict[Any, list[tuple[Operation, list[Cell]]]] = {}
        self._constants: dict[Any, Cell] = {}

    def flat(self, inputs: Sequence[Cell], outputs: Sequence[Cell]) -> Flat:
        """The steps that the outputs need."""
        need = set(outputs)
        steps: list[Step] = []
        for step in reversed(self._steps):
            if not need.isdisjoint(step.makes) or has_effects(step.eqn):
                need.update(step.reads)
                steps.append(step)
        steps.reverse()
        for step in steps:
            for cell in dict.fromkeys(step.reads):
                cell.readers.append(step)
        return Flat(tuple(inputs), tuple(steps), tuple(outputs))

    def inputs(self, values: Sequence[Var]) -> list[Cell]:
        """The cells of a program's inputs."""
        return [Cell(size_on(v.aval, self.cpu), "input") for v in values]

    def run(self, prog: Program, inputs: Sequence[Cell]) -> list[Cell]:
        """What a program makes of some cells."""
        env: dict[Any, Any] = dict(zip(prog.inputs, inputs, strict=True))
        env |= self.constants(prog)
        known = operations(prog, self.cpu)
        for eqn in prog.equations:
            env.update(zip(eqn.outvars, self.made(known.of(eqn), env), strict=False))
        return [self.read(env, v) for v in prog.outputs]

    def constants(self, prog: Program) -> dict[Var, Cell]:
        """The cells of what a program closes over."""
        return {v: self.constant(id(x)) for v, x in prog.consts}

    def constant(self, key: Any) -> Cell:
        """The cell of a constant: of no bytes."""
        if key not in self._constants:
            self._constants[key] = Cell(0, "constant")
        return self._constants[key]

    def read(self, env: Mapping[Any, Any], v: Any) -> Any:
        """What an environment has for a variable; a literal is a constant."""
        return self.constant(literal(v)) if isinstance(v, Literal) else env[v]

    def made(self, op: Operation, env: Mapping[Any, Any]) -> list[Cell]:
        """What an operation makes of what it reads."""
        reads = [env[v] if said is None else self.constant(said) for v, said in op.atoms]
        prim, eqn = op.eqn.primitive, op.eqn
        if op.inner is not None:
            return self.run(op.inner, reads)
        if op.passes or (prim is lax.transpose_p and _of_product(eqn, reads[0])):
            return reads
        if prim is lax.div_p and _repeats(reads[1], eqn):
            # The compiler multiplies by the reciprocal, which it repeats first.
            repeated = self._step(repeat_p, (reads[1],), op, op.sizes, typed(eqn.outvars[0].aval))
            reads = [reads[0], *repeated]
            prim = lax.mul_p
        if prim is lax.integer_pow_p and eqn.params["y"] > 1:
            return [self._power(reads[0], eqn.params["y"], op)]
        if op.orders:
            reads = [
                self._step(lax.transpose_p, (x,), op, [x.bytes], str(order))[0] if order else x
                for x, order in zip(reads, op.orders, strict=True)
            ]
        return self._step(prim, tuple(reads), op, op.sizes)

    def _power(self, x: Cell, y: int, op: Operation) -> Cell:
        """A power by squares and products, which powers of one value share."""
        times = lambda a, b: self._step(lax.mul_p, (a, b), op, op.sizes, "")[0]
        found = None
        while y:
            if y % 2:
                found = x if found is None else times(found, x)
            y //= 2
            x = times(x, x) if y else x
        return found or x

    def _step(self, does: Primitive, reads: tuple[Any, ...], op: Operation, sizes: Sequence[int],
              text: str | None = None) -> list[Cell]:  # fmt: skip
        """What a step makes; the same as before if it has been taken before.

        Of two that do as their equations say, and read the same, the texts are compared.
        """
        before = self._known.setdefault((does, reads, text), []) if not op.effects else []
        for other, found in before:
            if text is not None or other.text == op.text:
                return found
        made = [Cell(n, "made") for n in sizes]
        cells = [c for c in reads if c.kind != "constant"]
        step = Step(does, op.eqn, cells, made)
        for cell in made:
            cell.maker = step
        self._steps.append(step)
        before.append((op, made))
        return made


@dataclasses.dataclass(frozen=True, eq=False)
class Operation:
    """What an equation is to a compiler, whatever it reads.

    Attributes:
      eqn: the equation.
      atoms: what it reads; of a literal, its text besides.
      sizes: bytes of what it makes, on the device.
      orders: of its operands, the order of axes that each is copied into; empty if none is.
      passes: whether what it makes is what it reads.
      inner: the program of a call.
    """

    eqn: JaxprEqn
    atoms: tuple[tuple[Any, str | None], ...]
    sizes: tuple[int, ...]
    orders: tuple[Any, ...]
    passes: bool
    inner: Program | None
    effects: bool

    @cached_property
    def text(self) -> str:
        """What it does, equal for equal operations."""
        return operation(self.eqn)


class _Operations:
    """The operations of one program's equations, each looked at once."""

    def __init__(self, cpu: bool):
        self._cpu = cpu
        self._found: dict[int, Operation] = {}

    def of(self, eqn: JaxprEqn) -> Operation:
        """The operation of an equation."""
        found = self._found.get(id(eqn))
        if found is None:
            found = self._found[id(eqn)] = _operation(eqn, self._cpu)
        return found


def operations(prog: Program, cpu: bool) -> _Operations:
    """The operations of a program's equations, kept with it."""
    key = "operations", cpu
    if key not in prog.cache:
        prog.cache[key] = _Operations(cpu)
    return prog.cache[key]


def _operation(eqn: JaxprEqn, cpu: bool) -> Operation:
    prim, of = eqn.primitive, traits(eqn.primitive)
    moved = prim is lax.device_put_p and eqn.params["devices"] in _SPACES
    light = prim is tie_p and eqn.params["light"]
    same = of.view and aval_bytes(eqn.invars[0].aval) == aval_bytes(eqn.outvars[0].aval)
    orders = _orders(eqn, len(eqn.invars))
    return Operation(
        eqn,
        tuple((v, literal(v) if isinstance(v, Literal) else None) for v in eqn.invars),
        tuple(size_on(v.aval, cpu) for v in eqn.outvars),
        tuple(orders) if any(orders) else (),
        of.identity or same or (cpu and (moved or light)),
        body(eqn) if of.call else None,
        has_effects(eqn),
    )


def size_on(aval: Any, cpu: bool) -> int:
    """Bytes of a value on the device: none of one in the host's memory, but on a CPU."""
    host = getattr(aval, "memory_space", None) == jax.memory.Space.Host
    return 0 if host and not cpu else aval_bytes(aval)


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
