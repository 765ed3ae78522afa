"""Find which values of a loss depend on parameters, on the batch or on both, and their regions.

Words:

- a *weight* is a value that depends on parameters and not on the batch;
- a *data value* depends on parameters and on the batch, like the result of a layer;
- a *region* is a group of equations that compute data values: a layer, for example. It is no remat
  region, which this file always names in full;
- a *dependence* says what one value depends on, and which region computes the value.

Only equations that compute data values belong to a region. A new region begins at

- an equation that multiplies a weight with a value that depends on the batch, or looks up a weight
  by it. An elementwise product or sum, such as adding a bias, begins no layer;
- a loop, a branch or a remat region;
- an equation that reads data values of several regions, such as the sum in a residual path, or a
  data value that is an input of the program, such as the carry of a loop;
- any other equation that reads no data value, such as a batch times an elementwise scale.

All other equations that compute data values belong to the region of the data values they read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from xform._jax import JaxprEqn, Literal, Var, has_effects, scan_counts
from xform.errors import NotDifferentiable
from xform.passes.inline import inline_bodies
from xform.passes.structured import bodies, called_body, is_remat_region, plain_call_body
from xform.program.arithmetic import differentiable
from xform.program.ir import Atom, Program
from xform.program.source import frame
from xform.registry.table import rule_of, traits
from xform.registry.words import Linear

# Index of a parameter, and the number of its leading axes that the surrounding scans iterate over.
Weight = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Dependence:
    """The parameters and the batch that one value depends on, and its region.

    Attributes:
      weights: the parameters that the value depends on.
      batch: whether the value depends on the batch.
      region: index of the region that computes the value; -1 for an input of the program and for a
        value that is no data value.
    """

    weights: frozenset[Weight] = frozenset()
    batch: bool = False
    region: int = -1

    @property
    def is_weight(self) -> bool:
        """Whether the value depends on parameters and not on the batch."""
        return bool(self.weights) and not self.batch

    @property
    def is_data(self) -> bool:
        """Whether the value is a data value: it depends on parameters and on the batch."""
        return bool(self.weights) and self.batch


_NONE = Dependence()
# `Dependence.weights` of every data value. The parameters behind a data value do not matter, and
# the set of all of them would be long.
_SOME = frozenset[Weight]({(-1, 0)})


@dataclasses.dataclass(eq=False)
class Region:
    """A group of equations that compute data values, such as a layer with its activation.

    Attributes:
      kind: what the first equation is. "layer": a product of a weight with a value that depends on
        the batch, or a look-up. "inner": a loop, a branch or a remat region. "join": an equation
        that reads data values of several regions, or a data value that is an input of the program,
        such as the carry of a loop. "other": an equation that reads no data value.
      equations: positions of the region's equations in the program.
      values: results of these equations.
    """

    kind: str
    equations: list[int] = dataclasses.field(default_factory=list[int])
    values: list[Var] = dataclasses.field(default_factory=list[Var])


@dataclasses.dataclass(eq=False)
class DependenceMap:
    """The dependence of all values of a program, and the program's regions.

    Attributes:
      program: the program, with its calls inlined.
      by_value: the dependence of each value.
      results: number of leading outputs that count as results; None means all outputs. The other
        outputs are auxiliary. An auxiliary output that no other region reads is not the result of
        its layer.
      regions: the regions of the program, in program order.
      inner: for each loop, branch and remat region that computes data values, by `id` of its
        equation: the dependence maps of the programs inside it.
    """

    program: Program
    by_value: dict[Var, Dependence]
    results: int | None = None
    regions: list[Region] = dataclasses.field(default_factory=list[Region])
    inner: dict[int, tuple[DependenceMap, ...]] = dataclasses.field(default_factory=lambda: {})

    def of(self, atom: Atom) -> Dependence:
        """Return the dependence of a value. A literal depends on nothing and has no region."""
        return _NONE if isinstance(atom, Literal) else self.by_value.get(atom, _NONE)

    def data_operands(self, eqn: JaxprEqn) -> list[Var]:
        """Return the data values that an equation reads.

        If it reads no data value, as the first layer does, return the values that it reads and that
        depend on the batch.
        """
        read = [v for v in eqn.invars if isinstance(v, Var) and self.of(v).batch]
        return [v for v in read if self.of(v).is_data] or read

    def weights(self, index: int) -> Iterable[Weight]:
        """Yield the parameters behind the weights that the equation at position `index` reads."""
        read = map(self.of, self.program.equations[index].invars)
        return (w for x in read if x.is_weight for w in x.weights)

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
    def region_outputs(self) -> frozenset[Var]:
        """The values that are results of the program, or that other regions read."""
        out = set(self.outputs)
        for number, region_ in enumerate(self.regions):
            inside = set(region_.equations)
            for v in region_.values:
                if self.of(v).region == number and set(self.readers.get(v, ())) - inside:
                    out.add(v)
        return frozenset(out)

    def has_later_layer(self, region_: Region) -> bool:
        """Return whether a layer, a loop, a branch or a remat region later depends on `region_`."""
        return self._has_later_layer[self.regions.index(region_)]

    @cached_property
    def _has_later_layer(self) -> list[bool]:
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
        """Return whether a path from an input of the first layers to a result avoids `eqn`.

        A path leads through floating-point values only. A residual path around a layer avoids the
        equations of that layer.
        """
        _, avoided = self._paths
        return avoided.get(id(eqn), True)

    @cached_property
    def _paths(self) -> tuple[int, dict[int, bool]]:
        """The number of paths, and for each equation, by `id`, whether some path avoids it.

        Some path avoids an equation if the number of paths through that equation differs from the
        total number. The numbers grow exponentially with depth, so they are counted modulo a large
        prime.
        """
        # Number of paths from the first layers to each value, and to each equation.
        data = (v for v, m in self.by_value.items() if m.is_data)
        to: dict[Var, int] = {v: 1 for v in data if self._is_input(v)}
        to_equation: dict[int, int] = {}
        for eqn in self.program.equations:
            read = [v for v in eqn.invars if isinstance(v, Var) and v in to and _has_derivative(v)]
            count = sum(to[v] for v in read) or int(any(self.of(v).is_data for v in eqn.outvars))
            count += self._batch_operands(eqn) if read else 0
            to_equation[id(eqn)] = count
            outs = (v for v in eqn.outvars if self.of(v).is_data and _has_derivative(v))
            to.update((v, count % _PRIME) for v in outs)
        # Number of paths from each value, and from each equation, to the results.
        onward: dict[Var, int] = dict.fromkeys(self.outputs, 1)
        from_equation: dict[int, int] = {}
        for eqn in reversed(self.program.equations):
            from_equation[id(eqn)] = sum(onward.get(v, 0) for v in eqn.outvars) % _PRIME
            for v in eqn.invars:
                if isinstance(v, Var) and self.of(v).is_data and _has_derivative(v):
                    onward[v] = (onward.get(v, 0) + from_equation[id(eqn)]) % _PRIME
        total = sum(to.get(v, 0) for v in self.outputs) % _PRIME
        avoided = {
            key: to_equation[key] * from_equation[key] % _PRIME != total for key in to_equation
        }
        return total, avoided

    def _batch_operands(self, eqn: JaxprEqn) -> int:
        """Count the operands of `eqn` that depend on the batch alone and that layers also read.

        Each such operand begins a path around the first layers, like a residual path from the
        batch itself. The count is 0 after the last layers: there the loss may compare the model's
        result with its input, as in an autoencoder, and this is no path around a layer.
        """
        region_ = self.of(eqn.outvars[0]).region
        if region_ < 0 or not self._has_later_layer[region_]:
            return 0
        return sum(isinstance(v, Var) and v in self._batch_inputs for v in eqn.invars)

    @cached_property
    def _batch_inputs(self) -> frozenset[Var]:
        """The values that layers read and that depend on the batch and on no parameter."""
        starts = [self.program.equations[r.equations[0]] for r in self.regions if r.kind == "layer"]
        read = [v for eqn in starts for v in eqn.invars if isinstance(v, Var)]
        return frozenset(
            v for v in read if _has_derivative(v) and self.of(v).batch and not self.of(v).is_data
        )

    def _is_input(self, v: Var) -> bool:
        return v in self.program.inputs and _has_derivative(v)


_PRIME = 2**61 - 1


def _has_derivative(v: Any) -> bool:
    return differentiable(v.aval)


def dependence_map(prog: Program, inputs: Sequence[Dependence], results: int | None = None
                   ) -> DependenceMap:  # fmt: skip
    """Return the dependence of each value of a program on parameters and batch, and its regions.

    Args:
      prog: the program of a loss, or a program inside it.
      inputs: for each input of the program, the parameters and the batch that it depends on.
      results: number of leading outputs that count as results, as in a `DependenceMap`.

    Raises:
      NotDifferentiable: the program has effects, such as a print. A diagnosis runs the loss several
        times and would repeat them.
    """
    prog = inline_calls(prog)
    result = DependenceMap(prog, dict(zip(prog.inputs, inputs, strict=True)), results)
    for i, eqn in enumerate(prog.equations):
        _check_effects(eqn)
        read = [result.of(v) for v in eqn.invars]
        weights = frozenset[Weight]().union(*(m.weights for m in read))
        batch = any(m.batch for m in read)
        inner = _inner_maps(eqn, read) if weights and batch else ()
        if inner:
            result.inner[id(eqn)] = inner
        number = _region(result, eqn, read, bool(inner)) if weights and batch else -1
        dependence = Dependence(_SOME if weights and batch else weights, batch, number)
        result.by_value.update((v, dependence) for v in eqn.outvars)
        if number >= 0:
            result.regions[number].equations.append(i)
            result.regions[number].values.extend(eqn.outvars)
    return result


def inline_calls(prog: Program) -> Program:
    """Return the program with its calls inlined. The result is cached on the program."""
    if "calls opened" not in prog.cache:
        prog.cache["calls opened"] = inline_bodies(prog, plain_call_body)
    return prog.cache["calls opened"]


def _check_effects(eqn: JaxprEqn) -> None:
    if has_effects(eqn):
        raise NotDifferentiable(
            "health of a loss",
            f"{eqn.primitive.name} has a side effect, and a diagnosis runs the loss several times",
            frame(eqn),
            "remove the print, callback or mutable value for the diagnosis",
        )


def _region(of: DependenceMap, eqn: JaxprEqn, read: Sequence[Dependence], has_inner: bool) -> int:
    """Return the index of an equation's region, and add a new region if one begins here."""
    sources = {m.region for m in read if m.is_data and m.region >= 0}
    if has_inner:
        kind = "inner"
    elif begins_layer(eqn, read):
        kind = "layer"
    elif len(sources) == 1 and not any(m.is_data and m.region < 0 for m in read):
        return sources.pop()
    else:
        kind = "join" if any(m.is_data for m in read) else "other"
    of.regions.append(Region(kind))
    return len(of.regions) - 1


def begins_layer(eqn: JaxprEqn, read: Sequence[Dependence]) -> bool:
    """Return whether an equation begins a layer. `read` has the dependences of its inputs.

    An equation begins a layer if it is a product of a weight with a value that depends on the
    batch, unless the product is elementwise, or if it looks up a weight by such a value. A custom
    derivative that reads both begins a layer if its body has a product that is not elementwise.
    """
    rule = rule_of(eqn.primitive)
    if rule is None:
        return False
    known = rule.traits
    if known.calls == "custom" and known.call:
        combines = any(m.is_weight for m in read) and any(m.batch for m in read)
        return combines and _has_product(called_body(eqn))
    if known.fusion == "elementwise":
        return False
    if rule.word == "bilinear":
        a, b = read[:2]
        return (a.is_weight and b.batch) or (b.is_weight and a.batch)
    if isinstance(rule, Linear) and rule.over and len(read) > 1:
        looked_up = read[rule.over[0]]
        return looked_up.is_weight and any(m.batch for m in read[1:])
    return False


def _has_product(prog: Program) -> bool:
    """Return whether a program has a product that is not elementwise."""
    for eqn in prog.equations:
        rule = rule_of(eqn.primitive)
        if rule is not None and rule.word == "bilinear" and rule.traits.fusion != "elementwise":
            return True
        inner = (*bodies(eqn), *([called_body(eqn)] if traits(eqn.primitive).call else []))
        if any(map(_has_product, inner)):
            return True
    return False


def _inner_maps(eqn: JaxprEqn, read: Sequence[Dependence]) -> tuple[DependenceMap, ...]:
    """Return the maps of the programs inside a loop, branch or remat region, else `()`."""
    inner: tuple[Program, ...] = (called_body(eqn),) if is_remat_region(eqn) else bodies(eqn)
    if not inner:
        return ()
    enter = [dataclasses.replace(m, region=-1) for m in read]
    if "branches" in eqn.params:
        return tuple(dependence_map(p, enter[1:]) for p in inner)
    if "cond_nconsts" in eqn.params:
        a, b = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        return (_loop_map(inner[-1], [*enter[a:]], b, len(enter) - a - b),)
    if "length" in eqn.params:
        nc, nk = scan_counts(eqn.params)
        sliced = [_sliced(m, v) for m, v in zip(enter, eqn.invars, strict=True)]
        return (_loop_map(inner[0], [*enter[: nc + nk], *sliced[nc + nk :]], nc, nk),)
    return (dependence_map(inner[0], enter),)


def _sliced(of: Dependence, v: Any) -> Dependence:
    """Return the dependence that a scanned input `v` has inside the scan, where it is one slice.

    An input that depends on exactly one parameter counts as that parameter, with one more leading
    axis that the surrounding scans iterate over. So each iteration gets its own slice.
    """
    one = len(of.weights) == 1 and bool(v.aval.shape)
    return dataclasses.replace(of, weights=frozenset((w, n + one) for w, n in of.weights))


def _loop_map(prog: Program, inputs: list[Dependence], consts: int, carries: int) -> DependenceMap:
    """Return the map of a loop's body, where a carry depends on all that any iteration gives it.

    The inputs of the body are constants, carries and scanned slices, in this order; `consts` and
    `carries` are their numbers. What the returned carries depend on is merged into what the read
    carries depend on, and the map is computed again until this changes nothing.
    """
    while True:
        result = dependence_map(prog, inputs)
        carried = slice(consts, consts + carries)
        merged = [
            Dependence(m.weights | result.of(v).weights, m.batch or result.of(v).batch)
            for m, v in zip(inputs[carried], result.program.outputs, strict=False)
        ]
        if merged == inputs[carried]:
            return result
        inputs = [*inputs[:consts], *merged, *inputs[consts + carries :]]
