"""Groups of equations in a loss: layers, sums of their results, loops, and other operations.

`DependenceMap` holds, for one program, what each value depends on and the groups of its equations.
`dependence` computes it. Words:

- a *weight* is a value that depends on parameters and not on the batch;
- a *data value* depends on parameters and on the batch, like the result of a layer;
- a *dependence* says what one value depends on, and which group computes the value;
- a *group* consists of equations that compute data values: a layer with its activation, for
  example. Equations that compute no data value are in no group.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from functools import cached_property
from typing import Any

from xform._jax import JaxprEqn, Literal, Var
from xform.program.arithmetic import differentiable
from xform.program.ir import Atom, Program

# Index of a parameter, and the number of its leading axes that the surrounding scans iterate over.
Weight = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Dependence:
    """The parameters and the batch that one value depends on, and its group.

    Attributes:
      weights: the parameters that the value depends on.
      batch: whether the value depends on the batch.
      group: index of the group that computes the value; -1 for an input of the program and for a
        value that is no data value.
    """

    weights: frozenset[Weight] = frozenset()
    batch: bool = False
    group: int = -1

    @property
    def is_weight(self) -> bool:
        """Whether the value depends on parameters and not on the batch."""
        return bool(self.weights) and not self.batch

    @property
    def is_data(self) -> bool:
        """Whether the value is a data value: it depends on parameters and on the batch."""
        return bool(self.weights) and self.batch


NO_DEPENDENCE = Dependence()


@dataclasses.dataclass(eq=False)
class Group:
    """A group of equations that compute data values, such as a layer with its activation.

    Attributes:
      kind: the kind of the first equation. "layer": a product of a weight with a value that depends
        on the batch, or a look-up. "nested": a loop, a branch or a remat region. "combination": an
        equation that reads data values of several groups, or a data value that is an input of the
        program, such as the carry of a loop. "other": an equation that reads no data value.
      equations: positions of the group's equations in the program.
      values: results of these equations.
    """

    kind: str
    equations: list[int] = dataclasses.field(default_factory=list[int])
    values: list[Var] = dataclasses.field(default_factory=list[Var])


@dataclasses.dataclass(eq=False)
class DependenceMap:
    """The dependence of all values of a program, and the program's groups.

    Attributes:
      program: the program, with its calls inlined.
      by_value: the dependence of each value.
      results: number of leading outputs that count as results; None means all outputs. The other
        outputs are auxiliary, such as metrics. An auxiliary output does not count as the result of
        a layer, unless another group reads it.
      groups: the groups of the program, in program order.
      nested: for each loop, branch and remat region that computes data values, by `id` of its
        equation: the dependence maps of the programs inside it.
    """

    program: Program
    by_value: dict[Var, Dependence]
    results: int | None = None
    groups: list[Group] = dataclasses.field(default_factory=list[Group])
    nested: dict[int, tuple[DependenceMap, ...]] = dataclasses.field(default_factory=lambda: {})

    def of(self, atom: Atom) -> Dependence:
        """Return the dependence of a value. A literal depends on nothing and has no group."""
        if isinstance(atom, Literal):
            return NO_DEPENDENCE
        return self.by_value.get(atom, NO_DEPENDENCE)

    def data_operands(self, eqn: JaxprEqn) -> list[Var]:
        """Return the data values that an equation reads.

        The first layer reads no data value. For such an equation, the operands that depend on the
        batch are returned.
        """
        read = [v for v in eqn.invars if isinstance(v, Var) and self.of(v).batch]
        return [v for v in read if self.of(v).is_data] or read

    def weights(self, index: int) -> Iterable[Weight]:
        """Yield the parameters behind the weights that the equation at position `index` reads."""
        read = map(self.of, self.program.equations[index].invars)
        return (weight for dep in read if dep.is_weight for weight in dep.weights)

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
    def group_outputs(self) -> frozenset[Var]:
        """The values that are results of the program, or that other groups read."""
        out = set(self.outputs)
        for number, group in enumerate(self.groups):
            own = set(group.equations)
            for v in group.values:
                if self.of(v).group == number and set(self.readers.get(v, ())) - own:
                    out.add(v)
        return frozenset(out)

    def has_later_layer(self, group: Group) -> bool:
        """Return whether a layer, a loop, a branch or a remat region later depends on a group."""
        return self.has_later_layers[self.groups.index(group)]

    @cached_property
    def has_later_layers(self) -> list[bool]:
        """For each group, whether a layer, loop, branch or remat region later depends on it."""
        readers: list[set[int]] = [set() for _ in self.groups]
        for number, group in enumerate(self.groups):
            first = self.program.equations[group.equations[0]]
            for source in {self.of(v).group for v in first.invars} - {-1, number}:
                readers[source].add(number)
        result = [False] * len(self.groups)
        for i in reversed(range(len(readers))):
            result[i] = any(
                self.groups[j].kind in ("layer", "nested") or result[j] for j in readers[i]
            )
        return result


def has_derivative(v: Any) -> bool:
    """Return whether a value has a derivative, as floating-point values do."""
    return differentiable(v.aval)
