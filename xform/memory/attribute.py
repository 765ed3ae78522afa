"""Attribute the buffers of a compiled program to operations, source lines, scopes and categories.

A *buffer* is memory that the compiled program uses from one step to another. A *row* is the report
on one buffer (`BufferRow`). In the compiler's own terms the memory of a row is a *chunk*, which may
hold several values in turn (`buffers.py`). The category of a row says what the buffer is for. The
first rule that applies decides:

- an argument has the category that the caller names (`parameter`, `optimizer state`), else
  `argument`. A donated argument that holds an output at the end is one row, with the category of
  the argument;
- `constant`: constants, which the total does not count;
- `gradient`: the backward pass computed the value, and it has the axes of an argument (of a
  `parameter`, if the caller named any), in any order. No other operation of the backward pass reads
  it, except to add to it in place, to convert it, or to sum it over the devices. Such a value times
  a number, or clipped, is a `gradient` too, and so is an output whose memory holds one at the peak;
- `output`: any other result of the program;
- `recompute`: computed by a recomputed operation, in the backward pass;
- `activation`: computed by the forward pass, before the backward pass, and read by the backward
  pass or by a recomputed operation. A copy that the backward pass makes of such a value is not one;
- `temporary`: everything else.

The scopes in an operation's name tell which pass it belongs to: the scopes that xform adds
(`interpret/emit.py`), or JAX's `transpose(...)` and `rematted_computation`. The innermost one
counts. An operation without such a scope, for example in an optimizer's update, counts as forward.
So does a recomputed operation that the compiler runs in the forward pass (`phases.py`).
A fusion is attributed to its last operation.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

from xform.memory.buffers import COUNTED, DEVICE, Assignment, Buffer, MemoryChunk
from xform.memory.dataflow import DataFlow, ValueId
from xform.memory.hlo import Index, Instruction
from xform.memory.phases import Passes
from xform.memory.scaled import ScaledCopies
from xform.terminal.text import shorten_place

FRAGMENTATION = "fragmentation"

# Pieces of an operation's name that JAX adds. They are not scopes of the user.
_STRUCTURE = re.compile(
    r"while|body|cond|closed_call|core_call|call_exported|eval_jaxpr|checkpoint|remat2?"
    r"|rematted_computation|custom_jvp_call|custom_vjp_call\w*|shard_map|branch_\d+_fun|p?jit(\(.*\))?|.*->.*|"
)
# The scopes that xform adds. One of them names the reason why a value is saved.
_XFORM_SCOPE = re.compile(r"xform\((?:saved: (?P<why>(?:[^()]|\([^()]*\))*)|\w*)\)(?:/|$)")
# Operations that convert or copy a derivative, or sum it over the devices: primitives of JAX and
# opcodes of HLO. A gradient that only they read still counts as a gradient, not as a temporary.
_PASSES_ON = frozenset((
    "convert_element_type", "psum", "psum_invariant", "all-reduce", "reduce-scatter", "convert",
    "copy", "copy-start", "copy-done",
))  # fmt: skip
# A scope of the user inside the name of a JAX transform.
_WRAPPED = re.compile(r"(?:transpose|jvp|vmap|linearize)\((.*)\)")


@dataclasses.dataclass(frozen=True)
class Argument:
    """The name and category that the caller gives to an entry parameter."""

    name: str = ""
    category: str = "argument"


@dataclasses.dataclass(frozen=True)
class BufferRow:
    """The report on one buffer.

    Attributes:
      name: the HLO instruction and the index of its output; for an argument, its path. The row
        `fragmentation` is the part of the temporary memory that no buffer uses at the peak. It is
        reserved from the first step to the last.
      bytes: size, with the padding of the layout.
      dtype, shape: as JAX prints them.
      operation: the JAX primitive, else the HLO operation.
      where: `file:line (function)` of the operation that made it; for an argument, of the
        operation that reads it first.
      scope: the user's named scopes and module paths, joined by `/`.
      category: what it is for; the top of this file lists the categories.
      why: the reason why `xform` saves this activation; empty for other buffers.
      born, dies: the first and the last step at which it is live, in program order.
      at_peak: whether it is counted and live at the peak. The bytes of these rows add up to the
        total.
      output: whether it holds an output at the end. Such an argument is donated.
      space: its memory space: 0 is main memory, 5 is host memory, others are on the chip.
      counted: whether it is in main memory and not a constant. The bytes of the counted rows that
        are live at a step add up to the live bytes of that step.
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

    @property
    def type(self) -> str:
        """Its type as JAX prints it, such as `f32[8,128]`; "" if it has none."""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]" if self.dtype else ""

    @property
    def maker(self) -> str:
        """The operation that made it; for an argument or for `fragmentation`, its name."""
        return self.name if self.operation in ("", "parameter") else self.operation

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain data, for JSON."""
        return {**dataclasses.asdict(self), "shape": list(self.shape)}


def buffer_rows(
    assignment: Assignment,
    arguments: Mapping[int, Argument] | Sequence[Argument] = (),
) -> list[BufferRow]:
    """Return a row for each buffer of a compiled program, largest first.

    Args:
      assignment: the memory of the program, from `xform.memory.buffers.read`.
      arguments: names and categories of the entry parameters, by parameter number. The entry
        parameters are the flat arguments without the unused ones, which `jax.jit` drops.

    Returns:
      The rows. Those that are `at_peak` add up to `assignment.total_bytes`.

    Cost: plain Python, about 20 microseconds for each instruction.
    """
    known = arguments if isinstance(arguments, Mapping) else dict(enumerate(arguments))
    return _BufferAttribution(assignment, known).rows()


def peak_rows(rows: Sequence[BufferRow]) -> list[BufferRow]:
    """Return the rows that are live at the step with the most bytes in these rows."""
    change: dict[int, int] = {}
    for row in rows:
        change[row.born] = change.get(row.born, 0) + row.bytes
        change[row.dies + 1] = change.get(row.dies + 1, 0) - row.bytes
    steps = sorted(change)
    sizes = list(accumulate(change[step] for step in steps))
    peak_step = steps[sizes.index(max(sizes))] if steps else 0
    return [row for row in rows if row.born <= peak_step <= row.dies]


def scope(op_name: str) -> str:
    """Return the user's scopes in an operation's name, without the ones that JAX and xform add.

    >>> from xform.memory.attribute import scope
    >>> scope("jit(f)/transpose(jvp(decoder))/while/body/closed_call/mlp/dot_general")
    'decoder/mlp'
    """
    pieces: list[str] = []
    for piece in _XFORM_SCOPE.sub("", op_name).split("/")[:-1]:
        while wrapper := _WRAPPED.fullmatch(piece):
            piece = wrapper[1]
        if not _STRUCTURE.fullmatch(piece):
            pieces.append(piece)
    # A function that is traced in its own scope has that scope twice in its name. Keep one.
    for n in range(len(pieces) // 2, 0, -1):
        i = 0
        while i + 2 * n <= len(pieces):
            if pieces[i : i + n] == pieces[i + n : i + 2 * n]:
                del pieces[i : i + n]
            else:
                i += 1
    return "/".join(pieces)


def saving_reason(op_name: str) -> str:
    """Return why the value of an operation is saved, from its name; "" if the name has no reason.

    >>> from xform.memory.attribute import saving_reason
    >>> saving_reason("jit(f)/xform(saved: on the cheapest cut)/mlp/dot_general")
    'on the cheapest cut'
    """
    return next((why for m in _XFORM_SCOPE.finditer(op_name) if (why := m["why"])), "")


def operation_name(instruction: Instruction) -> str:
    """Return the JAX primitive in the name of an instruction, else its HLO opcode."""
    last = instruction.op_name.rpartition("/")[2]
    if not instruction.op_name or _STRUCTURE.fullmatch(last) or _WRAPPED.fullmatch(last):
        return instruction.opcode.replace("-", "_")
    return last


class _BufferAttribution:
    """Makes the rows of a compiled program: its memory, and its data flow to attribute buffers."""

    def __init__(self, assignment: Assignment, arguments: Mapping[int, Argument]):
        self._assignment, self._module = assignment, assignment.module
        self._arguments = arguments
        self._flow = DataFlow(assignment.module)
        self._copies = ScaledCopies(assignment.module)
        self._passes = Passes(assignment.module)

    def rows(self) -> list[BufferRow]:
        """Return all rows, largest first."""
        rows = [self._row(chunk) for chunk in self._assignment.chunks]
        if gaps := self._assignment.fragmentation_bytes:
            last = len(self._assignment.live) - 1
            rows.append(BufferRow(FRAGMENTATION, gaps, "", (), "", "", "", "temporary", "", 0,
                                  last, True))  # fmt: skip
        return sorted(rows, key=lambda row: -row.bytes)

    def _row(self, chunk: MemoryChunk) -> BufferRow:
        """Return the row of a chunk of memory."""
        kind = chunk.allocation.kind
        buffer, maker = self._main_value(chunk)
        instruction = self._module.instructions[buffer.instruction]
        shape = instruction.shape.at(buffer.index)
        index = "".join(f"{{{k}}}" for k in buffer.index)
        name, where = instruction.name + index, self._flow.where(maker)
        if kind == "argument":
            number = (chunk.allocation.parameter or (0, ()))[0]
            argument = self._arguments.get(number, Argument())
            name = argument.name or instruction.op_name or instruction.name
            category = argument.category
            reader = min(self._readers(buffer), key=self._step, default=None)
            where = self._flow.where(reader) if reader else ""
            scopes, operation = "", "parameter"
        else:
            category = self._category(chunk, buffer, maker)
            scopes, operation = scope(maker.op_name), operation_name(maker)
        why = saving_reason(maker.op_name) if category == "activation" else ""
        counted = chunk.allocation.space == DEVICE and kind in COUNTED
        at_peak = counted and chunk.born <= self._assignment.peak_step <= chunk.dies
        return BufferRow(
            name,
            chunk.bytes,
            shape.dtype,
            shape.dims,
            operation,
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

    def _main_value(self, chunk: MemoryChunk) -> tuple[Buffer, Instruction]:
        """Return the buffer that describes a chunk best, and the operation that made its value.

        Several values may use one chunk in turn. Of these, the values that fill the chunk are
        preferred, then values that are more than the initial zeros of a loop, then values with a
        source line. Of the rest, the last one before the peak is chosen; for an output, the last
        one of the program. If a value is also a loop's state, the operation that writes it is
        chosen.
        """
        maker_of = {b.id: self._flow.origin(b.instruction, b.index) for b, _ in chunk.buffers}
        is_output = chunk.allocation.kind == "output"
        last_step = len(self._module.order) if is_output else self._assignment.peak_step

        def rank(entry: tuple[Buffer, int]) -> tuple[bool, bool, bool, bool, bool, int]:
            buffer, born = entry
            maker, own = maker_of[buffer.id], self._module.instructions[buffer.instruction]
            is_state = own.opcode in ("while", "parameter")
            has_line = is_output or bool(self._module.where(maker))
            fills_chunk = buffer.bytes == chunk.bytes
            return (
                fills_chunk,
                not self._flow.only_initializes(maker),
                has_line,
                born <= last_step,
                not is_state,
                born,
            )

        of_argument = [e for e in chunk.buffers if e[0].instruction in self._argument_ids]
        buffer = of_argument[0][0] if of_argument else max(chunk.buffers, key=rank)[0]
        return buffer, maker_of[buffer.id]

    def _category(self, chunk: MemoryChunk, buffer: Buffer, maker: Instruction) -> str:
        """Return the category of a chunk that is not an argument."""
        if chunk.allocation.kind == "constant":
            return "constant"
        reader_passes = [self._passes.of(reader) for reader in self._readers(buffer)]
        maker_pass = self._passes.of(maker)
        if self._is_gradient(buffer, maker):
            return "gradient"
        if chunk.allocation.kind == "output":
            return "gradient" if self._is_gradient_at_peak(chunk) else "output"
        if maker_pass == "recompute":
            return maker_pass
        own = self._module.instructions[buffer.instruction]
        is_saved = not maker_pass and any(reader_passes) and not self._passes.in_backward(own)
        return "activation" if is_saved else "temporary"

    def _is_gradient(self, buffer: Buffer, maker: Instruction) -> bool:
        """Return whether a value is a parameter's gradient: accumulating, complete or scaled."""
        value = buffer.instruction, buffer.index
        if self._is_derivative(value, maker):
            return True
        source = self._copies.source(*value)
        if source == value or any(self._passes.of(reader) for reader in self._readers(buffer)):
            return False
        return self._is_derivative(source, self._flow.origin(*source))

    def _is_derivative(self, value: ValueId, maker: Instruction) -> bool:
        """Return whether the backward pass computed a value as the gradient of a parameter."""
        is_of_parameter = self._float_sizes(*value) in self._parameter_sizes
        if self._passes.of(maker) != "backward" or not is_of_parameter:
            return False
        in_chunk = self._in_same_chunk.get(value, ())
        readers = [
            reader
            for reader in self._flow.readers([value])
            if self._passes.of(reader) and reader.id not in in_chunk
        ]
        return all(operation_name(r) in _PASSES_ON or r.opcode in _PASSES_ON for r in readers)

    @cached_property
    def _in_same_chunk(self) -> dict[ValueId, set[int]]:
        """For each value with memory, the ids of the instructions whose results share its chunk."""
        found: dict[ValueId, set[int]] = {}
        for chunk in self._assignment.chunks:
            ids = {b.instruction for b, _ in chunk.buffers}
            found.update(((b.instruction, b.index), ids) for b, _ in chunk.buffers)
        return found

    def _is_gradient_at_peak(self, chunk: MemoryChunk) -> bool:
        """Return whether an output's memory holds a gradient at the peak, as an update in place."""
        peak = self._assignment.peak_step
        at_peak = [b for b, born in chunk.buffers if born <= peak]
        return bool(at_peak) and self._is_gradient(
            at_peak[-1], self._flow.origin(at_peak[-1].instruction, at_peak[-1].index)
        )

    @cached_property
    def _parameter_ids(self) -> dict[int, int]:
        """The ids of the entry parameters, by parameter number."""
        entry = self._module.computations[self._module.entry]
        return {i.number: i.id for i in entry.instructions if i.opcode == "parameter"}

    @cached_property
    def _argument_ids(self) -> set[int]:
        """The ids of the entry parameters."""
        return {*self._parameter_ids.values()}

    @cached_property
    def _parameter_sizes(self) -> set[tuple[int, ...]]:
        """Sorted sizes of the axes of each floating-point parameter.

        If no argument is named a parameter, every floating-point argument counts as one.
        """
        ids = self._parameter_ids
        named = {n for n, a in self._arguments.items() if a.category == "parameter"}
        parameters = [a.parameter for a in self._assignment.allocations if a.parameter]
        sizes = (self._float_sizes(ids[n], i) for n, i in parameters if not named or n in named)
        return {axes for axes in sizes if axes is not None}

    def _float_sizes(self, instruction: int, index: Index) -> tuple[int, ...] | None:
        """Return the sorted sizes of a value's axes; None if it is not floating or complex.

        A loop over layers may need the axis of layers first, and the parameter may have it
        elsewhere. Its gradient then has the parameter's axes in another order.
        """
        shape = self._module.instructions[instruction].shape.at(index)
        is_float = shape.dtype.startswith(("f", "bf", "c"))
        return tuple(sorted(n for n in shape.dims if n != 1)) if is_float else None

    def _step(self, instruction: Instruction) -> int:
        """Return the step at which an instruction runs; after all steps if it has none."""
        return self._module.order.get(instruction.id, len(self._module.order))

    def _readers(self, buffer: Buffer) -> list[Instruction]:
        """Return the operations that read the value of a buffer, or a copy of it."""
        return self._flow.readers([(buffer.instruction, buffer.index)])


# Words in the path of an argument that tell its role.
_OPTIMIZER = {"opt", "optimizer", "optim", "opt_state", "mu", "nu", "momentum", "ema"}
_PARAMETER = {"param", "params", "parameter", "parameters", "weight", "weights", "kernel", "bias",
              "embedding", "model", "variables"}  # fmt: skip
# Optax's momentum has a field `trace`; an argument named `trace` may be anything.
_TRACE = re.compile(r"\.trace\b")


def role(name: str) -> str:
    """Return the role of an argument, from its path: `optimizer state`, `parameter` or `argument`.

    The words in the path decide. The words for optimizers are tested first, because an optimizer's
    state often contains the names of the parameters.

    >>> from xform.memory.attribute import role
    >>> role("state.opt_state[0].mu['dense']['kernel']"), role("params['w']"), role("tokens")
    ('optimizer state', 'parameter', 'argument')
    >>> role("params_0"), role("state[0].trace['w']"), role("trace")
    ('parameter', 'optimizer state', 'argument')
    """
    words = set(re.findall(r"[a-z]+(?:_[a-z]+)*", name.lower()))
    if words & _OPTIMIZER or _TRACE.search(name):
        return "optimizer state"
    return "parameter" if words & _PARAMETER else "argument"
