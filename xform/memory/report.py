"""`MemoryReport`: the memory of a compiled function, with the buffers at its peak by source line.

`report_text.py` prints a report, and `plot.py` and `page.py` draw it.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from xform.errors import WrongArgument
from xform.memory import advice, buffers
from xform.memory.added import Added, added
from xform.memory.attribute import Argument, BufferRow, buffer_rows, peak_rows, role
from xform.memory.batch_axes import BatchAxis, batch_axes
from xform.memory.buffers import ON_CHIP, Assignment
from xform.memory.cudnn import uncounted
from xform.memory.description import Description
from xform.memory.difference import KINDS, Difference
from xform.memory.phases import Phase, phases
from xform.memory.recomputed import Recomputed, recomputed, summary
from xform.memory.report_page import write
from xform.memory.report_plot import draw
from xform.memory.report_text import report_text
from xform.memory.targets import Target
from xform.memory.traffic import Collective, collectives, moved_bytes
from xform.planner.hardware import Hardware
from xform.policies.budgets import Budget
from xform.program.ir import Program
from xform.storage.results import NOT_STORED
from xform.terminal.notebook import Result
from xform.terminal.text import human_bytes

# Fields of a `Description` in the report's plain data.
_DESCRIPTION = ("compiled", "transform", "policy", "code", "given", "planned")
# A report lists added bytes that exceed this part of its total, or of the bytes moved.
_ADDED = 0.005
# Properties of buffers that a report can be grouped by.
_GROUPS = ("category", "where", "scope", "operation")
# The first letters of dtypes of at most 16 bits.
_HALF_PRECISION = ("bf16", "f16", "f8")


@dataclasses.dataclass(frozen=True)
class BufferGroup:
    """Buffers at the peak that have the same line, scope, category or operation.

    Attributes:
      name: the line, scope, category or operation; empty if it is unknown.
      bytes: the bytes of the buffers, on one device.
      count: the number of buffers.
    """

    name: str
    bytes: int
    count: int


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class MemoryReport(Result):
    """Memory of one compiled function on each device.

    It prints as tables, plots, and writes an HTML page. Iterating over it yields the buffers that
    are live at the peak, largest first. `compile_for` in `compilation.py` makes it.

    Attributes:
      function: name of the compiled function.
      compiled_for: the target that it was compiled for.
      devices: the number of devices that it runs on.
      bytes: bytes of each kind of memory on each device: the kinds in `worker.KINDS`, and
        `constant`. Empty if the compiler refused the program, or reports no bytes.
      flops: FLOPs of the whole program on all devices; each iteration of a loop counts.
      compile_seconds: wall time of the compiler; 0 if JAX had compiled the program before.
      module: a serialized HloProto: the compiled module and its buffer assignment; None if the
        compiler wrote none.
      arguments: a name for each parameter of the module; empty if the module itself has the names.
      refused: the compiler's error message, if the program is too large for the device.
      needed_bytes: the size of a refused program; None if the compiler does not report it.
      closed_bytes: bytes of the arrays that the function closes over.
      program: the traced program; None if the report was read from a file.
      known: whether the compiler's answer was known, so that nothing was compiled.
      shapes: dtype and shape of each argument, before it is sharded.
      description: the transform, policy and arguments that were compiled.
      saved_advice: the advice of a report that was read from a file. Some advice needs the traced
        program, which a file does not have.
    """

    function: str
    compiled_for: Target
    devices: int
    bytes: dict[str, int]
    flops: int
    compile_seconds: float
    module: bytes | None
    arguments: tuple[str, ...] = ()
    refused: str = ""
    needed_bytes: int | None = None
    closed_bytes: int = 0
    program: Program | None = dataclasses.field(default=None, metadata=NOT_STORED)
    known: bool = dataclasses.field(default=False, metadata=NOT_STORED)
    shapes: frozenset[tuple[str, tuple[int, ...]]] = frozenset()
    description: Description = dataclasses.field(default_factory=Description)
    saved_advice: tuple[str, ...] | None = None

    @property
    def target(self) -> str:
        """Name of the target that it was compiled for."""
        return self.compiled_for.name

    @property
    def device(self) -> Hardware:
        """The device that it was compiled for, with its capacity and speed."""
        return self.compiled_for.device

    @property
    def argument_bytes(self) -> int | None:
        """Bytes of the inputs."""
        return self._sum("argument")

    @property
    def output_bytes(self) -> int | None:
        """Bytes of the outputs."""
        return self._sum("output")

    @property
    def temp_bytes(self) -> int | None:
        """Bytes for temporary values, at their peak."""
        return self._sum("temp")

    @property
    def alias_bytes(self) -> int | None:
        """Bytes of outputs in the memory of donated inputs; inputs and outputs both count them."""
        return self._sum("alias")

    @property
    def constant_bytes(self) -> int | None:
        """Bytes of constants, such as arrays that the function closes over; not in the total."""
        return self._sum("constant")

    @property
    def host_bytes(self) -> int | None:
        """Bytes of offloaded values in host memory."""
        return self._sum("host_argument", "host_output", "host_temp", less="host_alias")

    @property
    def vmem_bytes(self) -> int | None:
        """The most bytes live at once in a TPU's fast memory (VMEM); not in the total.

        In a larger program, some of these buffers move to main memory, where they count as
        temporary. None if the compiler refused the program.
        """
        return None if self.refused else sum(row.bytes for row in self.on_chip)

    @property
    def code_bytes(self) -> int | None:
        """Bytes of the compiled code."""
        return self._sum("generated_code")

    @property
    def total_bytes(self) -> int | None:
        """Argument + output + temp - alias; for a refused program, the size in its error message.

        If the compiler refused the program, all other kinds of bytes are None. The total is None
        too if the compiler's error message has no size.
        """
        if self.refused:
            return self.needed_bytes
        return self._sum("argument", "output", "temp", less="alias")

    def _sum(self, *kinds: str, less: str = "") -> int | None:
        """Return the bytes of some kinds minus the bytes of the kind `less`; None if unknown."""
        if not self.bytes:
            return None
        return sum(self.bytes.get(k, 0) for k in kinds) - self.bytes.get(less, 0)

    @property
    def device_bytes(self) -> int | None:
        """Memory that the program needs on a device: the total plus constants."""
        total = self.total_bytes
        return None if total is None else total + (self.constant_bytes or 0)

    @property
    def capacity_bytes(self) -> int | None:
        """Bytes of memory of one device; None if unknown."""
        return self.device.capacity_bytes

    @property
    def limit_bytes(self) -> int | None:
        """The size that the program may have: the capacity, or less on a GPU.

        On a GPU, XLA recomputes operations by itself in a larger program. None if unknown.
        """
        io_bytes = self._sum("argument", "output", less="alias")
        return self.capacity_bytes if io_bytes is None else self.device.limit_bytes(io_bytes)

    @property
    def head_room_bytes(self) -> int | None:
        """`limit_bytes` minus the total and the constants; negative if the program does not fit.

        None if the limit or the size of the program is unknown.
        """
        limit, size = self.limit_bytes, self.device_bytes
        return None if limit is None or size is None else limit - size

    @property
    def over_bytes(self) -> int | None:
        """By how many bytes the program exceeds `limit_bytes`; 0 if it does not.

        None if the size of the program is unknown.
        """
        if self.device_bytes is None:
            return None
        return max(0, -(self.head_room_bytes or 0))

    @property
    def counted_bytes(self) -> float:
        """The bytes that a budget counts: the total, and all results that XLA recomputes by itself.

        So it is about the size that the program would have if XLA recomputed nothing. Infinite if
        the compiler refused the program without a size.
        """
        if self.total_bytes is None:
            return math.inf
        return float(self.total_bytes + sum(row.bytes for row in self.recomputed))

    def limit(self, budget: Budget) -> Budget:
        """Return the budget; if it is a device's memory, at most `limit_bytes`."""
        most = self.limit_bytes
        if not budget.device or most is None or most >= budget.bytes:
            return budget
        return dataclasses.replace(budget, bytes=most)

    @property
    def fits(self) -> bool:
        """Whether the program fits a device, and XLA recomputes nothing to make it fit.

        True if the capacity is unknown.
        """
        return not (self.refused or self.over_bytes or self.recomputed)

    def verdict(self) -> str:
        """Return whether the program fits and by how much, as one line of text."""
        capacity, size, name = self.capacity_bytes, self.device_bytes, self.device.name
        if size is None:
            has = "" if capacity is None else f", which has {human_bytes(capacity)}"
            return (f"the compiler refused {self.function} for {name}{has}: the bytes that it "
                    "needs are not known")  # fmt: skip
        needs = f"{self.function} needs {human_bytes(size)} of each {name}"
        if capacity is None:
            return needs
        has = f"which has {human_bytes(capacity)}"
        if self.refused and not self.over_bytes:
            return f"{needs}, {has}: the compiler refused it"
        limit = self.limit_bytes or capacity
        if limit < capacity:
            has += f"; XLA recomputes operations in a program above {human_bytes(limit)}"
        if self.over_bytes:
            return f"{needs}, {has}: it is over by {human_bytes(self.over_bytes)}"
        if self.recomputed:
            return (
                f"{needs}, {has}: it is so small because XLA recomputes {summary(self.recomputed)}"
            )
        return f"{needs}, {has}: it fits, {human_bytes(limit - size)} are left"

    def __bool__(self) -> bool:
        """Raise WrongArgument: `if xform.fits(...)` would be true for any report."""
        raise WrongArgument(
            f"the truth value of the memory report of {self.function}",
            "a report is neither true nor false", "",
            "ask whether it fits with `.fits`, or whether there is one with `is not None`",
        )  # fmt: skip

    @cached_property
    def assignment(self) -> Assignment | None:
        """The compiler's buffer assignment; None if the compiler wrote none."""
        module = self.module
        return None if module is None else buffers.read(module)

    @cached_property
    def buffers(self) -> tuple[BufferRow, ...]:
        """All buffers, largest first; empty without a buffer assignment."""
        if self.assignment is None:
            return ()
        module = self.assignment.module
        names = self.arguments
        labels = {
            i.number: names[i.number] if i.number < len(names) else i.op_name
            for i in module.computations[module.entry].instructions
            if i.opcode == "parameter"
        }
        return tuple(
            buffer_rows(self.assignment, {n: Argument(x, role(x)) for n, x in labels.items()})
        )

    @property
    def peak(self) -> tuple[BufferRow, ...]:
        """The buffers that are live at the peak; they add up to `total_bytes`."""
        return tuple(row for row in self.buffers if row.at_peak)

    @cached_property
    def on_chip(self) -> tuple[BufferRow, ...]:
        """The buffers in the chip's fast memory (VMEM), at the step with the most bytes there."""
        return tuple(peak_rows([row for row in self.buffers if row.space in ON_CHIP]))

    def __iter__(self) -> Iterator[BufferRow]:
        return iter(self.peak)

    @cached_property
    def live(self) -> Sequence[int]:
        """Live bytes at each step of the program, including arguments and outputs.

        They include the gaps in the blocks for temporary values, which are reserved at every step.
        So the maximum is `total_bytes`.
        """
        if self.assignment is None:
            return ()
        gaps = self.assignment.fragmentation_bytes
        return [size + gaps for size in self.assignment.live]

    @property
    def peak_step(self) -> int:
        """The step with the most live bytes."""
        return self.assignment.peak_step if self.assignment else 0

    @cached_property
    def phases(self) -> Sequence[Phase]:
        """The forward pass, backward pass and update as ranges of steps.

        Empty if the program has no backward pass, or the compiler wrote no buffer assignment.
        """
        return phases(self.assignment.module) if self.assignment else ()

    @cached_property
    def moved_bytes(self) -> int:
        """Bytes that each device reads and writes in one run, without caches."""
        return moved_bytes(self.assignment.module) if self.assignment else 0

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """The communication between devices."""
        return collectives(self.assignment.module) if self.assignment else ()

    @cached_property
    def recomputed(self) -> tuple[Recomputed, ...]:
        """The operations that the compiler recomputes by itself, because memory is short."""
        # Reading the module takes time, and a budget counts this for each candidate it compiles.
        if b".remat" not in (self.module or b"") or self.assignment is None:
            return ()
        return recomputed(self.assignment.module)

    @cached_property
    def added(self) -> tuple[Added, ...]:
        """The bytes that the compiler added to the program, such as copies and padding.

        Kinds that are small beside the program are left out.
        """
        if self.assignment is None:
            return ()
        least_peak, least_moved = _ADDED * (self.total_bytes or 0), _ADDED * self.moved_bytes
        rows = added(self.assignment.module, self.buffers)
        is_large = lambda row: row.peak_bytes > least_peak or row.moved_bytes > least_moved
        return tuple(filter(is_large, rows))

    @property
    def intensity(self) -> float | None:
        """FLOPs of a device for each byte that it reads or writes; None if it moves no bytes."""
        flops_per_device = self.flops / self.devices
        return flops_per_device / self.moved_bytes if self.moved_bytes else None

    @property
    def seconds(self) -> float | None:
        """Roofline estimate of the time of a run: the longer of computation and memory traffic.

        It ignores communication and everything that keeps a device below its peak speed. So it is a
        lower bound, as far as `moved_bytes` is right. None if the device's speed is unknown.
        """
        device = self.device
        half_bytes = sum(r.bytes for r in self.peak if r.dtype.startswith(_HALF_PRECISION))
        f32_bytes = sum(r.bytes for r in self.peak if r.dtype.startswith("f32"))
        is_half = half_bytes >= f32_bytes
        speed = device.flops_per_second if is_half else device.f32_flops_per_second
        if not speed or not device.bytes_per_second or self.assignment is None:
            return None
        flops_per_device = self.flops / self.devices
        return max(flops_per_device / speed, self.moved_bytes / device.bytes_per_second)

    @cached_property
    def uncounted(self) -> str:
        """The memory that the compiler does not know and the total does not count; "" if none."""
        return uncounted(self.assignment.module) if self.assignment else ""

    @cached_property
    def batches(self) -> list[BatchAxis]:
        """The axes of the inputs that are proven to be batches."""
        prog = self.program
        return [] if prog is None else batch_axes(prog)

    @cached_property
    def advice(self) -> list[str]:
        """How to reduce the memory, as sentences with numbers, most promising first."""
        return advice.advice(self) if self.saved_advice is None else list(self.saved_advice)

    def for_file(self) -> MemoryReport:
        """Return the report to write to a file: with its advice."""
        return dataclasses.replace(self, saved_advice=tuple(self.advice))

    def group_by(self, key: str) -> list[BufferGroup]:
        """Return the buffers at the peak in groups, largest group first.

        Args:
          key: `"category"`, `"where"` (source line), `"scope"` (named scope, module path) or
            `"operation"`.

        Raises:
          WrongArgument: `key` is another text.
        """
        if key not in _GROUPS:
            raise WrongArgument(f"group_by({key!r})", "buffers have no such property", "",
                                f"give one of {', '.join(_GROUPS)}")  # fmt: skip
        sizes_of: dict[str, list[int]] = {}
        for row in self.peak:
            sizes_of.setdefault(getattr(row, key), []).append(row.bytes)
        groups = [BufferGroup(name, sum(sizes), len(sizes)) for name, sizes in sizes_of.items()]
        return sorted(groups, key=lambda g: (-g.bytes, g.name))

    def to_dict(self) -> dict[str, Any]:
        """Return the whole report as plain data."""
        device = self.device
        return {
            "function": self.function,
            "target": self.target,
            **{k: getattr(self.description, k) for k in _DESCRIPTION},
            "note": "; ".join(filter(None, (self.description.note, self.uncounted))),
            "device": {
                "name": device.name,
                "capacity_bytes": device.capacity_bytes,
                "limit_bytes": self.limit_bytes,
                "flops_per_second": device.flops_per_second,
                "bytes_per_second": device.bytes_per_second,
                "count": self.devices,
            },
            **{f"{k}_bytes": getattr(self, f"{k}_bytes") for k in KINDS},
            "fits": self.fits,
            "refused": self.refused,
            "flops": self.flops,
            "moved_bytes": self.moved_bytes,
            "seconds_estimate": self.seconds,
            "compile_seconds": self.compile_seconds,
            "collectives": [dataclasses.asdict(c) for c in self.collectives],
            "recomputed": [dataclasses.asdict(row) for row in self.recomputed],
            "added": [dataclasses.asdict(row) for row in self.added],
            "advice": self.advice,
            "live": list(self.live),
            "peak_step": self.peak_step,
            "phases": [phase._asdict() for phase in self.phases],
            "buffers": [row.to_dict() for row in self.buffers],
        }

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Plot the live bytes over the program and the buffers at the peak, as PNG, SVG or PDF.

        The suffix of `path` selects the format.

        Raises:
          MissingExtra: matplotlib is not installed.
          WrongArgument: the suffix is not a known format.
        """
        draw(self.to_dict(), path)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write an interactive HTML page of the report, which needs no network.

        The file is written completely or not at all.
        """
        write([self.to_dict()], path)

    def diff(self, other: MemoryReport) -> Difference:
        """Return the difference to another report, such as for another policy or target.

        Raises:
          WrongArgument: `other` is not a `MemoryReport`.
        """
        if not isinstance(other, MemoryReport):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise WrongArgument(f"diff({other!r})", "it is not a MemoryReport", "",
                                "give the result of xform.memory_analysis")  # fmt: skip
        return Difference(self, other)

    def heading(self) -> str:
        """Return the function, the target and the total bytes."""
        return f"{self.function} on {self.target}, {human_bytes(self.total_bytes)}"

    def __str__(self) -> str:
        return report_text(self)
