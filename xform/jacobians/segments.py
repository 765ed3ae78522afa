"""Where a program is one value wide: its chain of segments.

A value that every path from the active inputs to the wanted outputs crosses cuts the program in
two: the Jacobian is that of what is after it times that of what is before it. In the order of a
program such a value is the only active one that crosses from one equation to the next.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from xform._jax import Var
from xform.cost import size
from xform.interpret.activity import path
from xform.ir import Atom, Mask, Program
from xform.meshes import explicit
from xform.planner.costs.recompute import fusible

# Segments of a chain at most: of more cuts, those of the smallest values are taken.
MOST = 128


@dataclasses.dataclass(frozen=True, eq=False)
class Segment:
    """Consecutive equations between two cuts.

    Attributes:
      program: its inputs are the active ones, then all else that it reads; its outputs the wanted
        ones, then all else that is read after it.
      active: the inputs that are differentiated, as variables of the whole program.
      held: its other inputs.
      wanted: the outputs whose derivative is asked for.
      others: its other outputs.
    """

    program: Program
    active: tuple[Var, ...]
    held: tuple[Var, ...]
    wanted: tuple[Atom, ...]
    others: tuple[Atom, ...]

    @property
    def columns(self) -> int:
        """Elements of the active inputs."""
        return sum(map(size, self.active))

    @property
    def rows(self) -> int:
        """Elements of the wanted outputs."""
        return sum(map(size, self.wanted))


@dataclasses.dataclass(frozen=True, eq=False)
class Chain:
    """A program, cut where it is one value wide.

    Attributes:
      program: the program.
      active, wanted: its inputs that are differentiated, its outputs whose derivative is asked for.
      cuts: for each cut, the position of the equation after it, and the value.
    """

    program: Program
    active: Mask
    wanted: Mask
    cuts: tuple[tuple[int, Var], ...]

    def __len__(self) -> int:
        return len(self.cuts) + 1

    def segment(self, first: int, last: int) -> Segment:
        """The segments from `first` to `last`, as one."""
        prog = self.program
        begin = self.cuts[first - 1][0] if first else 0
        end = self.cuts[last][0] if last < len(self.cuts) else len(prog.equations)
        equations = prog.equations[begin:end]
        if first:
            active: Sequence[Any] = (self.cuts[first - 1][1],)
        else:
            active = [v for v, on in zip(prog.inputs, self.active, strict=True) if on]
        if last < len(self.cuts):
            wanted: Sequence[Any] = (self.cuts[last][1],)
            after = {v for e in prog.equations[end:] for v in e.invars if isinstance(v, Var)}
            after.update(v for v in prog.outputs if isinstance(v, Var))
            made = (v for e in equations for v in e.outvars)
            others: Sequence[Any] = [v for v in made if v in after and v not in wanted]
        else:
            ends = list(zip(prog.outputs, self.wanted, strict=True))
            wanted = [v for v, on in ends if on]
            others = [v for v, on in ends if not on]
        own = {v for e in equations for v in e.outvars}.union(active, dict(prog.consts))
        read = dict.fromkeys(v for e in equations for v in e.invars if isinstance(v, Var))
        read.update(dict.fromkeys(v for v in (*wanted, *others) if isinstance(v, Var)))
        held = tuple(v for v in read if v not in own)
        inner = Program((*active, *held), prog.consts, equations, (*wanted, *others))
        return Segment(inner, tuple(active), held, tuple(wanted), tuple(others))


def chain(prog: Program, active: Mask, wanted: Mask, holomorphic: bool = False) -> Chain:
    """The chain of a program. Linear in equations.

    Of neighbouring cuts between equations that a compiler fuses, of values of one size, one is
    kept. Of a function of real numbers complex values are no cuts, as they have two derivatives.
    """
    places = _places(prog, active, wanted, holomorphic)
    ends = [0, *(at for at, _ in places), len(prog.equations)]
    steps = path(prog, active, wanted).steps
    light = [all(fusible(prog.equations[i]) for i in range(a, b) if i in steps)
             for a, b in itertools.pairwise(ends)]  # fmt: skip
    cuts: list[tuple[int, Var]] = []
    for i, place in enumerate(places):
        near = {size(v) for _, v in (cuts[-1:] + places[i + 1 : i + 2])}
        if not (light[i] and light[i + 1] and size(place[1]) in near):
            cuts.append(place)
    if len(cuts) >= MOST:
        narrow = sorted(range(len(cuts)), key=lambda i: size(cuts[i][1]))[: MOST - 1]
        cuts = [cuts[i] for i in sorted(narrow)]
    return Chain(prog, active, wanted, tuple(cuts))


def _places(prog: Program, active: Mask, wanted: Mask, holomorphic: bool) -> list[tuple[int, Var]]:
    """Every value that all paths cross, with the position of the equation after it."""
    way = path(prog, active, wanted)
    last: dict[Any, int] = {}
    for i, (ins, _) in sorted(way.steps.items()):
        last.update((v, i) for v, on in zip(prog.equations[i].invars, ins, strict=True) if on)
    for v, on in zip(prog.outputs, wanted, strict=True):
        if on and isinstance(v, Var):
            last[v] = len(prog.equations)
    ended: dict[int, list[Var]] = {}
    for v, i in last.items():
        ended.setdefault(i, []).append(v)
    crossing = {v for v, on in zip(prog.inputs, way.inputs, strict=True) if on}
    places: list[tuple[int, Var]] = []
    *steps, _ = sorted(way.steps) or [0]  # after the last one there is nothing
    for i in steps:
        eqn = prog.equations[i]
        crossing.update(v for v, on in zip(eqn.outvars, way.steps[i][1], strict=True) if on)
        crossing.difference_update(ended.get(i, ()))
        if len(crossing) == 1:
            (v,) = crossing
            if v in eqn.outvars and _one_derivative(v.aval, holomorphic):
                places.append((i + 1, v))
    return places


def _one_derivative(aval: Any, holomorphic: bool) -> bool:
    """Whether a value's derivative is a matrix of its own dtype, that may be multiplied freely."""
    kind = np.complexfloating if holomorphic else np.floating
    plain = isinstance(aval.dtype, np.dtype) and jnp.issubdtype(aval.dtype, kind)
    return plain and not explicit(aval)
