"""Attribute the buffers of a compiled program to operations, lines, scopes and categories.

The category says what a buffer is for. The first rule that applies decides:

- an entry parameter has the category that the caller names (`parameter`, `optimizer state`), else
  `argument`. A donated argument that holds an output at the end is one row, the argument's;
- `gradient`: the backward pass made the value, it has the shape of an argument (of a `parameter`,
  if the caller named any), and no other operation of the backward pass reads it, except to add to
  it in place, to convert it, or to sum it over the devices. The memory of an output that holds
  such a value at the peak is `gradient` too;
- `output`: any other result of the program;
- `activation`: made by the forward pass and read by the backward pass or by a recompute;
- `recompute`: made by a recomputed operation of the forward pass;
- `temporary`: everything else; `constant`: constants, which the headline does not count.

The scopes in an operation's name tell the pass: the scopes of `xform.interpret.emit`, or JAX's
`transpose(...)` and `rematted_computation`. The innermost one counts. An operation without such a
scope, for example of an optimizer's update, counts as forward. A fusion is attributed to its last
operation.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

from xform.interpret.emit import BACKWARD, RECOMPUTE
from xform.memory.buffers import COUNTED, DEVICE, Assignment, Buffer, MemoryChunk
from xform.memory.dataflow import DataFlow
from xform.memory.hlo import Index, Instruction
from xform.terminal.text import shorten_place

FRAGMENTATION = "fragmentation"

_STRUCTURE = re.compile(
    r"while|body|cond|closed_call|core_call|call_exported|eval_jaxpr|checkpoint|remat2?"
    r"|rematted_computation|custom_jvp_call|custom_vjp_call\w*|shard_map|branch_\d+_fun|p?jit(\(.*\))?|.*->.*|"
)
# The scopes of `xform.interpret.emit`. One of them names the reason why a value is saved.
_OURS = re.compile(r"xform\((?:saved: (?P<why>(?:[^()]|\([^()]*\))*)|\w*)\)(?:/|$)")
# Operations that convert, copy or move a derivative, or sum it over the devices: primitives of JAX
# and opcodes of HLO.
_HANDED_ON = frozenset((
    "convert_element_type", "psum", "psum_invariant", "all-reduce", "reduce-scatter", "convert",
    "copy", "copy-start", "copy-done",
))  # fmt: skip
_WRAPPED = re.compile(r"(?:transpose|jvp|vmap|linearize)\((.*)\)")


@dataclasses.dataclass(frozen=True)
class Argument:
    """The name and category that the caller gives to an entry parameter."""

    name: str = ""
    category: str = "argument"


@dataclasses.dataclass(frozen=True)
class BufferRow:
    """One buffer.

    Attributes:
      name: the HLO instruction and the index of its output; for an argument, its path.
        `fragmentation` is the part of the temp blocks that no buffer uses at the peak. It is
        reserved from the first step to the last.
      bytes: size, with the padding of the layout.
      dtype, shape: as JAX prints them.
      operation: the JAX primitive, else the HLO operation.
      where: `file:line (function)` of the operation that made it; for an argument, of the
        operation that reads it first.
      scope: named scopes and module paths, joined by `/`.
      category: see the docstring of this module.
      why: the reason why `xform` saves this activation; empty for other buffers.
      born, dies: the first and the last step at which it is live, in program order.
      at_peak: it is counted and live at the peak; the bytes of these rows add up to the headline.
      output: it holds an output at the end; such an argument is donated and its memory reused.
      space: memory space; 0 is main memory, see `xform.memory.buffers`.
      counted: it is in main memory and not a constant. At each step, the bytes of the counted rows
        that are live there add up to the live bytes.
    """

    name: str
    bytes: int
    dtype: str
    shape: tuple[int, ...]
    operation: str
    where: str
    scope: str
    category: str
    why: str
    born: int
    dies: int
    at_peak: bool
    output: bool = False
    space: int = DEVICE
    counted: bool = True

    def to_dict(self) -> dict[str, Any]:
        """The row as plain data, for JSON."""
        return {**dataclasses.asdict(self), "shape": list(self.shape)}


def rows(
    assignment: Assignment,
    arguments: Mapping[int, Argument] | Sequence[Argument] = (),
) -> list[BufferRow]:
    """List the buffers of a compiled program, largest first.

    Args:
      assignment: the result of `xform.memory.buffers.read`.
      arguments: names and categories of the entry parameters, by parameter number. The entry
        parameters are the flat arguments without the unused ones, which `jax.jit` drops.

    Returns:
      A row for each buffer. The rows that are `at_peak` add up to `assignment.total_bytes`.

    Cost: plain Python, about 20 microseconds for each instruction.
    """
    known = arguments if isinstance(arguments, Mapping) else dict(enumerate(arguments))
    return _BufferAttribution(assignment, known).rows()


def peak_rows(found: Sequence[BufferRow]) -> list[BufferRow]:
    """The rows that are live at the step where all these rows together take the most bytes."""
    change: dict[int, int] = {}
    for row in found:
        change[row.born] = change.get(row.born, 0) + row.bytes
        change[row.dies + 1] = change.get(row.dies + 1, 0) - row.bytes
    steps = sorted(change)
    sizes = list(accumulate(change[step] for step in steps))
    most = steps[sizes.index(max(sizes))] if steps else 0
    return [row for row in found if row.born <= most <= row.dies]


def pass_name(op_name: str) -> str:
    """The pass of a derivative that an operation belongs to: `backward`, `recompute` or ``.

    The empty text is the forward pass, or an operation outside any derivative.

    >>> from xform.memory.attribute import pass_name
    >>> pass_name("jit(f)/jvp(mlp)/mul"), pass_name("jit(f)/transpose(jvp(mlp))/mul")
    ('', 'backward')
    """
    for piece in reversed(op_name.split("/")):
        if piece in (RECOMPUTE, "rematted_computation"):
            return "recompute"
        if piece == BACKWARD or piece.startswith("transpose("):
            return "backward"
    return ""


def scope(op_name: str) -> str:
    """The user's named scopes in an operation's name, without the ones that JAX and xform add.

    >>> from xform.memory.attribute import scope
    >>> scope("jit(f)/transpose(jvp(decoder))/while/body/closed_call/mlp/dot_general")
    'decoder/mlp'
    """
    pieces: list[str] = []
    for piece in _OURS.sub("", op_name).split("/")[:-1]:
        while wrapper := _WRAPPED.fullmatch(piece):
            piece = wrapper[1]
        if not _STRUCTURE.fullmatch(piece):
            pieces.append(piece)
    # A function that is traced in its own scope has that scope twice in its name.
    for n in range(len(pieces) // 2, 0, -1):
        i = 0
        while i + 2 * n <= len(pieces):
            if pieces[i : i + n] == pieces[i + n : i + 2 * n]:
                del pieces[i : i + n]
            else:
                i += 1
    return "/".join(pieces)


def reason(op_name: str) -> str:
    """Why the value of an operation is saved, from its name; empty if the name has no reason.

    >>> from xform.memory.attribute import reason
    >>> reason("jit(f)/xform(saved: on the cheapest cut)/mlp/dot_general")
    'on the cheapest cut'
    """
    return next((why for m in _OURS.finditer(op_name) if (why := m["why"])), "")


def operation(instruction: Instruction) -> str:
    """The primitive in an operation's name, else its HLO opcode."""
    last = instruction.op_name.rpartition("/")[2]
    if not instruction.op_name or _STRUCTURE.fullmatch(last) or _WRAPPED.fullmatch(last):
        return instruction.opcode.replace("-", "_")
    return last


class _BufferAttribution:
    def __init__(self, assignment: Assignment, arguments: Mapping[int, Argument]):
        self._assignment, self._module = assignment, assignment.module
        self._arguments = arguments
        self._flow = DataFlow(assignment.module)

    def rows(self) -> list[BufferRow]:
        table = [self._row(s) for s in self._assignment.chunks]
        if rest := self._assignment.fragmentation_bytes:
            last = len(self._assignment.live) - 1
            table.append(BufferRow(FRAGMENTATION, rest, "", (), "", "", "", "temporary", "", 0,
                                   last, True))  # fmt: skip
        return sorted(table, key=lambda row: -row.bytes)

    def _row(self, chunk: MemoryChunk) -> BufferRow:
        kind = chunk.allocation.kind
        buffer, maker = self._value(chunk)
        own = self._module.instructions[buffer.instruction]
        shape = own.shape.at(buffer.index)
        index = "".join(f"{{{k}}}" for k in buffer.index)
        name, where = own.name + index, self._flow.where(maker)
        if kind == "argument":
            number = (chunk.allocation.parameter or (0, ()))[0]
            argument = self._arguments.get(number, Argument())
            name, category = argument.name or own.op_name or own.name, argument.category
            first = min(self._readers(buffer), key=self._step, default=None)
            where, scopes, word = self._flow.where(first) if first else "", "", "parameter"
        else:
            category = self._category(chunk, buffer, maker)
            scopes, word = scope(maker.op_name), operation(maker)
        why = reason(maker.op_name) if category == "activation" else ""
        peak = self._assignment.peak_step
        counted = chunk.allocation.space == DEVICE and kind in COUNTED
        at_peak = counted and chunk.born <= peak <= chunk.dies
        return BufferRow(
            name,
            chunk.bytes,
            shape.dtype,
            shape.dims,
            word,
            shorten_place(where),
            scopes,
            category,
            why,
            chunk.born,
            chunk.dies,
            at_peak,
            chunk.allocation.out,
            chunk.allocation.space,
            counted,
        )

    def _value(self, chunk: MemoryChunk) -> tuple[Buffer, Instruction]:
        """The buffer that describes a chunk, and the operation that made it.

        Several values may use one chunk in turn. Among those that fill the chunk, the last one
        before the peak is chosen; for an output, the last one of the program. A loop's body writes
        its result over the zeros that the loop started from: the result is chosen. Of a value and
        the loop state that carries it, the operation that writes the value is chosen.
        """
        origin = {b.id: self._flow.origin(b.instruction, b.index) for b, _ in chunk.buffers}
        is_output = chunk.allocation.kind == "output"
        until = len(self._module.order) if is_output else self._assignment.peak_step

        def rank(entry: tuple[Buffer, int]) -> tuple[bool, bool, bool, bool, bool, int]:
            buffer, born = entry
            maker, own = origin[buffer.id], self._module.instructions[buffer.instruction]
            state = own.opcode in ("while", "parameter")
            has_line = is_output or bool(self._module.where(maker))
            full = buffer.bytes == chunk.bytes
            return (
                full,
                not self._flow.only_initializes(maker),
                has_line,
                born <= until,
                not state,
                born,
            )

        own = [e for e in chunk.buffers if e[0].instruction in self._argument_ids]
        buffer = own[0][0] if own else max(chunk.buffers, key=rank)[0]
        return buffer, origin[buffer.id]

    def _category(self, chunk: MemoryChunk, buffer: Buffer, maker: Instruction) -> str:
        if chunk.allocation.kind == "constant":
            return "constant"
        readers = [(u, self._part(u)) for u in self._readers(buffer)]
        maker_part = self._part(maker)
        if self._gradient(chunk, buffer, maker):
            return "gradient"
        if chunk.allocation.kind == "output":
            return "gradient" if self._gradient_at_peak(chunk) else "output"
        if maker_part == "recompute":
            return maker_part
        return "activation" if not maker_part and any(p for _, p in readers) else "temporary"

    def _gradient(self, chunk: MemoryChunk, buffer: Buffer, maker: Instruction) -> bool:
        """Whether a value is a parameter's gradient, complete or still accumulating."""
        shape = self._shape(buffer.instruction, buffer.index)
        if self._part(maker) != "backward" or shape not in self._parameters:
            return False
        inside = {b.instruction for b, _ in chunk.buffers}
        readers = [u for u in self._readers(buffer) if self._part(u) and u.id not in inside]
        return all(operation(u) in _HANDED_ON or u.opcode in _HANDED_ON for u in readers)

    def _gradient_at_peak(self, chunk: MemoryChunk) -> bool:
        """Whether an output's memory holds a gradient at the peak, as for an update in place."""
        peak = self._assignment.peak_step
        at_peak = [b for b, born in chunk.buffers if born <= peak]
        return bool(at_peak) and self._gradient(
            chunk, at_peak[-1], self._flow.origin(at_peak[-1].instruction, at_peak[-1].index)
        )

    @cached_property
    def _entry(self) -> dict[int, Instruction]:
        """The entry parameters, by number."""
        entry = self._module.computations[self._module.entry]
        return {i.number: i for i in entry.instructions if i.opcode == "parameter"}

    @cached_property
    def _argument_ids(self) -> set[int]:
        return {i.id for i in self._entry.values()}

    @cached_property
    def _parameters(self) -> set[tuple[int, ...]]:
        """Shapes of the floating-point arguments: only these have gradients."""
        named = {n for n, a in self._arguments.items() if a.category == "parameter"}
        parameters = [a.parameter for a in self._assignment.allocations if a.parameter]
        shapes = (
            self._shape(self._entry[n].id, i) for n, i in parameters if not named or n in named
        )
        return {shape for shape in shapes if shape is not None}

    def _shape(self, instruction: int, index: Index) -> tuple[int, ...] | None:
        """The shape of a value; None if its dtype is not floating or complex."""
        shape = self._module.instructions[instruction].shape.at(index)
        return shape.dims if shape.dtype.startswith(("f", "bf", "c")) else None

    def _step(self, instruction: Instruction) -> int:
        return self._module.order.get(instruction.id, len(self._module.order))

    def _part(self, instruction: Instruction) -> str:
        """The pass that an operation belongs to, see `pass_name`."""
        return pass_name(self._module.named(instruction))

    def _readers(self, buffer: Buffer) -> list[Instruction]:
        return self._flow.readers([(buffer.instruction, buffer.index)])
