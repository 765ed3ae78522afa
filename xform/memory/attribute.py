"""Buffers of a compiled program in the user's words: operation, line, scope and category.

A category is what a buffer is for, by these rules, of which the first that holds counts:

- entry parameters: what the caller says (`parameter`, `optimizer state`), else `argument`. A
  donated argument that holds an output in the end is one row, the argument's;
- `gradient`: made by the backward part, of the shape of an argument (of a `parameter`, if the
  caller named any), and read by no other operation of the backward part, except to add to it in
  place, to convert it, or to add up those of all devices; so is an output's memory that holds one
  at the peak;
- `output`: what else is returned;
- `activation`: made by the forward part and read by the backward part, recomputes included;
- `recompute`: made by the forward part's operations, run again;
- `temporary`: all else; `constant`: constants, which no kind of the headline counts.

The parts are told by the scopes in an operation's name: those of `xform.interpret.emit`, or JAX's
`transpose(...)` and `rematted_computation`; the innermost counts. What has none of them, such as
an optimizer's update, counts as forward. A fusion is its last operation.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

from xform.interpret.emit import BACKWARD, RECOMPUTE
from xform.memory.buffers import COUNTED, DEVICE, Assignment, Buffer, Storage
from xform.memory.hlo import Index, Instruction
from xform.memory.origin import Flow
from xform.text import near

FRAGMENTATION = "fragmentation"

_STRUCTURE = re.compile(
    r"while|body|cond|closed_call|core_call|call_exported|eval_jaxpr|checkpoint|remat2?"
    r"|rematted_computation|custom_jvp_call|custom_vjp_call\w*|shard_map|branch_\d+_fun|p?jit(\(.*\))?|.*->.*|"
)
# The scopes of `xform.interpret.emit`, of which one says why a value is saved.
_OURS = re.compile(r"xform\((?:saved: (?P<why>(?:[^()]|\([^()]*\))*)|\w*)\)(?:/|$)")
# What makes of a derivative the same in another dtype, place or order, or of those of all devices
# their sum: by the primitive, or by HLO's word.
_HANDED_ON = frozenset((
    "convert_element_type", "psum", "psum_invariant", "all-reduce", "reduce-scatter", "convert",
    "copy", "copy-start", "copy-done",
))  # fmt: skip
_WRAPPED = re.compile(r"(?:transpose|jvp|vmap|linearize)\((.*)\)")


@dataclasses.dataclass(frozen=True)
class Argument:
    """What the caller knows of an entry parameter."""

    name: str = ""
    category: str = "argument"


@dataclasses.dataclass(frozen=True)
class Row:
    """One buffer.

    Attributes:
      name: the HLO instruction, and the index of its output; of an argument its path, and
        `fragmentation` for the part of the temp blocks that no buffer takes at the peak: it is
        reserved from the first step to the last.
      bytes: the padding of the layout is included.
      dtype, shape: as JAX prints them.
      operation: the JAX primitive, else the HLO operation.
      where: `file:line (function)` that it comes from; of an argument, where it is first read.
      scope: named scopes and module paths, joined by `/`.
      category: see the module.
      why: of an activation that `xform` saves, the reason.
      born, dies: the steps of program order between which it is live, both included.
      at_peak: it is counted and live at the peak; these rows' bytes add up to the headline.
      output: it holds an output in the end; an argument that does is donated and used.
      space: memory space; 0 is main memory, see `xform.memory.buffers`.
      counted: it is in main memory and no constant. At each step, the bytes of the counted rows
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
        """As plain data."""
        return {**dataclasses.asdict(self), "shape": list(self.shape)}


def rows(
    assignment: Assignment,
    arguments: Mapping[int, Argument] | Sequence[Argument] = (),
) -> list[Row]:
    """The buffers of a compiled program, largest first.

    Args:
      assignment: what `xform.memory.buffers.read` returns.
      arguments: what is known of the entry parameters, by parameter number. These are the flat
        arguments without those that `jax.jit` drops because nothing reads them.

    Returns:
      A row for each buffer: those that are `at_peak` add up to `assignment.total_bytes`.

    Cost: plain Python, about 20 microseconds for each instruction.
    """
    known = arguments if isinstance(arguments, Mapping) else dict(enumerate(arguments))
    return _Reader(assignment, known).rows()


def fullest(found: Sequence[Row]) -> list[Row]:
    """Those rows that are live at the step where the given rows take the most bytes."""
    change: dict[int, int] = {}
    for row in found:
        change[row.born] = change.get(row.born, 0) + row.bytes
        change[row.dies + 1] = change.get(row.dies + 1, 0) - row.bytes
    steps = sorted(change)
    sizes = list(accumulate(change[step] for step in steps))
    most = steps[sizes.index(max(sizes))] if steps else 0
    return [row for row in found if row.born <= most <= row.dies]


def part(op_name: str) -> str:
    """Which part of a derivative an operation is of: `backward`, `recompute` or `` (forward).

    >>> from xform.memory.attribute import part
    >>> part("jit(f)/jvp(mlp)/mul"), part("jit(f)/transpose(jvp(mlp))/mul")
    ('', 'backward')
    """
    for piece in reversed(op_name.split("/")):
        if piece in (RECOMPUTE, "rematted_computation"):
            return "recompute"
        if piece == BACKWARD or piece.startswith("transpose("):
            return "backward"
    return ""


def scope(op_name: str) -> str:
    """The named scopes in an operation's name, without what JAX and xform add.

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
    # A function that is traced in its own scope has that in its name twice.
    for n in range(len(pieces) // 2, 0, -1):
        i = 0
        while i + 2 * n <= len(pieces):
            if pieces[i : i + n] == pieces[i + n : i + 2 * n]:
                del pieces[i : i + n]
            else:
                i += 1
    return "/".join(pieces)


def reason(op_name: str) -> str:
    """Why the value of an operation is saved, if its name says it.

    >>> from xform.memory.attribute import reason
    >>> reason("jit(f)/xform(saved: on the cheapest cut)/mlp/dot_general")
    'on the cheapest cut'
    """
    return next((why for m in _OURS.finditer(op_name) if (why := m["why"])), "")


def operation(instruction: Instruction) -> str:
    """The primitive in an operation's name, or HLO's own word."""
    last = instruction.op_name.rpartition("/")[2]
    if not instruction.op_name or _STRUCTURE.fullmatch(last) or _WRAPPED.fullmatch(last):
        return instruction.opcode.replace("-", "_")
    return last


class _Reader:
    def __init__(self, assignment: Assignment, arguments: Mapping[int, Argument]):
        self._assignment, self._module = assignment, assignment.module
        self._arguments = arguments
        self._flow = Flow(assignment.module)

    def rows(self) -> list[Row]:
        table = [self._row(s) for s in self._assignment.storages]
        if rest := self._assignment.fragmentation_bytes:
            last = len(self._assignment.live) - 1
            table.append(Row(FRAGMENTATION, rest, "", (), "", "", "", "temporary", "", 0, last,
                             True))  # fmt: skip
        return sorted(table, key=lambda row: -row.bytes)

    def _row(self, storage: Storage) -> Row:
        kind = storage.allocation.kind
        buffer, maker = self._value(storage)
        own = self._module.instructions[buffer.instruction]
        shape = own.shape.at(buffer.index)
        index = "".join(f"{{{k}}}" for k in buffer.index)
        name, where = own.name + index, self._flow.where(maker)
        if kind == "argument":
            number = (storage.allocation.parameter or (0, ()))[0]
            argument = self._arguments.get(number, Argument())
            name, category = argument.name or own.op_name or own.name, argument.category
            first = min(self._readers(buffer), key=self._step, default=None)
            where, scopes, word = self._flow.where(first) if first else "", "", "parameter"
        else:
            category = self._category(storage, buffer, maker)
            scopes, word = scope(maker.op_name), operation(maker)
        why = reason(maker.op_name) if category == "activation" else ""
        peak = self._assignment.peak_step
        counted = storage.allocation.space == DEVICE and kind in COUNTED
        at_peak = counted and storage.born <= peak <= storage.dies
        return Row(name, storage.bytes, shape.dtype, shape.dims, word, near(where), scopes,
                   category, why, storage.born, storage.dies, at_peak,
                   storage.allocation.out, storage.allocation.space, counted)  # fmt: skip

    def _value(self, storage: Storage) -> tuple[Buffer, Instruction]:
        """The buffer that says what a storage holds, and the operation that made it.

        Several values may follow each other in one place. Of those that fill it the last before the
        peak counts, of an output the last of all; but what a loop's body writes counts before the
        zeros that the loop started from, and what writes before the state that carries it on.
        """
        origin = {b.id: self._flow.origin(b.instruction, b.index) for b, _ in storage.buffers}
        kept = storage.allocation.kind == "output"
        until = len(self._module.order) if kept else self._assignment.peak_step

        def rank(entry: tuple[Buffer, int]) -> tuple[bool, bool, bool, bool, bool, int]:
            buffer, born = entry
            maker, own = origin[buffer.id], self._module.instructions[buffer.instruction]
            state = own.opcode in ("while", "parameter")
            lined = kept or bool(self._module.where(maker))
            whole = buffer.bytes == storage.bytes
            return whole, not self._flow.filled(maker), lined, born <= until, not state, born

        own = [e for e in storage.buffers if e[0].instruction in self._argument_ids]
        buffer = own[0][0] if own else max(storage.buffers, key=rank)[0]
        return buffer, origin[buffer.id]

    def _category(self, storage: Storage, buffer: Buffer, maker: Instruction) -> str:
        if storage.allocation.kind == "constant":
            return "constant"
        readers = [(u, self._part(u)) for u in self._readers(buffer)]
        mine = self._part(maker)
        if self._gradient(storage, buffer, maker):
            return "gradient"
        if storage.allocation.kind == "output":
            return "gradient" if self._gradient_then(storage) else "output"
        if mine == "recompute":
            return mine
        return "activation" if not mine and any(p for _, p in readers) else "temporary"

    def _gradient(self, storage: Storage, buffer: Buffer, maker: Instruction) -> bool:
        """Whether a value is a parameter's derivative that is complete, or is being added up."""
        shape = self._shape(buffer.instruction, buffer.index)
        if self._part(maker) != "backward" or shape not in self._parameters:
            return False
        inside = {b.instruction for b, _ in storage.buffers}
        readers = [u for u in self._readers(buffer) if self._part(u) and u.id not in inside]
        return all(operation(u) in _HANDED_ON or u.opcode in _HANDED_ON for u in readers)

    def _gradient_then(self, storage: Storage) -> bool:
        """Whether an output's memory holds a derivative at the peak, as for an update in place."""
        peak = self._assignment.peak_step
        then = [b for b, born in storage.buffers if born <= peak]
        return bool(then) and self._gradient(
            storage, then[-1], self._flow.origin(then[-1].instruction, then[-1].index)
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
        """Shapes of the arguments that may have gradients, in whatever dtype of floats."""
        named = {n for n, a in self._arguments.items() if a.category == "parameter"}
        parameters = [a.parameter for a in self._assignment.allocations if a.parameter]
        shapes = (
            self._shape(self._entry[n].id, i) for n, i in parameters if not named or n in named
        )
        return {shape for shape in shapes if shape is not None}

    def _shape(self, instruction: int, index: Index) -> tuple[int, ...] | None:
        """The shape of a value, if it is of floats."""
        shape = self._module.instructions[instruction].shape.at(index)
        return shape.dims if shape.dtype.startswith(("f", "bf", "c")) else None

    def _step(self, instruction: Instruction) -> int:
        return self._module.order.get(instruction.id, len(self._module.order))

    def _part(self, instruction: Instruction) -> str:
        """The part of an operation."""
        return part(self._module.named(instruction))

    def _readers(self, buffer: Buffer) -> list[Instruction]:
        return self._flow.readers([(buffer.instruction, buffer.index)])
