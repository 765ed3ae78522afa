"""`Explanation`: the chain of a Jacobian, and the cost of each way to evaluate it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from xform._jax import itemsize
from xform.interpret.cost import aval_bytes
from xform.jacobians.chain import ChainLink, Order, Product, Sweep, forward, reverse
from xform.jacobians.choice import Choice
from xform.jacobians.segments import Segment
from xform.program.source import frame
from xform.terminal.text import columns, human_bytes, human_flops, shorten_place


@dataclasses.dataclass(frozen=True)
class ChainValue:
    """The inputs, the outputs, or a cut: a value that every path between them goes through.

    Attributes:
      name: "inputs", "outputs", or the operation that computes the value.
      shapes: dtypes and shapes of the arrays.
      elements: number of elements of all arrays.
      bytes: bytes of all arrays.
      where: the line of the user's code that computes the value; empty for inputs and outputs.
    """

    name: str
    shapes: tuple[str, ...]
    elements: int
    bytes: int
    where: str = ""


@dataclasses.dataclass(frozen=True)
class EvaluationStep:
    """One step of the evaluation.

    Attributes:
      what: a "forward" or "reverse" sweep, or a "product" of two accumulated parts.
      text: the vectors and the links of the step.
      flops: FLOPs of this step alone.
      bytes: bytes of the matrix that it computes.
    """

    what: str
    text: str
    flops: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Explanation:
    """How `xform.jacobian` evaluates a Jacobian, and why: print it.

    Attributes:
      function: name of the function.
      values: the inputs, each value that cuts the program in two, and the outputs.
      links: the cost of the Jacobian between two successive values.
      order: the chosen order as text: `<` pushes columns, `>` pulls rows, `x` multiplies matrices.
      steps: the steps of that order.
      flops: FLOPs of each choice, by name: "forward", "reverse", "mixed" (the cheapest order).
        Infinite if the function does not have the mode.
      chosen: name of the choice that is used.
      chunk: how many vectors a sweep computes at once; None: all of them.
    """

    function: str
    values: tuple[ChainValue, ...]
    links: tuple[ChainLink, ...]
    order: str
    steps: tuple[EvaluationStep, ...]
    flops: dict[str, float]
    chosen: str
    chunk: int | None

    def __str__(self) -> str:
        ends = self.values[0], self.values[-1]
        shapes = " -> ".join(", ".join(v.shapes) for v in ends)
        rows = [["", "value", "type", "elements", "push", "pull", "line"]]
        for i, v in enumerate(self.values):
            link = [_flops(x) for x in (self.links[i - 1].push, self.links[i - 1].pull)]
            rows.append([f"J{i}" if i else "", v.name, ", ".join(v.shapes), f"{v.elements:,}",
                         *(link if i else ["", ""]), shorten_place(v.where)])  # fmt: skip
        choices = [["choice", "FLOPs", ""]]
        for name, flops in self.flops.items():
            choices.append([name, _flops(flops), "chosen" if name == self.chosen else ""])
        steps = [["step", "", "FLOPs", "makes"]]
        for s in self.steps:
            steps.append([s.what, s.text, human_flops(s.flops), human_bytes(s.bytes)])
        at_once = "all at once" if self.chunk is None else f"{self.chunk} at a time"
        return "\n".join([
            f"jacobian of {self.function}: {shapes}",
            "",
            columns(rows, right=[3, 4, 5]),
            "",
            columns(choices, right=[1]),
            "",
            f"order {self.order}, vectors {at_once}",
            columns(steps, right=[2, 3]),
        ])  # fmt: skip


def explain_choice(function: str, choice: Choice) -> Explanation:
    """The explanation of a choice. Its links must have been counted."""
    cut_program, links = choice.cut_program, choice.links
    full = cut_program.segment(0, len(cut_program) - 1)
    inner = [_cut(cut_program.program.equations[at - 1], v) for at, v in cut_program.cuts]
    values = (_end("inputs", full.active), *inner, _end("outputs", full.wanted))
    pure = {"forward": forward(links).flops, "reverse": reverse(links).flops}
    mode = choice.order.mode if isinstance(choice.order, Sweep) and choice.order.of is None else ""
    flops = pure if mode else {**pure, "mixed": choice.order.flops}
    steps = tuple(_steps(choice.order, links, _element_bytes(full)))
    return Explanation(function, values, links, str(choice.order), steps, flops, mode or "mixed",
                       choice.chunk)  # fmt: skip


def _element_bytes(full: Segment) -> int:
    """Bytes of an element of the Jacobian."""
    avals: list[Any] = [v.aval for v in full.active]
    return max(itemsize(a.dtype) for a in avals)


def _end(name: str, variables: Any, where: str = "") -> ChainValue:
    avals = [v.aval for v in variables]
    return ChainValue(
        name,
        tuple(a.str_short(short_dtypes=True) for a in avals),
        sum(math.prod(a.shape) for a in avals),
        sum(map(aval_bytes, avals)),
        where,
    )


def _cut(eqn: Any, v: Any) -> ChainValue:
    return _end(eqn.primitive.name, [v], frame(eqn))


def _steps(order: Order, links: tuple[ChainLink, ...], each: int) -> Iterator[EvaluationStep]:
    """The steps in the order of evaluation."""
    if isinstance(order, Product):
        inside = [order.left, order.right]
    else:
        inside = [order.of] if order.of is not None else []
    for part in inside:
        yield from _steps(part, links, each)
    rows, width = links[order.high].rows, links[order.low].columns
    own = order.flops - sum(part.flops for part in inside)
    if isinstance(order, Product):
        middle = links[order.right.high].rows
        what, text = "product", f"[{rows}, {middle}] x [{middle}, {width}]"
    else:
        ends = {order.first + 1, order.last + 1}
        through = "J" + " to J".join(map(str, sorted(ends)))
        n, kind = (width, "columns") if order.mode == "forward" else (rows, "rows")
        seeds = f"{n} unit vectors" if order.of is None else f"the {n} {kind}"
        what, text = order.mode, f"{seeds} through {through}"
    yield EvaluationStep(what, text, int(own), rows * width * each)


def _flops(n: float) -> str:
    """Return a number of FLOPs as text; "none" for infinity."""
    return human_flops(int(n)) if n < math.inf else "none"
