"""`xform.memory.compare_with_device`: what a memory report promises beside what a device does."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from xform.errors import WrongArgument
from xform.introspection.callables import check_callable, function_name
from xform.memory.analysis import check_names, memory_analysis
from xform.memory.held_arrays import HeldArrays, held_arrays
from xform.memory.lowering import jitted_with_arguments
from xform.memory.meters import AllocatorMeter, Meter, meter_of
from xform.memory.phases import Passes
from xform.memory.report import MemoryReport
from xform.memory.traced_time import trace_instructions
from xform.terminal.notebook import Result
from xform.terminal.text import columns, human_bytes, human_seconds, shorten_place

_MAX_LINES = 12
# Instructions whose time is that of the instructions that they run.
_CONTAINERS = frozenset(("while", "conditional", "call"))
_CPU_NOTE = (
    "a CPU has no counter of its own: resident memory also has what the allocator and the "
    "compiler's threads hold"
)


@dataclasses.dataclass(frozen=True)
class LineUse:
    """One source line: its bytes at the promised peak, and its measured time in a run.

    Attributes:
      where: `file:line (function)`; empty if unknown.
      peak_bytes: promised bytes at the peak that it made, or of arguments that it reads first.
      forward_seconds: its time in the forward pass, and outside of derivatives.
      backward_seconds: its time in the backward pass, without recomputed operations.
      recompute_seconds: its time in recomputed operations.
    """

    where: str
    peak_bytes: int = 0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    recompute_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Its time in a run, added up over threads or streams."""
        return self.forward_seconds + self.backward_seconds + self.recompute_seconds


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class DeviceComparison(Result):
    """The memory report of a function, beside measurements of its runs. It prints as tables.

    Attributes:
      report: the promise.
      device: the device that ran it.
      source: what measured the memory.
      measured_bytes: total at the peak, in the sense of `report.total_bytes`; None if unknown.
      seconds: wall time of a run, the median.
      lines: promised bytes and measured time by line, largest share first.
      held: the arrays of the process before the runs, by the line that made them.
      notes: what could not be measured, and what else the numbers contain.
    """

    report: MemoryReport
    device: str
    source: str
    measured_bytes: int | None
    seconds: float
    lines: tuple[LineUse, ...]
    held: tuple[HeldArrays, ...]
    notes: tuple[str, ...] = ()

    @property
    def excess_bytes(self) -> int | None:
        """Measured minus promised bytes; None if one of them is unknown."""
        promised = self.report.total_bytes
        if promised is None or self.measured_bytes is None:
            return None
        return self.measured_bytes - promised

    @property
    def traced_seconds(self) -> float:
        """Time of all instructions in a run, added up over threads or streams; 0 if not traced."""
        return sum(line.seconds for line in self.lines)

    def heading(self) -> str:
        """Return one line: the promised and the measured bytes."""
        promised = self.report.total_bytes
        change = ""
        if (excess := self.excess_bytes) is not None and promised:
            sign = "-" if excess < 0 else "+"
            change = f" ({sign}{human_bytes(abs(excess))}, {sign}{abs(excess) / promised:.0%})"
        return (
            f"{self.report.function} on {self.device}: promised {human_bytes(promised)}, "
            f"measured {human_bytes(self.measured_bytes)}{change}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers as plain data."""
        parts = {n: [dataclasses.asdict(x) for x in getattr(self, n)] for n in ("lines", "held")}
        names = "device", "source", "measured_bytes", "excess_bytes", "seconds", "traced_seconds"
        return {"report": self.report.to_dict(), **{n: getattr(self, n) for n in names}, **parts,
                "notes": list(self.notes)}  # fmt: skip

    def __str__(self) -> str:
        parts = [self.heading(), f"measured: {self.source}", *self.notes,
                 f"a run takes {human_seconds(self.seconds)}"]  # fmt: skip
        if total := self.traced_seconds:
            parts[-1] += f"; the operations with a line below add up to {human_seconds(total)}"
        return "\n".join([*parts, "", self._table(), "", self._held_table()])

    def _table(self) -> str:
        time_or_not = lambda s: human_seconds(s) if s else ""
        head = ["line", "at the peak", "forward", "backward", "recompute"]
        rows = [
            [shorten_place(x.where) or "(no line)", human_bytes(x.peak_bytes),
             *map(time_or_not, (x.forward_seconds, x.backward_seconds, x.recompute_seconds))]
            for x in self.lines[:_MAX_LINES]
        ]  # fmt: skip
        if more := len(self.lines) - len(rows):
            rows.append([f"and {more} more lines", *[""] * 4])
        return columns([head, *rows], right=(1, 2, 3, 4))

    def _held_table(self) -> str:
        head = ["arrays before the run, made by", "bytes", "buffers"]
        rows = [[shorten_place(x.where) or "(no line)", human_bytes(x.bytes), f"{x.count}"]
                for x in self.held[:_MAX_LINES]]  # fmt: skip
        if more := len(self.held) - len(rows):
            rows.append([f"and {more} more lines", "", ""])
        return columns([head, *rows], right=(1, 2))


def _check_arguments(
    f: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], runs: int
) -> None:
    """Raise WrongArgument for arguments that `compare_with_device` cannot run."""
    request = f"compare_with_device of {function_name(f)}"
    check_names(f, kwargs, compare_with_device)
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves((args, kwargs))):
        raise WrongArgument(
            request, "an argument is a ShapeDtypeStruct, but the function is run", "",
            "pass arrays on the device to measure; memory_analysis takes types",
        )  # fmt: skip
    if runs < 1:
        raise WrongArgument(f"{request} with runs={runs}", "no run would be measured", "",
                            "give at least 1")  # fmt: skip


def compare_with_device(
    f: Callable[..., Any],
    *args: Any,
    runs: int = 3,
    trace: bool = True,
    donate_argnums: int | Sequence[int] = (),
    **kwargs: Any,
) -> DeviceComparison:
    """Run `f`, and compare its memory report with what the device did.

    The promise is `xform.memory_analysis` of `f` on the device that holds the arguments. Measured
    are the bytes of a run at their peak, the time of each source line in each pass, and the arrays
    that the process holds besides. On a GPU or TPU the device's allocator counts the bytes
    (`Device.memory_stats`). On a CPU the resident memory of the process is measured, on Linux.

    Args:
      f: a function of pytrees of arrays, or a function made by `jax.jit` or `xform.jit`.
      *args: its arguments, arrays in pytrees.
      runs: number of runs whose time is measured, after a first one for the memory.
      trace: whether to trace one more run with JAX's profiler, for the time by line.
      donate_argnums: positions of the arguments whose memory may be reused, as for `jax.jit`.
        Donated arguments are copied before each run, so `args` stay valid.
      **kwargs: keyword arguments of `f`.

    Returns:
      A `DeviceComparison`. It prints as tables.

    Raises:
      WrongArgument: `f` is not callable, an argument is a type instead of an array, `runs` is less
        than 1, a keyword argument is unknown, or a trace of the profiler is running already.

    Cost: a compilation for the report, one for the runs, and `runs` + 3 runs.

    >>> ws, x = jnp.ones((4, 64, 64)) / 64, jnp.ones((32, 64))
    >>> def loss(ws, x):
    ...     return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0].sum()
    >>> found = xform.memory.compare_with_device(xform.grad(loss), ws, x)
    >>> found.report.total_bytes == xform.memory_analysis(xform.grad(loss), ws, x).total_bytes
    True
    >>> found.seconds > 0 and found.traced_seconds > 0
    True
    """
    check_callable(f, "compare_with_device")
    _check_arguments(f, args, kwargs, runs)
    held = held_arrays()
    report = memory_analysis(f, *args, donate_argnums=donate_argnums, **kwargs)
    jitted, given, named = jitted_with_arguments(f, args, kwargs, donate_argnums)
    args, kwargs = tuple(given), dict(named)
    copies = bool(report.alias_bytes)
    device = _device_of((args, kwargs))

    def run() -> float:
        given, named = jax.tree.map(jnp.copy, (args, kwargs)) if copies else (args, kwargs)
        jax.block_until_ready((given, named))
        start = time.perf_counter()
        jax.block_until_ready(jitted(*given, **named))
        return time.perf_counter() - start

    meter = meter_of(device)
    growth = _measure(meter, lambda: jitted.lower(*args, **kwargs).compile(), run)
    seconds = statistics.median(run() for _ in range(runs))
    times = _time_by_line(report, run) if trace else {}
    devices = report.devices if not isinstance(meter, AllocatorMeter) else 1
    beside = 0 if copies else report.argument_bytes or 0
    measured = None if growth is None else growth // devices + beside
    return DeviceComparison(
        report, str(device), meter.source, measured, seconds, _lines(report, times), tuple(held),
        tuple(_notes(meter, growth, copies, devices)),
    )  # fmt: skip


def _device_of(tree: Any) -> Any:
    """Return the first device of the arguments, or of this process."""
    arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    devices = [d for x in arrays for d in x.sharding.addressable_devices]
    return min(devices, key=lambda d: d.id) if devices else jax.local_devices()[0]


def _measure(meter: Meter, compile: Callable[[], object], run: Callable[[], object]) -> int | None:
    """Return the growth of memory in a run.

    The compiler's own memory does not count. An allocator's peak never falls, so the first run is
    measured. Resident memory also grows with the first run's code, so the second one is measured.
    """
    compile()
    if not isinstance(meter, AllocatorMeter):
        run()
    meter.start()
    run()
    return meter.growth()


def _time_by_line(report: MemoryReport, run: Callable[[], object]) -> dict[str, LineUse]:
    """Trace a run, and return the times of each line."""
    module = report.module
    assignment = report.assignment
    if module is None or assignment is None:
        return {}
    hlo, passes = assignment.module, Passes(assignment.module)
    instructions = {i.name: i for i in hlo.instructions.values() if i.opcode not in _CONTAINERS}
    times: dict[str, dict[str, float]] = {}
    for name, seconds in trace_instructions(run, instructions.keys()).items():
        instruction = instructions[name]
        of_line = times.setdefault(hlo.where(instruction), {})
        field = f"{passes.of(instruction) or 'forward'}_seconds"
        of_line[field] = of_line.get(field, 0.0) + seconds
    return {where: LineUse(where, **of_line) for where, of_line in times.items()}  # pyright: ignore


def _lines(report: MemoryReport, times: dict[str, LineUse]) -> tuple[LineUse, ...]:
    """Return promised bytes and measured times by line, the line with the largest share first."""
    at_peak = {group.name: group.bytes for group in report.group_by("where")}
    by_line = {shorten_place(where): use for where, use in times.items()}
    lines = [
        dataclasses.replace(by_line.get(where, LineUse(where)), where=where, peak_bytes=n)
        for where, n in {**dict.fromkeys(by_line, 0), **at_peak}.items()
    ]
    total = sum(at_peak.values()) or 1
    all_seconds = sum(line.seconds for line in lines) or 1.0
    share = lambda line: max(line.peak_bytes / total, line.seconds / all_seconds)
    return tuple(sorted(lines, key=lambda line: (-share(line), line.where)))


def _notes(meter: Meter, growth: int | None, copies: bool, devices: int) -> list[str]:
    notes: list[str] = []
    if isinstance(meter, AllocatorMeter):
        if growth is None:
            notes.append("the process held more before, so its peak says nothing about this run: "
                         "measure it first in a new process")  # fmt: skip
    elif growth is None:
        notes.append("this system does not report resident memory: only Linux does")
    else:
        notes.append(_CPU_NOTE)
    if devices > 1 and growth is not None:
        notes.append(f"measured for {devices} devices of this process, divided by {devices}")
    if copies:
        notes.append("donated arguments were copied before each run")
    return notes
