"""Cut a program into a chain of segments.

A cut is a value that every path from the active inputs to the wanted outputs goes through. The
Jacobian is then a product: the Jacobian of the part after the cut times the Jacobian of the part
before it. A value is a cut if, at some point of the program, it is the only active value that is
still read later.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from xform._jax import Var
from xform._jax.meshes import explicit
from xform.interpret.activity import path
from xform.interpret.cost import size
from xform.planner.costs.recompute import fusible
from xform.program.ir import Atom, Mask, Program

# Maximum number of segments. If there are more cuts, those with the fewest elements are used.
MOST = 128


@dataclasses.dataclass(frozen=True, eq=False)
class Segment:
    """The equations between two cuts.

    Attributes:
      program: the segment as a program. Inputs: `active`, then `inactive`. Outputs: `wanted`, then
        `others`.
      active: the inputs that are differentiated, as variables of the full program.
      inactive: all other values that the segment reads.
      wanted: the outputs that are differentiated.
      others: all other values that later equations read.
    """

    program: Program
    active: tuple[Var, ...]
    inactive: tuple[Var, ...]
    wanted: tuple[Atom, ...]
    others: tuple[Atom, ...]

    @property
    def columns(self) -> int:
        """The number of elements of the active inputs."""
        return sum(map(size, self.active))

    @property
    def rows(self) -> int:
        """The number of elements of the wanted outputs."""
        return sum(map(size, self.wanted))


@dataclasses.dataclass(frozen=True, eq=False)
class CutProgram:
    """A program and its cuts.

    Attributes:
      program: the program.
      active, wanted: which inputs and which outputs are differentiated.
      cuts: for each cut, the position of the next equation, and the value.
    """

    program: Program
    active: Mask
    wanted: Mask
    cuts: tuple[tuple[int, Var], ...]

    def __len__(self) -> int:
        return len(self.cuts) + 1

    def segment(self, first: int, last: int) -> Segment:
        """The segments from `first` to `last`, merged into one."""
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
            defined = (v for e in equations for v in e.outvars)
            others: Sequence[Any] = [v for v in defined if v in after and v not in wanted]
        else:
            ends = list(zip(prog.outputs, self.wanted, strict=True))
            wanted = [v for v, on in ends if on]
            others = [v for v, on in ends if not on]
        own = {v for e in equations for v in e.outvars}.union(active, dict(prog.consts))
        read = dict.fromkeys(v for e in equations for v in e.invars if isinstance(v, Var))
        read.update(dict.fromkeys(v for v in (*wanted, *others) if isinstance(v, Var)))
        inactive = tuple(v for v in read if v not in own)
        inner = Program((*active, *inactive), prog.consts, equations, (*wanted, *others))
        return Segment(inner, tuple(active), inactive, tuple(wanted), tuple(others))


def cut_program(prog: Program, active: Mask, wanted: Mask, holomorphic: bool = False) -> CutProgram:
    """Cut a program into segments. Cost: linear in the number of equations.

    Among neighbouring cuts of the same size, with only fusible equations between them, one is kept.
    In a function of real numbers, complex values are not cuts, as they have two derivatives.
    """
    candidates = _candidates(prog, active, wanted, holomorphic)
    ends = [0, *(at for at, _ in candidates), len(prog.equations)]
    steps = path(prog, active, wanted).steps
    cheap = [all(fusible(prog.equations[i]) for i in range(a, b) if i in steps)
             for a, b in itertools.pairwise(ends)]  # fmt: skip
    cuts: list[tuple[int, Var]] = []
    for i, cut in enumerate(candidates):
        near = {size(v) for _, v in (cuts[-1:] + candidates[i + 1 : i + 2])}
        if not (cheap[i] and cheap[i + 1] and size(cut[1]) in near):
            cuts.append(cut)
    if len(cuts) >= MOST:
        narrow = sorted(range(len(cuts)), key=lambda i: size(cuts[i][1]))[: MOST - 1]
        cuts = [cuts[i] for i in sorted(narrow)]
    return CutProgram(prog, active, wanted, tuple(cuts))


def _candidates(prog: Program, active: Mask, wanted: Mask, holomorphic: bool
                ) -> list[tuple[int, Var]]:  # fmt: skip
    """Every value that all paths go through, with the position of the next equation."""
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
    found: list[tuple[int, Var]] = []
    *steps, _ = sorted(way.steps) or [0]  # no cut after the last equation
    for i in steps:
        eqn = prog.equations[i]
        crossing.update(v for v, on in zip(eqn.outvars, way.steps[i][1], strict=True) if on)
        crossing.difference_update(ended.get(i, ()))
        if len(crossing) == 1:
            (v,) = crossing
            if v in eqn.outvars and _one_derivative(v.aval, holomorphic):
                found.append((i + 1, v))
    return found


def _one_derivative(aval: Any, holomorphic: bool) -> bool:
    """Whether a value's derivative is a plain matrix of its dtype, without explicit sharding."""
    kind = np.complexfloating if holomorphic else np.floating
    plain = isinstance(aval.dtype, np.dtype) and jnp.issubdtype(aval.dtype, kind)
    return plain and not explicit(aval)
