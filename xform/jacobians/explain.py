"""`Explanation`: how `xform.jacobian` evaluates a Jacobian, and the cost of each way to do it.

A cut is a value that every path from the inputs to the outputs goes through. The cuts divide the
program into parts, whose Jacobians (the links `J1`, `J2` and so on) are multiplied.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from xform._jax import itemsize
from xform.interpret.cost import aval_bytes
from xform.jacobians.chain import ChainLink, Order, Product, Sweep, forward_order, reverse_order
from xform.jacobians.choice import Evaluation
from xform.jacobians.segments import Segment
from xform.program.source import frame
from xform.terminal.notebook import Result
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
      kind: "forward" or "reverse": vectors are pushed or pulled through links; "product": two
        matrices that were computed before are multiplied.
      text: the vectors and the links of the step.
      flops: FLOPs of this step alone.
      bytes: bytes of the matrix that it computes.
    """

    kind: str
    text: str
    flops: int
    bytes: int


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation(Result):
    """How `xform.jacobian` evaluates a Jacobian, and why: print it.

    Attributes:
      function: name of the function.
      values: the inputs, each value that cuts the program in two, and the outputs.
      links: the shape and the cost of the Jacobian between two successive values.
      order: the chosen order as text: `<` pushes columns, `>` pulls rows, `x` multiplies matrices.
      steps: the steps of that order.
      flops: FLOPs of each choice, by name: "forward", "reverse", and "mixed" (the cheapest order)
        if it is neither. Infinite if the function does not have the mode.
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
        inputs_and_outputs = self.values[0], self.values[-1]
        shapes = " -> ".join(", ".join(v.shapes) for v in inputs_and_outputs)
        rows = [["", "value", "type", "elements", "push", "pull", "line"]]
        for i, v in enumerate(self.values):
            costs = [_flops(x) for x in (self.links[i - 1].push, self.links[i - 1].pull)]
            rows.append([f"J{i}" if i else "", v.name, ", ".join(v.shapes), f"{v.elements:,}",
                         *(costs if i else ["", ""]), shorten_place(v.where)])  # fmt: skip
        choices = [["choice", "FLOPs", ""]]
        for name, flops in self.flops.items():
            choices.append([name, _flops(flops), "chosen" if name == self.chosen else ""])
        steps = [["step", "", "FLOPs", "makes"]]
        for step in self.steps:
            steps.append([step.kind, step.text, human_flops(step.flops), human_bytes(step.bytes)])
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


def explain_choice(function: str, choice: Evaluation) -> Explanation:
    """Explain a choice for a function of this name. The FLOPs of its links must be counted."""
    cut_program, links, order = choice.cut_program, choice.links, choice.order
    full = cut_program.segment(0, len(cut_program) - 1)
    equations = cut_program.program.equations
    cuts = [_cut_value(equations[position - 1], v) for position, v in cut_program.cuts]
    values = (_chain_value("inputs", full.active), *cuts, _chain_value("outputs", full.wanted))
    flops = {"forward": forward_order(links).flops, "reverse": reverse_order(links).flops}
    if isinstance(order, Sweep) and order.operand is None:
        chosen = order.mode
    else:
        chosen, flops["mixed"] = "mixed", order.flops
    steps = tuple(_steps(order, links, _element_bytes(full)))
    return Explanation(function, values, links, str(order), steps, flops, chosen, choice.chunk)


def _element_bytes(full: Segment) -> int:
    """Return the bytes of an element of the Jacobian: the largest element size of the inputs."""
    avals: list[Any] = [v.aval for v in full.active]
    return max(itemsize(a.dtype) for a in avals)


def _chain_value(name: str, variables: Any, where: str = "") -> ChainValue:
    """Return the `ChainValue` that consists of these variables."""
    avals = [v.aval for v in variables]
    return ChainValue(
        name,
        tuple(a.str_short(short_dtypes=True) for a in avals),
        sum(math.prod(a.shape) for a in avals),
        sum(map(aval_bytes, avals)),
        where,
    )


def _cut_value(eqn: Any, v: Any) -> ChainValue:
    """Return the `ChainValue` of a cut: the value `v`, which `eqn` computes."""
    return _chain_value(eqn.primitive.name, [v], frame(eqn))


def _steps(
    order: Order, links: tuple[ChainLink, ...], element_bytes: int
) -> Iterator[EvaluationStep]:
    """Yield the steps in the order of evaluation."""
    if isinstance(order, Product):
        parts = [order.left, order.right]
    else:
        parts = [order.operand] if order.operand is not None else []
    for part in parts:
        yield from _steps(part, links, element_bytes)
    rows, width = links[order.high].rows, links[order.low].columns
    own_flops = order.flops - sum(part.flops for part in parts)
    if isinstance(order, Product):
        middle = links[order.right.high].rows
        kind, text = "product", f"[{rows}, {middle}] x [{middle}, {width}]"
    else:
        first_and_last = {order.first + 1, order.last + 1}
        through = "J" + " to J".join(map(str, sorted(first_and_last)))
        n, lines = (width, "columns") if order.mode == "forward" else (rows, "rows")
        vectors = f"{n} unit vectors" if order.operand is None else f"the {n} {lines}"
        kind, text = order.mode, f"{vectors} through {through}"
    yield EvaluationStep(kind, text, int(own_flops), rows * width * element_bytes)


def _flops(n: float) -> str:
    """Return a number of FLOPs as text; "none" for infinity."""
    return human_flops(int(n)) if n < math.inf else "none"
