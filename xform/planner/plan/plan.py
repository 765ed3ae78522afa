"""`Plan`: what the backward pass of one function keeps, decided; prints, plots, saves itself."""

from __future__ import annotations

import collections
import dataclasses
import difflib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from xform._jax import Primitive
from xform.errors import WrongArgument
from xform.interpret.joint import Joint
from xform.planner.plan.decision import Decision
from xform.planner.plan.record import Record
from xform.planner.plan.stored import read
from xform.planner.report.picture import draw
from xform.planner.report.rows import Row
from xform.planner.shape import Shape
from xform.policies import min_cut
from xform.policies.budgets import Regions
from xform.storage.files import whole
from xform.terminal.text import columns, human_bytes, human_flops, human_seconds, near

_FORMAT = "xform plan 6"


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """What is kept for the backward pass of a function, and what is run again.

    A policy: `xform.grad(f, policy=plan)` does as the plan says, without a solver, for the function
    and the types that it was made for. Prints as a table, iterates over its rows.

    Attributes:
      function: what it was made for.
      policy: the policy that it was made by, as text.
      target: the backend.
      rows: one for each value that the backward pass reads and that is saved or run again.
      saved_bytes: bytes that wait for the backward pass, on each device.
      forward_flops: FLOPs of the function itself.
      recompute_flops: FLOPs of products, convolutions, loops and calls that are run again.
      predicted_bytes: arguments, outputs and the peak of temporary bytes by the simulation, on each
        device; what is sharded over `Auto` axes counts whole.
      compiled_bytes: the same by the compiler, of the `derivative`; None if the plan was not
        verified, or the compiler refused it without saying its size.
      compiles: how many programs were compiled to find it.
      live, saved: temporary bytes at each step of the program, and those of them that wait.
      record: the decisions, for this program.
      refused: the compiler refused it, and did not say its size.
      least_flops: what each plan within the budget runs again at least, if it runs no step of a
        loop twice again; 0 if nothing is known of it, None if there was no budget.
      seconds: how long planning took, without compilations; 0 if it was read from a file.
      compile_seconds: how long the compilations for it took.
      derivative: the function that is compiled, such as "grad by argument 0".

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
    rows: tuple[Row, ...]
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
    seconds: float = 0.0
    compile_seconds: float = 0.0
    derivative: str = ""

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __call__(self, prim: Primitive, *avals: Any, **params: Any) -> Any:
        """The answer of `min_cut`, in JAX's protocol, for whom a plan does not decide."""
        return min_cut(prim, *avals, **params)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that wait for the backward pass in the memory of the host, for each device."""
        return sum(r.marginal_bytes for r in self.rows if r.decision == "OFFLOAD")

    @property
    def regions(self) -> Regions:
        """Whether remat regions were "open" where it was made, or as they are "marked"."""
        return self.record.regions

    def decide(self, joint: Joint) -> Decision:
        """The decisions for a Joint; `OtherProgram` if it is not the one that was planned."""
        return self.record.decision(joint, repr(self))

    def shapes(self) -> dict[int, Shape]:
        """The shapes of the program's loops, by their place, where they are not as written."""
        return {int(i): tuple(map(tuple, shape)) for i, shape in self.record.loops.items()}

    def explain(self, value: str) -> str:
        """Why one value is saved or not, with what the other decision would cost.

        Args:
          value: a name from the table's first column, or the name that `checkpoint_name` gave.

        Raises:
          WrongArgument: the plan has no such value; similar names are shown.
        """
        name = str(value)
        rows = [r for r in self.rows if name in (r.value, r.operation, _given(r))]
        if not rows:
            names = [n for r in self.rows for n in (r.value, _given(r)) if n]
            like = difflib.get_close_matches(name, names, 3, 0.3) or names[:3]
            raise WrongArgument(
                f"explain({value!r})",
                f"no value of {self!r} has this name",
                "",
                f"print the plan for the names; similar ones are {', '.join(like) or 'none'}",
            )
        return "\n".join(map(_explained, rows))

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw live bytes over the program, with what is saved in colour; PNG, SVG or PDF."""
        draw(
            path,
            f"{self.function}, {self.policy}",
            self.live,
            self.saved,
            self.predicted_bytes - max(self.live, default=0),
        )

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data, without times: equal plans have equal files."""
        data = dataclasses.asdict(self)
        del data["seconds"], data["compile_seconds"]
        return {"format": _FORMAT, **data}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON. The file appears whole, or not at all."""
        with whole(path) as partial:
            partial.write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan that `save` wrote.

        Raises:
          WrongArgument: the file holds no plan, or one of a format that this version does not know.
          OSError: it cannot be read.
        """
        try:
            data: Any = json.loads(Path(path).read_text(encoding="utf-8"))
            known = data.pop("format", None) if isinstance(data, dict) else None
            if known != _FORMAT:
                raise ValueError(f"its format is {known!r}, not {_FORMAT!r}")
            return read(cls, data)
        except (ValueError, RecursionError) as error:
            raise WrongArgument(
                f"Plan.load({str(path)!r})",
                f"the file holds no plan: {error}",
                "",
                "pass a file that Plan.save wrote, with this version of xform",
            ) from error

    def __repr__(self) -> str:
        return f"<Plan of {self.function}, {self.policy}>"

    def __str__(self) -> str:
        head = [
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
        # Equal rows, as of the layers of an unrolled model, are one line.
        groups: dict[Any, list[Row]] = collections.defaultdict(list)
        for r in self.rows:
            groups[dataclasses.replace(r, value="", marginal_flops=0)].append(r)
        lines = sorted(groups.values(), key=lambda rows: -sum(r.marginal_bytes for r in rows))
        table = columns([head, *map(_line, lines)], right=(2, 3, 4, 7))
        compiled = "refused by the compiler" if self.refused else "not compiled"
        if self.compiled_bytes is not None:
            error = self.predicted_bytes / max(self.compiled_bytes, 1) - 1
            what = f" as {self.derivative}" if self.derivative else ""
            compiled = f"{human_bytes(self.compiled_bytes)} compiled{what} ({error:+.1%})"
        sent = f", {human_bytes(n)} offloaded" if (n := self.offloaded_bytes) else ""
        return "\n".join([
            f"plan of {self.function}, {self.policy}, on {self.target}",
            table,
            f"{human_bytes(self.saved_bytes)} saved{sent}, "
            f"peak {human_bytes(self.predicted_bytes)} predicted, {compiled}",
            self.summary,
        ])  # fmt: skip

    @property
    def summary(self) -> str:
        """A line: the work that is run again, the least that it could be, and the time it took.

        The times of planning and of the compilations for it stand apart.
        """
        took = f", planned in {human_seconds(self.seconds)}" if self.seconds else ""
        if self.seconds and self.compiles:
            programs = f"{self.compiles} program{'s' * (self.compiles > 1)}"
            took += f", {programs} compiled in {human_seconds(self.compile_seconds)}"
        again = f"{human_flops(self.recompute_flops)} run again{self._at_least()}"
        return f"{again} beside {human_flops(self.forward_flops)} forward{took}"

    def _at_least(self) -> str:
        if self.least_flops is None or not self.recompute_flops:
            return ""
        if not self.least_flops:
            return " (how little it could be is not known)"
        if self.least_flops >= self.recompute_flops:
            return " (the least within this budget)"
        return f" (at least {human_flops(self.least_flops)} within this budget)"


def _given(row: Row) -> str:
    return row.operation.removeprefix("name '").removesuffix("'")


def _line(rows: list[Row]) -> list[str]:
    row, n = rows[0], len(rows)
    return [
        row.value if n == 1 else f"{row.value} ...",
        row.decision,
        human_bytes(sum(r.marginal_bytes for r in rows)),
        str(n),
        " x ".join(map(str, row.loops)),
        row.type,
        near(row.where),
        human_flops(sum(r.marginal_flops for r in rows) // n),
        row.why,
    ]


def _explained(row: Row) -> str:
    trips = f" x {' x '.join(map(str, row.loops))} trips" if row.loops else ""
    size = f"{row.type}{trips}, {human_bytes(row.marginal_bytes)}"
    flops = human_flops(row.marginal_flops)
    if row.decision == "RECOMPUTE":
        other = f"saving it would take {human_bytes(row.marginal_bytes)} and spare {flops}"
    elif row.decision == "OFFLOAD":
        other = f"saving it would take {human_bytes(row.marginal_bytes)}, making it again {flops}"
    else:
        other = f"making it again would free {human_bytes(row.marginal_bytes)} and cost {flops}"
    return (
        f"{row.value}: {row.decision}\n  {size}, made by {row.operation} at {near(row.where)}\n"
        f"  {row.why}; {other}"
    )
