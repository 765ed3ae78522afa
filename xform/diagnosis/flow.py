"""Dependence of each value of a loss: on parameters, on the batch or on both, and its region.

A program is divided into regions. A new region begins at an equation that combines a weight with a
value that depends on the batch, at an equation that reads values of two regions, and at a loop or
branch. Every other equation belongs to the region of the values that it reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from xform._jax import JaxprEqn, Literal, Var, has_effects, scan_counts
from xform.errors import NotDifferentiable
from xform.passes.inline import opened
from xform.passes.structured import bodies, body, called, region
from xform.program.arithmetic import differentiable
from xform.program.ir import Atom, Program
from xform.program.source import frame
from xform.registry.table import rule_of, traits
from xform.registry.words import Linear

# Index of a parameter, and the number of its leading axes that the loops around scan over.
Weight = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Mark:
    """What a value depends on.

    Attributes:
      weights: the parameters that it depends on.
      batch: whether it depends on the batch.
      region: index of its region; -1 for a value outside all regions.
    """

    weights: frozenset[Weight] = frozenset()
    batch: bool = False
    region: int = -1

    @property
    def weight(self) -> bool:
        """Whether the value depends on parameters and not on the batch."""
        return bool(self.weights) and not self.batch

    @property
    def data(self) -> bool:
        """Whether the value depends on parameters and the batch, like the results of layers."""
        return bool(self.weights) and self.batch


_NONE = Mark()
# The weights of every value that also depends on the batch. Which parameters these are does not
# matter, and the set of all of them would be long.
_SOME = frozenset[Weight]({(-1, 0)})


@dataclasses.dataclass(eq=False)
class Region:
    """A region of a program.

    Attributes:
      kind: what its first equation does. "layer": it combines a weight with a value that depends on
        the batch. "inner": it is a loop, branch or remat region. "join": it reads results of
        several regions. "other": it reads no layer's result.
      equations: positions of its equations in the program.
      values: results of its equations.
    """

    kind: str
    equations: list[int] = dataclasses.field(default_factory=list[int])
    values: list[Var] = dataclasses.field(default_factory=list[Var])


@dataclasses.dataclass(eq=False)
class Flow:
    """The dependence of all values of a program, and its regions.

    Attributes:
      program: the program, with its calls inlined.
      marks: what each value depends on.
      results: number of leading outputs that count as results. The others are auxiliary outputs:
        being one does not make a value the result of a layer. None: all outputs are results.
      regions: the regions of the program.
      inner: by `id` of an equation, the flows of the programs inside it.
    """

    program: Program
    marks: dict[Var, Mark]
    results: int | None = None
    regions: list[Region] = dataclasses.field(default_factory=list[Region])
    inner: dict[int, tuple[Flow, ...]] = dataclasses.field(default_factory=lambda: {})

    def of(self, atom: Atom) -> Mark:
        """Return what a value depends on."""
        return _NONE if isinstance(atom, Literal) else self.marks.get(atom, _NONE)

    def data(self, eqn: JaxprEqn) -> list[Var]:
        """Return the values read by an equation that depend on parameters and the batch.

        If there are none, return those that depend on the batch.
        """
        read = [v for v in eqn.invars if isinstance(v, Var) and self.of(v).batch]
        return [v for v in read if self.of(v).data] or read

    def weights(self, index: int) -> Iterable[Weight]:
        """Yield the parameters that an equation reads."""
        read = map(self.of, self.program.equations[index].invars)
        return (w for mark in read if mark.weight for w in mark.weights)

    @cached_property
    def producer(self) -> dict[Var, JaxprEqn]:
        """The equation that computes each value."""
        return {v: eqn for eqn in self.program.equations for v in eqn.outvars}

    @cached_property
    def outputs(self) -> frozenset[Var]:
        """The outputs that count as results."""
        return frozenset(v for v in self.program.outputs[: self.results] if isinstance(v, Var))

    @cached_property
    def readers(self) -> dict[Var, list[int]]:
        """For each value, the positions of the equations that read it."""
        readers: dict[Var, list[int]] = {}
        for i, eqn in enumerate(self.program.equations):
            for v in {v for v in eqn.invars if isinstance(v, Var)}:
                readers.setdefault(v, []).append(i)
        return readers

    @cached_property
    def left(self) -> frozenset[Var]:
        """The values that are results of the program or are read outside their region."""
        out = set(self.outputs)
        for number, region_ in enumerate(self.regions):
            inside = set(region_.equations)
            for v in region_.values:
                if self.of(v).region == number and set(self.readers.get(v, ())) - inside:
                    out.add(v)
        return frozenset(out)

    def followed(self, region_: Region) -> bool:
        """Return whether a later layer, here or in a loop or branch, depends on a region."""
        return self._followed[self.regions.index(region_)]

    @cached_property
    def _followed(self) -> list[bool]:
        reads: list[set[int]] = [set() for _ in self.regions]
        for number, region_ in enumerate(self.regions):
            first = self.program.equations[region_.equations[0]]
            for source in {self.of(v).region for v in first.invars} - {-1, number}:
                reads[source].add(number)
        result = [False] * len(self.regions)
        for i in reversed(range(len(reads))):
            result[i] = any(
                self.regions[j].kind in ("layer", "inner") or result[j] for j in reads[i]
            )
        return result

    def bypassed(self, eqn: JaxprEqn) -> bool:
        """Return whether a path from the inputs of the first layers to a result avoids `eqn`."""
        _, avoided = self._paths
        return avoided.get(id(eqn), True)

    @cached_property
    def _paths(self) -> tuple[int, dict[int, bool]]:
        """The number of paths modulo a prime, and for each equation whether some path avoids it.

        Some path avoids an equation if the number of paths through it is not the total number.
        """
        # Number of paths from the first layers to each value, and to each equation.
        to: dict[Var, int] = {v: 1 for v, m in self.marks.items() if m.data and self._is_input(v)}
        to_equation: dict[int, int] = {}
        for eqn in self.program.equations:
            read = [v for v in eqn.invars if isinstance(v, Var) and v in to and _has_derivative(v)]
            count = sum(to[v] for v in read) or int(any(self.of(v).data for v in eqn.outvars))
            count += self._batch_operands(eqn) if read else 0
            to_equation[id(eqn)] = count
            outs = (v for v in eqn.outvars if self.of(v).data and _has_derivative(v))
            to.update((v, count % _PRIME) for v in outs)
        # Number of paths from each value, and from each equation, to the results.
        onward: dict[Var, int] = dict.fromkeys(self.outputs, 1)
        from_equation: dict[int, int] = {}
        for eqn in reversed(self.program.equations):
            from_equation[id(eqn)] = sum(onward.get(v, 0) for v in eqn.outvars) % _PRIME
            for v in eqn.invars:
                if isinstance(v, Var) and self.of(v).data and _has_derivative(v):
                    onward[v] = (onward.get(v, 0) + from_equation[id(eqn)]) % _PRIME
        total = sum(to.get(v, 0) for v in self.outputs) % _PRIME
        avoided = {
            key: to_equation[key] * from_equation[key] % _PRIME != total for key in to_equation
        }
        return total, avoided

    def _batch_operands(self, eqn: JaxprEqn) -> int:
        """Count the operands that depend on the batch alone and that layers also read.

        Each one begins a path around the first layers. The count is 0 after the last layers, where
        the loss may compare their results with the same data.
        """
        region_ = self.of(eqn.outvars[0]).region
        if region_ < 0 or not self._followed[region_]:
            return 0
        return sum(isinstance(v, Var) and v in self._batch_inputs for v in eqn.invars)

    @cached_property
    def _batch_inputs(self) -> frozenset[Var]:
        """The inputs of layers that depend on the batch and on no parameter."""
        starts = [self.program.equations[r.equations[0]] for r in self.regions if r.kind == "layer"]
        read = [v for eqn in starts for v in eqn.invars if isinstance(v, Var)]
        return frozenset(
            v for v in read if _has_derivative(v) and self.of(v).batch and not self.of(v).data
        )

    def _is_input(self, v: Var) -> bool:
        return v in self.program.inputs and _has_derivative(v)


_PRIME = 2**61 - 1


def _has_derivative(v: Any) -> bool:
    return differentiable(v.aval)


def flow(prog: Program, marks: Sequence[Mark], results: int | None = None) -> Flow:
    """Follow the dependence on parameters and batch through a program.

    Args:
      prog: the program.
      marks: what each of its inputs depends on.
      results: number of leading outputs that count as results; None: all.

    Raises:
      NotDifferentiable: the program has effects.
    """
    prog = calls_opened(prog)
    result = Flow(prog, dict(zip(prog.inputs, marks, strict=True)), results)
    for i, eqn in enumerate(prog.equations):
        _check_effects(eqn)
        read = [result.of(v) for v in eqn.invars]
        weights = frozenset[Weight]().union(*(m.weights for m in read))
        batch = any(m.batch for m in read)
        inner = _inner_flows(eqn, read) if weights and batch else ()
        if inner:
            result.inner[id(eqn)] = inner
        number = _region(result, eqn, read, bool(inner)) if weights and batch else -1
        mark = Mark(_SOME if weights and batch else weights, batch, number)
        result.marks.update((v, mark) for v in eqn.outvars)
        if number >= 0:
            result.regions[number].equations.append(i)
            result.regions[number].values.extend(eqn.outvars)
    return result


def calls_opened(prog: Program) -> Program:
    """Return the program with its calls inlined; the result is cached."""
    if "calls opened" not in prog.cache:
        prog.cache["calls opened"] = opened(prog, called)
    return prog.cache["calls opened"]


def _check_effects(eqn: JaxprEqn) -> None:
    if has_effects(eqn):
        raise NotDifferentiable(
            "health of a loss",
            f"{eqn.primitive.name} has a side effect, and a diagnosis runs the loss several times",
            frame(eqn),
            "remove the print, callback or mutable value for the diagnosis",
        )


def _region(of: Flow, eqn: JaxprEqn, read: Sequence[Mark], has_inner: bool) -> int:
    """Return the index of an equation's region, which may be a new one that begins here."""
    sources = {m.region for m in read if m.data and m.region >= 0}
    if has_inner:
        kind = "inner"
    elif begins(eqn, read):
        kind = "layer"
    elif len(sources) == 1 and not any(m.data and m.region < 0 for m in read):
        return sources.pop()
    else:
        kind = "join" if any(m.data for m in read) else "other"
    of.regions.append(Region(kind))
    return len(of.regions) - 1


def begins(eqn: JaxprEqn, read: Sequence[Mark]) -> bool:
    """Return whether an equation begins a layer.

    It does if it combines a weight with a value that depends on the batch, by a product (not an
    elementwise one) or a look-up.
    """
    rule = rule_of(eqn.primitive)
    if rule is None:
        return False
    known = rule.traits
    if known.calls == "custom" and known.call:
        combines = any(m.weight for m in read) and any(m.batch for m in read)
        return combines and _has_product(body(eqn))
    if known.fusion == "elementwise":
        return False
    if rule.word == "bilinear":
        a, b = read[:2]
        return (a.weight and b.batch) or (b.weight and a.batch)
    if isinstance(rule, Linear) and rule.over and len(read) > 1:
        looked_up = read[rule.over[0]]
        return looked_up.weight and any(m.batch for m in read[1:])
    return False


def _has_product(prog: Program) -> bool:
    """Return whether a program has a product that is not elementwise."""
    for eqn in prog.equations:
        rule = rule_of(eqn.primitive)
        if rule is not None and rule.word == "bilinear" and rule.traits.fusion != "elementwise":
            return True
        inner = (*bodies(eqn), *([body(eqn)] if traits(eqn.primitive).call else []))
        if any(map(_has_product, inner)):
            return True
    return False


def _inner_flows(eqn: JaxprEqn, read: Sequence[Mark]) -> tuple[Flow, ...]:
    """Return the flows of the programs of a loop, branch or remat region; else an empty tuple."""
    inner: tuple[Program, ...] = (body(eqn),) if region(eqn) else bodies(eqn)
    if not inner:
        return ()
    enter = [dataclasses.replace(m, region=-1) for m in read]
    if "branches" in eqn.params:
        return tuple(flow(p, enter[1:]) for p in inner)
    if "cond_nconsts" in eqn.params:
        a, b = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        return (_loop_flow(inner[-1], [*enter[a:]], b, len(enter) - a - b),)
    if "length" in eqn.params:
        nc, nk = scan_counts(eqn.params)
        length = eqn.params["length"]
        sliced = [_sliced(m, v, length) for m, v in zip(enter, eqn.invars, strict=True)]
        return (_loop_flow(inner[0], [*enter[: nc + nk], *sliced[nc + nk :]], nc, nk),)
    return (flow(inner[0], enter),)


def _sliced(mark: Mark, v: Any, length: int) -> Mark:
    """Return the mark of a scanned input in one iteration.

    If it depends on one parameter, the scan takes one more leading axis off that parameter.
    """
    one = len(mark.weights) == 1 and bool(v.aval.shape)
    return dataclasses.replace(mark, weights=frozenset((w, n + one) for w, n in mark.weights))


def _loop_flow(prog: Program, marks: list[Mark], consts: int, carries: int) -> Flow:
    """Return the flow of a loop's body.

    A carry depends on everything that it depends on in some iteration: the flow is repeated, with
    the dependences of the body's outputs as those of its inputs, until they no longer change.
    """
    while True:
        result = flow(prog, marks)
        carried = slice(consts, consts + carries)
        merged = [
            Mark(m.weights | result.of(v).weights, m.batch or result.of(v).batch)
            for m, v in zip(marks[carried], result.program.outputs, strict=False)
        ]
        if merged == marks[carried]:
            return result
        marks = [*marks[:consts], *merged, *marks[consts + carries :]]
