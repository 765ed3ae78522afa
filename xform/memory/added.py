"""Find the bytes that a compiler adds to a program: copies, padding, scratch of kernels, others.

These bytes are in no plan: the compiler decides about them. They are read from the compiled
program, by these rules:

- *copies*: a copy of an array into another layout or buffer, on its own or as a whole fusion, that
  is no operation of the user (`jnp.copy`, `jax.device_put`);
- *host copies*: such a copy into the memory of the host;
- *asynchronous values*: results of operations that start before they are needed, such as a transfer
  between devices, until they end;
- *scratch*: work space of kernels: byte arrays that a custom call returns beside its results;
- *padding*: bytes of a buffer beyond those of its elements, for example on a TPU;
- *gaps*: memory that is reserved for temporary values and that none uses at the peak.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

from xform.memory.attribute import FRAGMENTATION, BufferRow, operation_name
from xform.memory.buffers import HOST
from xform.memory.hlo import Instruction, Module
from xform.memory.traffic import instruction_bytes, run_counts

# Instructions that move or rename values in a fusion that only copies.
_MOVES = ("copy", "bitcast", "transpose", "reshape", "parameter", "tuple", "get-tuple-element")
# Operations of the user that are copies.
_USERS_COPIES = ("copy", "copy_p", "device_put", "transpose", "reshape")


@dataclasses.dataclass(frozen=True)
class Added:
    """Bytes of one kind that the compiler added to a program.

    Attributes:
      kind: one of the kinds in the list of this file.
      peak_bytes: bytes at the peak, on each device; for host copies, all bytes on the host.
      moved_bytes: bytes that these operations read and write in one run, on each device.
      count: how often they run in one run.
      where: the user's line with the most bytes, `file:line (function)`; "" if it is unknown.
    """

    kind: str
    peak_bytes: int
    moved_bytes: int
    count: int
    where: str


def added(module: Module, buffers: Sequence[BufferRow]) -> tuple[Added, ...]:
    """Return what the compiler added, by falling bytes at the peak, without empty kinds.

    Args:
      module: the compiled program.
      buffers: its buffers, from `buffer_rows`.
    """
    peak = collections.Counter[str]()
    moved, count = collections.Counter[str](), collections.Counter[str]()
    lines = collections.defaultdict[str, collections.Counter[str]](collections.Counter)
    for i, times in run_counts(module):
        if kind := _kind(module, i):
            moved[kind] += (size := times * instruction_bytes(module, i))
            count[kind] += times
            lines[kind][_line(module, i)] += size
    by_name = {i.name: i for i in module.instructions.values()}
    for row in buffers:
        if not (row.at_peak or row.space == HOST):
            continue
        name, _, index = row.name.partition("{")
        made_by = by_name.get(name)
        kind, size = ("gaps", row.bytes) if row.name == FRAGMENTATION else ("", 0)
        if made_by is not None:
            element = [int(n) for n in index.rstrip("}").split(",") if n]
            kind, size = _part(module, row, made_by, element)
        if kind:
            peak[kind] += size
            lines[kind][_line(module, made_by) if made_by else row.where] += size
    rows = (
        Added(kind, peak[kind], moved[kind], count[kind], lines[kind].most_common(1)[0][0])
        for kind in lines
    )
    found = (row for row in rows if row.peak_bytes or row.moved_bytes)
    return tuple(sorted(found, key=lambda row: (-row.peak_bytes, -row.moved_bytes, row.kind)))


def _part(
    module: Module, row: BufferRow, made_by: Instruction, element: Sequence[int]
) -> tuple[str, int]:
    """Return the kind and the bytes of the part of a buffer that the compiler added.

    The buffer holds an element of the result of an instruction. The kind is "" if nothing is added.
    """
    shape = made_by.shape.at(element)
    is_bytes = shape.dtype in ("i8", "u8") and len(shape.dims) == 1
    if made_by.opcode == "custom-call" and element and is_bytes:
        return "scratch", row.bytes
    if kind := _kind(module, made_by):
        return kind, row.bytes
    padding = 0 if shape.elements or not shape.bytes else row.bytes - shape.bytes
    return ("padding", padding) if padding > 0 else ("", 0)


def _line(module: Module, i: Instruction) -> str:
    """Return the user's line of an instruction, else that of the value that it copies."""
    while not (where := module.where(i)) and i.operands:
        i = module.instructions[i.operands[0]]
    return where


def _kind(module: Module, i: Instruction) -> str:
    """Return the kind of what an instruction outside fusions adds; "" if it adds nothing."""
    if i.opcode.endswith("-start"):
        start = i.shape.elements[0] if i.shape.elements else i.shape
        return "host copies" if start.space == HOST else "asynchronous values"
    if operation_name(i) in _USERS_COPIES and i.op_name:
        return ""
    if i.opcode == "copy":
        return "host copies" if i.shape.space == HOST else "copies"
    if i.opcode == "fusion":
        inside = [j for c in i.called for j in module.computations[c].instructions]
        if {"copy", "transpose"} & {j.opcode for j in inside}:
            return "copies" if all(j.opcode in _MOVES for j in inside) else ""
    return ""
