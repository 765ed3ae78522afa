"""What each value of a loss depends on: parameters, the batch, or both, and from which layer on.

A program is cut into regions. One begins where a weight meets the batch, where values of two
regions meet, and behind a loop or a branch; everything else belongs to the region that it follows
from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from xform._jax import JaxprEqn, Literal, Var, has_effects, scan_counts
from xform.arithmetic import differentiable
from xform.errors import NotDifferentiable
from xform.ir import Atom, Program
from xform.passes.inline import opened
from xform.passes.structured import bodies, body, called, region
from xform.source import frame
from xform.table import rule_of, traits
from xform.words import Linear

# A parameter, and how many of its leading axes are those of loops around.
Weight = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Mark:
    """What a value depends on: parameters, whether on the batch, and the region it is of."""

    weights: frozenset[Weight] = frozenset()
    batch: bool = False
    region: int = -1

    @property
    def weight(self) -> bool:
        """Of parameters alone."""
        return bool(self.weights) and not self.batch

    @property
    def data(self) -> bool:
        """Of parameters and the batch: what flows from layer to layer."""
        return bool(self.weights) and self.batch


_NONE = Mark()
# Of what depends on the batch too it does not matter which parameters: a set of all would be long.
_SOME = frozenset[Weight]({(-1, 0)})


@dataclasses.dataclass(eq=False)
class Region:
    """Equations, by their places, that follow from one: of a "layer", a "join", an "inner"."""

    kind: str
    equations: list[int] = dataclasses.field(default_factory=list[int])
    values: list[Var] = dataclasses.field(default_factory=list[Var])


@dataclasses.dataclass(eq=False)
class Flow:
    """A program, with what its values depend on, its regions, and the same of programs inside.

    `results` is how many of its outputs are what it is for; the others only leave, and that they do
    makes nothing the result of a layer. None is for all.
    """

    program: Program
    marks: dict[Var, Mark]
    results: int | None = None
    regions: list[Region] = dataclasses.field(default_factory=list[Region])
    inner: dict[int, tuple[Flow, ...]] = dataclasses.field(default_factory=lambda: {})

    def of(self, atom: Atom) -> Mark:
        """What a value depends on."""
        return _NONE if isinstance(atom, Literal) else self.marks.get(atom, _NONE)

    def data(self, eqn: JaxprEqn) -> list[Var]:
        """What an equation reads that depends on the batch, and on parameters where any does."""
        read = [v for v in eqn.invars if isinstance(v, Var) and self.of(v).batch]
        return [v for v in read if self.of(v).data] or read

    def weights(self, index: int) -> Iterable[Weight]:
        """The parameters that an equation reads."""
        read = map(self.of, self.program.equations[index].invars)
        return (w for mark in read if mark.weight for w in mark.weights)

    @cached_property
    def producer(self) -> dict[Var, JaxprEqn]:
        """The equation that makes each value."""
        return {v: eqn for eqn in self.program.equations for v in eqn.outvars}

    @cached_property
    def outputs(self) -> frozenset[Var]:
        """What the program is for."""
        return frozenset(v for v in self.program.outputs[: self.results] if isinstance(v, Var))

    @cached_property
    def readers(self) -> dict[Var, list[int]]:
        """The equations, by their places, that read a value."""
        readers: dict[Var, list[int]] = {}
        for i, eqn in enumerate(self.program.equations):
            for v in {v for v in eqn.invars if isinstance(v, Var)}:
                readers.setdefault(v, []).append(i)
        return readers

    @cached_property
    def left(self) -> frozenset[Var]:
        """Values that something outside their region reads."""
        out = set(self.outputs)
        for number, region_ in enumerate(self.regions):
            inside = set(region_.equations)
            for v in region_.values:
                if self.of(v).region == number and set(self.readers.get(v, ())) - inside:
                    out.add(v)
        return frozenset(out)

    def followed(self, region_: Region) -> bool:
        """Whether a layer, here or in a loop or branch, reads what follows from a region."""
        return self._followed[self.regions.index(region_)]

    @cached_property
    def _followed(self) -> list[bool]:
        reads: list[set[int]] = [set() for _ in self.regions]
        for number, region_ in enumerate(self.regions):
            first = self.program.equations[region_.equations[0]]
            for source in {self.of(v).region for v in first.invars} - {-1, number}:
                reads[source].add(number)
        found = [False] * len(self.regions)
        for i in reversed(range(len(reads))):
            found[i] = any(self.regions[j].kind in ("layer", "inner") or found[j] for j in reads[i])
        return found

    def bypassed(self, eqn: JaxprEqn) -> bool:
        """Whether a path from what the first layers read to the result avoids an equation."""
        _, around = self._paths
        return around.get(id(eqn), True)

    @cached_property
    def _paths(self) -> tuple[int, dict[int, bool]]:
        """How many paths there are, modulo a prime; and which equations some of them avoid."""
        ahead: dict[Var, int] = {v: 1 for v, m in self.marks.items() if m.data and self._enters(v)}
        through: dict[int, int] = {}
        for eqn in self.program.equations:
            read = [v for v in eqn.invars if isinstance(v, Var) and v in ahead and _moves(v)]
            count = sum(ahead[v] for v in read) or int(any(self.of(v).data for v in eqn.outvars))
            count += self._joining(eqn) if read else 0
            through[id(eqn)] = count
            ahead.update((v, count % _PRIME) for v in eqn.outvars if self.of(v).data and _moves(v))
        behind: dict[Var, int] = dict.fromkeys(self.outputs, 1)
        after: dict[int, int] = {}
        for eqn in reversed(self.program.equations):
            after[id(eqn)] = sum(behind.get(v, 0) for v in eqn.outvars) % _PRIME
            for v in eqn.invars:
                if isinstance(v, Var) and self.of(v).data and _moves(v):
                    behind[v] = (behind.get(v, 0) + after[id(eqn)]) % _PRIME
        total = sum(ahead.get(v, 0) for v in self.outputs) % _PRIME
        avoid = {key: through[key] * after[key] % _PRIME != total for key in through}
        return total, avoid

    def _joining(self, eqn: JaxprEqn) -> int:
        """How often data of the batch itself, which a layer reads too, joins what layers made.

        Not behind the last layers: there the loss may compare their results with that data.
        """
        region_ = self.of(eqn.outvars[0]).region
        if region_ < 0 or not self._followed[region_]:
            return 0
        return sum(isinstance(v, Var) and v in self._first for v in eqn.invars)

    @cached_property
    def _first(self) -> frozenset[Var]:
        """What layers read of the batch alone."""
        starts = [self.program.equations[r.equations[0]] for r in self.regions if r.kind == "layer"]
        read = [v for eqn in starts for v in eqn.invars if isinstance(v, Var) and _moves(v)]
        return frozenset(v for v in read if self.of(v).batch and not self.of(v).data)

    def _enters(self, v: Var) -> bool:
        return v in self.program.inputs and _moves(v)


_PRIME = 2**61 - 1


def _moves(v: Any) -> bool:
    return differentiable(v.aval)


def flow(prog: Program, marks: Sequence[Mark], results: int | None = None) -> Flow:
    """Follow parameters and batch through a program.

    Raises:
      NotDifferentiable: it has effects.
    """
    prog = calls_opened(prog)
    of = Flow(prog, dict(zip(prog.inputs, marks, strict=True)), results)
    for i, eqn in enumerate(prog.equations):
        _refuse_effects(eqn)
        read = [of.of(v) for v in eqn.invars]
        weights = frozenset[Weight]().union(*(m.weights for m in read))
        batch = any(m.batch for m in read)
        levels = _inside(of, eqn, read) if weights and batch else ()
        if levels:
            of.inner[id(eqn)] = levels
        number = _region(of, i, eqn, read, bool(levels)) if weights and batch else -1
        mark = Mark(_SOME if weights and batch else weights, batch, number)
        of.marks.update((v, mark) for v in eqn.outvars)
        if number >= 0:
            of.regions[number].equations.append(i)
            of.regions[number].values.extend(eqn.outvars)
    return of


def calls_opened(prog: Program) -> Program:
    """A program with its calls opened, made once."""
    if "calls opened" not in prog.cache:
        prog.cache["calls opened"] = opened(prog, called)
    return prog.cache["calls opened"]


def _refuse_effects(eqn: JaxprEqn) -> None:
    if has_effects(eqn):
        raise NotDifferentiable(
            "health of a loss",
            f"{eqn.primitive.name} has an effect, and a diagnosis runs the loss several times",
            frame(eqn),
            "leave out the print, callback or mutable value while the loss is diagnosed",
        )


def _region(of: Flow, i: int, eqn: JaxprEqn, read: Sequence[Mark], inside: bool) -> int:
    """The region of an equation: that of what it reads, or one that begins here."""
    sources = {m.region for m in read if m.data and m.region >= 0}
    if inside:
        kind = "inner"
    elif begins(eqn, read):
        kind = "layer"
    elif len(sources) == 1 and not any(m.data and m.region < 0 for m in read):
        return sources.pop()
    else:
        entering = not any(m.data for m in read)
        kind = "other" if entering else "join"
    of.regions.append(Region(kind))
    return len(of.regions) - 1


def begins(eqn: JaxprEqn, read: Sequence[Mark]) -> bool:
    """Whether an equation applies a weight to what depends on the batch: products and look-ups."""
    rule = rule_of(eqn.primitive)
    if rule is None:
        return False
    of = rule.traits
    if of.calls == "custom" and of.call:
        held = any(m.weight for m in read) and any(m.batch for m in read)
        return held and _contracts(body(eqn))
    if of.fusion == "elementwise":
        return False
    if rule.word == "bilinear":
        a, b = read[:2]
        return (a.weight and b.batch) or (b.weight and a.batch)
    if isinstance(rule, Linear) and rule.over and len(read) > 1:
        looked_up = read[rule.over[0]]
        return looked_up.weight and any(m.batch for m in read[1:])
    return False


def _contracts(prog: Program) -> bool:
    """Whether a program has a product that is more than of elements."""
    for eqn in prog.equations:
        rule = rule_of(eqn.primitive)
        if rule is not None and rule.word == "bilinear" and rule.traits.fusion != "elementwise":
            return True
        inner = (*bodies(eqn), *([body(eqn)] if traits(eqn.primitive).call else []))
        if any(map(_contracts, inner)):
            return True
    return False


def _inside(of: Flow, eqn: JaxprEqn, read: Sequence[Mark]) -> tuple[Flow, ...]:
    """What flows through the programs of a loop, a branch or a remat region."""
    inner: tuple[Program, ...] = (body(eqn),) if region(eqn) else bodies(eqn)
    if not inner:
        return ()
    enter = [dataclasses.replace(m, region=-1) for m in read]
    if "branches" in eqn.params:
        return tuple(flow(p, enter[1:]) for p in inner)
    if "cond_nconsts" in eqn.params:
        a, b = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        return (_fixed(inner[-1], [*enter[a:]], b, len(enter) - a - b),)
    if "length" in eqn.params:
        nc, nk = scan_counts(eqn.params)
        length = eqn.params["length"]
        sliced = [_sliced(m, v, length) for m, v in zip(enter, eqn.invars, strict=True)]
        return (_fixed(inner[0], [*enter[: nc + nk], *sliced[nc + nk :]], nc, nk),)
    return (flow(inner[0], enter),)


def _sliced(mark: Mark, v: Any, length: int) -> Mark:
    """A scanned input in one trip: one axis of the parameters that it is of is the loop's."""
    one = len(mark.weights) == 1 and bool(v.aval.shape)
    return dataclasses.replace(mark, weights=frozenset((w, n + one) for w, n in mark.weights))


def _fixed(prog: Program, marks: list[Mark], consts: int, carries: int) -> Flow:
    """What flows through a loop's body once its state depends on all that it will."""
    while True:
        of = flow(prog, marks)
        carried = slice(consts, consts + carries)
        grown = [
            Mark(m.weights | of.of(v).weights, m.batch or of.of(v).batch)
            for m, v in zip(marks[carried], of.program.outputs, strict=False)
        ]
        if grown == marks[carried]:
            return of
        marks = [*marks[:consts], *grown, *marks[consts + carries :]]
