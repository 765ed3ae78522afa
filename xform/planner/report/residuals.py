"""The table of residuals: the values that the backward pass reads, and where they come from."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from xform.interpret.cost import aval_bytes
from xform.interpret.joint import Schedule
from xform.interpret.node import gather, user_equation
from xform.planner.costs.saved_values import SavedValue, saved_values
from xform.program.source import frame
from xform.terminal.text import columns, human_bytes, shorten_place


@dataclasses.dataclass(frozen=True)
class Residual:
    """One value that is held for the backward pass.

    Attributes:
      kind: "kept" (computed and saved), "carry" (a loop's state, saved at the start of each
        iteration), "shared" (saved by one branch of a cond, in memory that the row of another
        branch already counts), or "argument" (an input, which needs no new memory).
      type: shape and dtype in one iteration, as JAX writes them: `float32[4,8]`.
      shape: the shape in one iteration.
      dtype: the dtype.
      trip_bytes: bytes of one iteration, on each device.
      loops: trip counts of the loops that stack the value, outermost first; empty outside loops.
      operation: the primitive that computes the value; for an argument, its name.
      name: the name that `checkpoint_name` gave the value, or "".
      where: the user's line, `file:line (function)`, that computes the value, also inside loop
        bodies and calls.
      why: why the value is saved.
      memory: "device", or the memory that the value is offloaded to.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: str
    trip_bytes: int
    operation: str
    where: str
    why: str
    loops: tuple[int, ...] = ()
    name: str = ""
    memory: str = "device"

    @property
    def type(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def trips(self) -> int:
        """How many iterations store the value: the product of `loops`."""
        return math.prod(self.loops)

    @property
    def total_bytes(self) -> int:
        """Bytes of all iterations."""
        return self.trip_bytes * self.trips

    def to_dict(self) -> dict[str, Any]:
        """The fields and totals as plain data."""
        return {**dataclasses.asdict(self), "trips": self.trips, "total_bytes": self.total_bytes}


@dataclasses.dataclass(frozen=True)
class ResidualTable:
    """The values that are held for a backward pass. Prints as a table.

    Attributes:
      title: the function and its policy.
      rows: one for each value, by falling size, arguments last.
    """

    title: str
    rows: tuple[Residual, ...]

    def __iter__(self) -> Iterator[Residual]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def total_bytes(self) -> int:
        """Saved bytes on the device, without the arguments."""
        return sum(r.total_bytes for r in self._saved_rows if r.memory == "device")

    @property
    def offloaded_bytes(self) -> int:
        """Saved bytes in other memories. A CPU has one memory, so there they are in addition."""
        return sum(r.total_bytes for r in self._saved_rows if r.memory != "device")

    @property
    def _saved_rows(self) -> list[Residual]:
        return [r for r in self.rows if r.kind in ("kept", "carry")]

    @property
    def argument_bytes(self) -> int:
        """Bytes of the arguments that the backward pass reads."""
        return sum(r.total_bytes for r in self.rows if r.kind == "argument")

    def to_dict(self) -> dict[str, Any]:
        """The title, totals and rows as plain data."""
        return {
            "title": self.title,
            "total_bytes": self.total_bytes,
            "offloaded_bytes": self.offloaded_bytes,
            "argument_bytes": self.argument_bytes,
            "rows": [r.to_dict() for r in self.rows],
        }

    def __str__(self) -> str:
        header = [
            "bytes",
            "values",
            "trips",
            "per trip",
            "type",
            "kind",
            "operation",
            "where",
            "why",
        ]
        # Equal rows, such as those of the layers of an unrolled model, share one line.
        lines = [header, *(_line(r, n) for r, n in collections.Counter(self.rows).items())]
        total = f"{human_bytes(self.total_bytes)} kept"
        if self.offloaded_bytes:
            total += f", {human_bytes(self.offloaded_bytes)} offloaded"
        read = f"{human_bytes(self.argument_bytes)} of arguments read in place"
        return f"{self.title}\n{columns(lines, right=(0, 1, 2, 3))}\n{total}, {read}"


def _line(r: Residual, count: int) -> list[str]:
    return [
        human_bytes(r.total_bytes * count),
        str(count),
        " x ".join(map(str, r.loops)),
        human_bytes(r.trip_bytes) if r.loops else "",
        r.type,
        r.kind if r.memory == "device" else f"{r.kind} in {r.memory}",
        f"{r.operation} '{r.name}'" if r.name else r.operation,
        shorten_place(r.where),
        r.why,
    ]


def residuals_of(schedule: Schedule, inputs: Sequence[str], title: str) -> ResidualTable:
    """The Residuals of a whole function's Schedule; `inputs` are the names of its inputs."""
    argument_names = gather(list(zip(schedule.joint.inputs, inputs, strict=True)), schedule.reads)
    why = "the backward pass reads it"
    arguments = [
        _row(SavedValue("argument", v.aval, None, why), name) for v, name in argument_names
    ]
    size = lambda row: -row.total_bytes
    kept = [_row(value) for value in saved_values(schedule)]
    return ResidualTable(title, (*sorted(kept, key=size), *sorted(arguments, key=size)))


def _row(value: SavedValue, operation: str = "") -> Residual:
    eqn, name = value.origin or (None, "")
    if eqn is not None:
        equation = user_equation(eqn)
        operation = equation.primitive.name
        if operation == "jit":
            operation = f"jit({equation.params['name']})"
    return Residual(
        kind=value.kind,
        shape=tuple(value.aval.shape),
        dtype=str(value.aval.dtype),
        trip_bytes=aval_bytes(value.aval),
        operation=operation,
        where=frame(eqn) if eqn is not None else "",
        why=value.why,
        loops=value.loops,
        name=name,
        memory=value.memory,
    )
