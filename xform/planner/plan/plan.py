"""`Plan`: which values the backward pass of a function saves, recomputes and offloads.

A plan is plain data, made by `xform.plan`. It prints as a table, explains single values, and is
stored as JSON. Passed as a policy, it makes a derivative follow its decisions.

Words: a *policy* chooses a plan; a *Joint* is the forward and the backward pass of a function as
one program; a remat *region* is a part of a function that `jax.checkpoint` or `xform.remat` marks;
a saved value is *offloaded* if it waits in another memory, such as the host's, and is copied back
before the backward pass reads it.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import difflib
import os
from collections.abc import Iterator
from typing import Any

from xform._jax import Primitive
from xform.errors import WrongArgument
from xform.interpret.joint import Joint
from xform.planner.plan.decision import Decision
from xform.planner.plan.record import Record
from xform.planner.report.collectives import RepeatedCollective
from xform.planner.report.picture import draw_live_bytes
from xform.planner.report.rows import PlanRow
from xform.planner.shape import Shape
from xform.policies import min_cut
from xform.policies.budgets import Regions
from xform.policies.vocabulary import PREFIXES
from xform.program.dimensions import Sample, sample_text
from xform.slices.decision import SlicedValue, Slices
from xform.storage import results
from xform.terminal.notebook import Result
from xform.terminal.text import (
    columns,
    human_bytes,
    human_flops,
    planning_times,
    recomputed_flops,
    shorten_place,
)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Plan(Result):
    """Which values the backward pass of a function saves, recomputes and offloads.

    `xform.plan` makes plans. A plan prints as a table and iterates over the rows of the table.

    A plan is also a policy: `xform.grad(f, policy=plan)` follows its decisions and runs no solver.
    It is valid only for the function and for the shapes and dtypes that it was made for. For any
    other program it raises OtherProgram.

    Attributes:
      function: the name of the function that the plan is for.
      policy: the policy that chose the plan, as text, for example "min_cut".
      target: the backend that the plan is for, for example "cpu".
      rows: one row for each value that the backward pass reads and that is saved, offloaded or
        recomputed.
      saved_bytes: bytes of the values saved for the backward pass, on each device.
      forward_flops: FLOPs of the function itself, without its derivative.
      recompute_flops: FLOPs of the recomputed products, convolutions, loops and calls.
      predicted_bytes: simulated peak on each device: arguments, outputs and temporary memory.
      compiled_bytes: the compiler's peak of `derivative` on each device. None if the plan was not
        verified, or if the compiler refused the program without telling its size.
      compiles: how many programs were compiled to find the plan.
      live: temporary bytes at each step of the simulated program.
      saved: the bytes of saved values among `live`, at each step.
      record: the decisions as plain data, with the text of the program that they are for.
      refused: whether the compiler refused the program without telling its size.
      least_flops: a lower bound on the FLOPs that any plan within the budget recomputes, if it
        recomputes each step of a loop at most once. 0 if no bound is known; None if the policy is
        no budget.
      seconds: the time of planning, without compilations; 0 if the plan was read from a file.
      compile_seconds: the time of the compilations; 0 if the plan was read from a file.
      derivative: the function that is compiled, for example "grad by argument 0".
      sliced_regions: a text for each region that runs in slices: how many, of what, and where.
      symbolic: the size of each symbolic dimension at which bytes and FLOPs are counted, by name;
        empty if there is none. The decisions hold for all sizes, the bytes only for these.
      sharded: whether a mesh has `Auto` axes of several devices. Only the compiler knows how values
        are sharded over these. So all bytes but `compiled_bytes` are those of unsharded values.
      repeated_collectives: the collectives of the forward pass that the backward pass runs again.
        Only those that the program contains are known, such as `psum` in a `shard_map`. For sharded
        arrays the compiler inserts others, which `MemoryReport.collectives` counts.

    >>> loss = lambda w, x: jnp.sum(jnp.tanh(x @ w))
    >>> w, x = jnp.ones((64, 64)), jnp.ones((32, 64))
    >>> plan = xform.plan(loss, w, x, verify=False)
    >>> plan.saved_bytes, plan.recompute_flops
    (8192, 0)
    >>> gradient = xform.grad(loss, policy=plan)(w, x)
    """

    function: str
    policy: str
    target: str
    rows: tuple[PlanRow, ...]
    saved_bytes: int
    forward_flops: int
    recompute_flops: int
    predicted_bytes: int
    compiled_bytes: int | None
    compiles: int
    live: tuple[int, ...]
    saved: tuple[int, ...]
    record: Record
    refused: bool = False
    least_flops: int | None = None
    seconds: float = dataclasses.field(default=0.0, metadata=results.NOT_STORED)
    compile_seconds: float = dataclasses.field(default=0.0, metadata=results.NOT_STORED)
    derivative: str = ""
    sliced_regions: tuple[str, ...] = ()
    repeated_collectives: tuple[RepeatedCollective, ...] = ()
    sharded: bool = False
    symbolic: Sample = ()

    def __iter__(self) -> Iterator[PlanRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __call__(self, prim: Primitive, *avals: Any, **params: Any) -> Any:
        """Answer as `min_cut` does, for code that calls policies by JAX's protocol.

        JAX asks a policy about one primitive at a time, without the program. The decisions of a
        plan are about values of its program, so they do not apply there.
        """
        return min_cut(prim, *avals, **params)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of the values offloaded to the host's memory, for each device."""
        return sum(r.marginal_bytes for r in self.rows if r.decision == "OFFLOAD")

    @property
    def regions(self) -> Regions:
        """Whether the plan dissolves remat regions ("open") or keeps them ("marked")."""
        return self.record.regions

    @property
    def slices(self) -> Slices:
        """The regions of the program that run in slices."""
        slices: Any = self.record.slices
        return tuple(SlicedValue(*numbers) for numbers in slices)

    def decide(self, joint: Joint) -> Decision:
        """Return the decisions of the plan for the values of a Joint.

        Raises:
          OtherProgram: the plan was made for another program than that of the Joint.
        """
        return self.record.decision(joint, repr(self))

    def shapes(self) -> dict[int, Shape]:
        """Return how the plan splits or nests loops: new shapes, by the loop's index.

        The index is the position of the loop in the program. Unchanged loops are left out.
        """
        return {int(i): tuple(map(tuple, shape)) for i, shape in self.record.loops.items()}

    def explain(self, value: str) -> str:
        """Explain why a value is saved or not, and the bytes and FLOPs of the opposite decision.

        Args:
          value: a name from the first column of the table, such as "scan.0/cos.2"; a name given by
            `checkpoint_name`; or the name of a primitive, such as "cos".

        Returns:
          Three lines for each matching row: a primitive name or a `checkpoint_name` may match
          several.

        Raises:
          WrongArgument: no row matches. The message lists similar names.
        """
        name = str(value)
        rows = [r for r in self.rows if name in (r.value, r.operation, _user_name(r))]
        if not rows:
            names = [n for r in self.rows for n in (r.value, _user_name(r)) if n]
            similar = difflib.get_close_matches(name, names, 3, 0.3) or names[:3]
            raise WrongArgument(
                f"explain({value!r})",
                f"no value of {self!r} has this name",
                "",
                f"print the plan to see the names; similar names: {', '.join(similar) or 'none'}",
            )
        return "\n".join(map(_explain_row, rows))

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the live bytes over the steps of the program, with the saved values in colour.

        The suffix of `path` chooses the format: PNG, SVG or PDF.
        """
        draw_live_bytes(
            path,
            f"{self.function}, {self.policy}",
            self.live,
            self.saved,
            self.predicted_bytes - max(self.live, default=0),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data for JSON.

        The times of planning are left out, so equal plans have equal data.
        """
        return results.to_data(self)

    def __repr__(self) -> str:
        peak = f"{human_bytes(self.predicted_bytes)} predicted"
        if self.compiled_bytes is not None:
            peak = f"{human_bytes(self.compiled_bytes)} compiled"
        return f"<Plan of {self.function}, {self.policy}, peak {peak}>"

    def __str__(self) -> str:
        header = [
            "value",
            "decision",
            "bytes",
            "values",
            "trips",
            "type",
            "where",
            "FLOPs each",
            "why",
        ]
        # Rows that differ only in name and FLOPs share one line, such as equal values of the layers
        # of an unrolled model.
        groups: dict[Any, list[PlanRow]] = collections.defaultdict(list)
        for r in self.rows:
            groups[dataclasses.replace(r, value="", marginal_flops=0)].append(r)
        by_bytes = sorted(groups.values(), key=lambda rows: -sum(r.marginal_bytes for r in rows))
        table = columns([header, *map(_cells, by_bytes)], right=(2, 3, 4, 7))
        compiled = "refused by the compiler" if self.refused else "not compiled"
        if self.compiled_bytes is not None:
            error = self.predicted_bytes / max(self.compiled_bytes, 1) - 1
            compiled_as = f" as {self.derivative}" if self.derivative else ""
            beside = "on each device" if self.sharded else f"({error:+.1%})"
            compiled = f"{human_bytes(self.compiled_bytes)} compiled{compiled_as} {beside}"
        offloaded = f", {human_bytes(n)} offloaded" if (n := self.offloaded_bytes) else ""
        return "\n".join([
            f"plan of {self.function}, {self.policy}, on {self.target}",
            table,
            *self.sliced_regions,
            *map(str, self.repeated_collectives),
            *self._sample_text(),
            f"{human_bytes(self.saved_bytes)} saved{offloaded}, "
            f"peak {human_bytes(self.predicted_bytes)} predicted"
            f"{', both unsharded' * self.sharded}, {compiled}",
            self.summary,
        ])  # fmt: skip

    @property
    def summary(self) -> str:
        """One line: the recomputed FLOPs, their lower bound, the forward FLOPs and the times.

        The time of planning excludes the compilations, whose time is given separately. A plan that
        was read from a file has no times.
        """
        compiles = self.compiles if self.seconds else 0
        times = planning_times(self.seconds, compiles, self.compile_seconds)
        work = recomputed_flops(self.recompute_flops)
        work += bound_text(self.least_flops, self.recompute_flops)
        slices = "".join(f", {text.partition(' (')[0]}" for text in self.sliced_regions)
        return f"{work}, {human_flops(self.forward_flops)} in the forward pass{slices}{times}"

    def _sample_text(self) -> list[str]:
        """Return a line with the sizes of symbolic dimensions; no line without such dimensions."""
        sizes = sample_text(self.symbolic)
        return [f"bytes and FLOPs for {sizes}: other sizes take other bytes"] if sizes else []


def bound_text(least_flops: int | None, recompute_flops: int) -> str:
    """Return the lower bound on the recomputed FLOPs in brackets; "" if there is no budget."""
    if least_flops is None or not recompute_flops:
        return ""
    if not least_flops:
        return " (no useful lower bound)"
    if least_flops >= recompute_flops:
        return " (the minimum within this budget)"
    return f" (at least {human_flops(least_flops)} within this budget)"


def _read(path: str, request: str) -> Any:
    """Read the plan that the text `plan:FILE` names: of one derivative, or of a step."""
    try:
        with contextlib.suppress(WrongArgument):
            found = results.load_as(None, path)
            if callable(found):
                return found
        return Plan.load(path)  # raises the error
    except OSError as error:
        raise WrongArgument(
            request,
            f"the file {path!r} cannot be read: {error.strerror}",
            "",
            "name a file that the method save of a plan wrote",
        ) from None


PREFIXES["plan"] = _read


def _user_name(row: PlanRow) -> str:
    """Return the name that `checkpoint_name` gave to a value, or the name of its primitive."""
    return row.operation.removeprefix("name '").removesuffix("'")


def _cells(rows: list[PlanRow]) -> list[str]:
    """Return the cells of one line of the table, for rows that differ only in name and FLOPs."""
    row, n = rows[0], len(rows)
    return [
        row.value if n == 1 else f"{row.value} ...",
        row.decision,
        human_bytes(sum(r.marginal_bytes for r in rows)),
        str(n),
        " x ".join(map(str, row.loops)),
        row.type,
        shorten_place(row.where),
        human_flops(sum(r.marginal_flops for r in rows) // n),
        row.why,
    ]


def _explain_row(row: PlanRow) -> str:
    """Explain one value in three lines."""
    trips = f" x {' x '.join(map(str, row.loops))} trips" if row.loops else ""
    size = f"{row.type}{trips}, {human_bytes(row.marginal_bytes)}"
    flops = human_flops(row.marginal_flops)
    if row.decision == "RECOMPUTE":
        opposite = f"saving it would take {human_bytes(row.marginal_bytes)} and spare {flops}"
    elif row.decision == "OFFLOAD":
        size_on_device = human_bytes(row.marginal_bytes)
        opposite = f"saving it would take {size_on_device}, recomputing it {flops}"
    else:
        opposite = f"recomputing it would free {human_bytes(row.marginal_bytes)} and cost {flops}"
    place = shorten_place(row.where)
    return (
        f"{row.value}: {row.decision}\n  {size}, computed by {row.operation} at {place}\n"
        f"  {row.why}; {opposite}"
    )
