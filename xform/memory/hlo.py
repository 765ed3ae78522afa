"""Read an optimized HLO module from XLA's dump, as far as the memory analysis needs it.

A `Module` consists of computations, and a computation of instructions. The dump is a protocol
buffer (`proto.py`). Its field numbers come from XLA's hlo.proto and xla_data.proto. All
instructions are read with the module; shapes and source lines are read on first use.
Source: https://github.com/openxla/xla/blob/main/xla/service/hlo.proto
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from xform.memory.proto import Message
from xform.program.frameworks import is_library, line_of_model

# The position of an element in a (nested) tuple; () for the whole value.
Index = tuple[int, ...]

# XLA's PrimitiveType enumeration, from 1, in the short names that JAX prints.
_DTYPE_NAMES = """
    bool i8 i16 i32 i64 u8 u16 u32 u64 f16 f32 f64 tuple opaque c64 bf16 token c128 f8_e5m2
    f8_e4m3fn i4 u4 f8_e4m3b11fnuz f8_e5m2fnuz f8_e4m3fnuz i2 u2 f8_e4m3 f8_e3m4 i1 u1 f4_e2m1fn
    f8_e8m0fnu
"""
_DTYPES = dict(enumerate(_DTYPE_NAMES.split(), start=1))
# Bits of an element, where the name does not end in them.
_BITS = {"bool": 8, "c64": 64, "c128": 128, "bf16": 16}

# The trip count that XLA notes at a loop.
_TRIP_COUNT = re.compile(r'"known_trip_count":{"n":"(\d+)"}')
# The summed axes of the first operand, in the configuration of a matrix product of cuBLAS.
_GEMM = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')


@dataclasses.dataclass(frozen=True)
class Shape:
    """The type of one array (or `tuple`, `token`).

    Attributes:
      dtype: as JAX prints it, such as `bf16`.
      dims: sizes of the axes.
      minor_to_major: the layout: the axes, starting with the one that is contiguous in memory.
      space: memory space of the layout; 0 is the device's main memory.
      elements: the types of a tuple's elements.
    """

    dtype: str
    dims: tuple[int, ...] = ()
    minor_to_major: tuple[int, ...] = ()
    space: int = 0
    elements: tuple[Shape, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes of the elements, without padding; 0 for tuples and tokens."""
        digits = self.dtype.partition("_")[0].lstrip("abcdefghijklmnopqrstuvwxyz")
        bits = _BITS.get(self.dtype) or int(digits or 0)
        for n in self.dims:
            bits *= n
        return -(-bits // 8)

    def at(self, index: Sequence[int]) -> Shape:
        """Return the type of an element of a (nested) tuple."""
        shape = self
        for i in index:
            shape = shape.elements[i]
        return shape


class Instruction:
    """One HLO instruction. The arguments are its protocol buffer, and its computation's id.

    Attributes:
      id: unique in the module.
      name, opcode: as in HLO.
      operands: ids of the instructions that it reads.
      called: ids of the computations that it calls.
      computation: id of the computation that contains it.
      op_name: JAX's path of scopes and primitive; for a parameter, the argument's name.
      frame: its stack frame in the module's table; 0 if it has none.
      number: a parameter's number, or the tuple index of a get-tuple-element.
      target: the name of the function that a custom call calls.
      summed: for a matrix product, the axes of its first operand that are summed; for a
        convolution, the axis of the kernel's output features; else empty.
      value: the value of a constant that is one integer, else None.
    """

    __slots__ = (
        "_file",
        "_shape",
        "_trips",
        "called",
        "computation",
        "frame",
        "id",
        "name",
        "number",
        "op_name",
        "opcode",
        "operands",
        "summed",
        "target",
        "value",
    )

    def __init__(self, data: Message, computation: int):
        meta = data.message(7)
        self.id, self.name, self.opcode = data.number(35), data.text(1), data.text(2)
        self.operands, self.called = data.numbers(36), data.numbers(38)
        self.computation = computation
        self.op_name, self.frame = meta.text(2), meta.number(15)
        self.number = data.number(13 if self.opcode == "get-tuple-element" else 9)
        self.target = data.text(28)
        self.summed = _summed(self.opcode, self.target, data)
        self._file = (meta.text(3), meta.number(4))
        self.value, self._trips = None, 0
        if self.opcode == "constant":
            values = [n for field in (4, 5) for n in data.message(8).numbers(field)]
            self.value = values[0] if len(values) == 1 else None
        elif self.opcode == "while":
            match = _TRIP_COUNT.search(data.text(43))
            self._trips = int(match[1]) if match else 0
        self._shape: Any = data.message(3)

    @property
    def shape(self) -> Shape:
        """The type of the instruction's result."""
        if isinstance(self._shape, Message):
            self._shape = _shape(self._shape)
        return self._shape


@dataclasses.dataclass(frozen=True)
class Computation:
    """A computation: a function of the module.

    Attributes:
      id: unique in the module.
      instructions: its instructions. If the module is scheduled, they are in execution order.
      root: id of the instruction whose result is the computation's result.
      fused: whether it is the body of a fusion.
    """

    id: int
    name: str
    instructions: tuple[Instruction, ...]
    root: int
    fused: bool


class Module:
    """An HLO module, read from its protocol buffer.

    Attributes:
      name: name of the jitted function.
      entry: id of the entry computation.
      computations: all computations, by id.
      instructions: all instructions, by id.
      aliases: for each output in the memory of a donated argument: the output's index, the
        argument's parameter number, and the index in that parameter.
    """

    def __init__(self, data: Message):
        self.name, self.entry = data.text(1), data.number(6)
        schedules = {entry.number(1): entry.message(2).numbers(1)
                     for entry in data.message(7).messages(1)}  # fmt: skip
        self.computations: dict[int, Computation] = {}
        self.instructions: dict[int, Instruction] = {}
        for computation in data.messages(3):
            number = computation.number(5)
            instructions = {
                i.id: i for i in (Instruction(m, number) for m in computation.messages(2))
            }
            order = schedules.get(number, instructions)
            self.instructions.update(instructions)
            self.computations[number] = Computation(
                number,
                computation.text(1),
                tuple(instructions[i] for i in order),
                computation.number(6),
                bool(computation.number(7)),
            )
        self.aliases = [
            (tuple(a.numbers(1)), a.number(2), tuple(a.numbers(3)))
            for a in data.message(8).messages(1)
        ]
        self._frames = _Frames(data.message(17))

    def root(self, computation: int) -> Instruction:
        """Return the instruction whose result is the result of a computation."""
        return self.instructions[self.computations[computation].root]

    @cached_property
    def callers(self) -> dict[int, Instruction]:
        """For each computation, the (last) instruction that calls it."""
        return {c: i for i in self.instructions.values() for c in i.called}

    @cached_property
    def order(self) -> dict[int, int]:
        """The step of each instruction, by id: program order, with each loop's body once.

        As in XLA's own numbering, the steps of a called computation (the condition and body of a
        loop, a branch) come just before the step of the instruction that calls it. Instructions
        inside fusions have no step.
        """
        steps: dict[int, int] = {}
        for i, instruction in enumerate(self._in_order(self.entry)):
            steps.setdefault(instruction.id, i)
        return steps

    def _in_order(self, computation: int) -> Iterator[Instruction]:
        """Yield the instructions of a computation and of the computations that it calls."""
        for instruction in self.computations[computation].instructions:
            called = instruction.called
            if instruction.opcode == "while":
                # XLA lists the body first and runs the condition first.
                called = called[::-1]
            if instruction.opcode in ("while", "conditional", "call", "async-start"):
                for inner in called:
                    yield from self._in_order(inner)
            yield instruction

    def trips(self, loop: Instruction) -> int:
        """Return the trip count of a loop; 1 if it is not known.

        It is the trip count that XLA noted, or else the only positive constant in the loop's
        condition. (A constant below 1 is a part of a bound that the program computes.)
        """
        if loop._trips:
            return loop._trips
        body = loop.called[0]
        condition = [i for c in loop.called if c != body for i in self._with_fusions(c)]
        bounds = {i.value for i in condition if i.value and i.value > 0}
        return bounds.pop() if len(bounds) == 1 else 1

    def named(self, instruction: Instruction) -> str:
        """Return the `op_name` of an operation; for one that the compiler added, a substitute.

        The substitute for a fusion is the name of the last operation in it that has a name. For
        another operation, it is the name of the instruction that calls its computation, such as the
        loop around it.
        """
        owner: Instruction | None = instruction
        while owner is not None and not owner.op_name:
            inside = owner.called if owner.opcode == "fusion" else ()
            names = (i.op_name for c in inside
                     for i in reversed(self.computations[c].instructions)
                     if i.opcode != "parameter")  # fmt: skip
            if name := next(filter(None, names), ""):
                return name
            owner = self.callers.get(owner.computation)
        return owner.op_name if owner else ""

    def _with_fusions(self, computation: int) -> Iterator[Instruction]:
        """Yield the instructions of a computation, and the instructions in its fusions."""
        for instruction in self.computations[computation].instructions:
            yield instruction
            for inner in instruction.called if instruction.opcode == "fusion" else ():
                yield from self.computations[inner].instructions

    def where(self, instruction: Instruction) -> str:
        """Return `file:line (function)` of the model's code that made it; "" if it is unknown.

        The line may be in an installed package (`program/frameworks.py`).
        """
        if instruction.frame:
            return self._frames.line_of_model(instruction.frame)
        path, line = instruction._file
        return f"{path}:{line}" if path and not is_library(path) else ""


class _Frames:
    """The module's table of stack frames. Its indices start at 1."""

    def __init__(self, data: Message):
        self._files, self._functions = data.texts(1), data.texts(2)
        # Each location is a file, a function and a line; each frame a location and its caller.
        self._locations = [(m.number(1), m.number(2), m.number(3)) for m in data.messages(3)]
        self._frames = [(m.number(1), m.number(2)) for m in data.messages(4)]
        self._lines: dict[int, str] = {}

    def line_of_model(self, frame: int) -> str:
        """Return `file:line (function)` of the model's code for a frame; "" if it is unknown."""
        if frame not in self._lines:
            self._lines[frame] = line_of_model(self._with_callers(frame))
        return self._lines[frame]

    def _with_callers(self, frame: int) -> Iterator[tuple[str, str]]:
        """Yield the file and the line of a frame, and then of its callers."""
        while frame:
            location, frame = self._frames[frame - 1]
            file, function, line = self._locations[location - 1]
            path = self._files[file - 1]
            if not is_library(path):
                name = self._functions[function - 1].rpartition(".")[2]
                yield path, f"{path}:{line} ({name})"


def _summed(opcode: str, target: str, data: Message) -> tuple[int, ...]:
    """Return the attribute `summed` of an instruction."""
    if opcode == "dot":
        return tuple(data.message(30).numbers(1))
    if opcode == "convolution":
        return (data.message(16).number(4),)
    if "gemm" in target and (match := _GEMM.search(data.text(43))):
        return tuple(map(int, re.findall(r"\d+", match[1])))
    return ()


def _shape(data: Message) -> Shape:
    """Return the type in a ShapeProto."""
    layout = data.message(5)
    return Shape(
        _DTYPES.get(data.number(2), "opaque"),
        tuple(data.numbers(3)),
        tuple(layout.numbers(1)),
        layout.number(8),
        tuple(map(_shape, data.messages(4))),
    )
