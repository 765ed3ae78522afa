"""Cut a program into segments, whose Jacobians form a chain of matrix products.

A value is active if it depends on a differentiated input. An output is wanted if it is
differentiated. A cut is a value that every path from the active inputs to the wanted outputs goes
through. The Jacobian is then a product: the Jacobian of the part after the cut times the Jacobian
of the part before it. A value is a cut if, at some point of the program, it is the only active
value that is still read later.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from xform._jax import JaxprEqn, Var
from xform._jax.effects import uses_named_axis
from xform._jax.meshes import has_explicit_axis
from xform.interpret.activity import path
from xform.interpret.cost import size
from xform.planner.costs.recompute import fusible
from xform.program.arrays import varying
from xform.program.ir import Atom, Mask, Program, gather

# Maximum number of segments. If there are more cuts, the cuts with the fewest elements are used.
_MAX_SEGMENTS = 128


@dataclasses.dataclass(frozen=True, eq=False)
class Segment:
    """The equations between two cuts.

    Attributes:
      program: the segment as a program. Inputs: `active`, then `inactive`. Outputs: `wanted`, then
        `other_outputs`.
      active: the inputs that are differentiated, as variables of the full program.
      inactive: all other values that the segment reads.
      wanted: the outputs that are differentiated.
      other_outputs: all other values of the segment that later equations or the caller read.
    """

    program: Program
    active: tuple[Var, ...]
    inactive: tuple[Var, ...]
    wanted: tuple[Atom, ...]
    other_outputs: tuple[Atom, ...]

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
      active, wanted: masks of the inputs and of the outputs that are differentiated.
      cuts: for each cut, the position of the next equation, and the value.
    """

    program: Program
    active: Mask
    wanted: Mask
    cuts: tuple[tuple[int, Var], ...]

    def __len__(self) -> int:
        return len(self.cuts) + 1

    def segment(self, first: int, last: int) -> Segment:
        """Return the segments from `first` to `last`, merged into one."""
        prog = self.program
        begin = self.cuts[first - 1][0] if first else 0
        end = self.cuts[last][0] if last < len(self.cuts) else len(prog.equations)
        equations = prog.equations[begin:end]
        if first:
            active: Sequence[Any] = (self.cuts[first - 1][1],)
        else:
            active = gather(prog.inputs, self.active)
        if last < len(self.cuts):
            wanted: Sequence[Any] = (self.cuts[last][1],)
            read_later = {v for e in prog.equations[end:] for v in e.invars if isinstance(v, Var)}
            read_later.update(v for v in prog.outputs if isinstance(v, Var))
            defined = (v for e in equations for v in e.outvars)
            others: Sequence[Any] = [v for v in defined if v in read_later and v not in wanted]
        else:
            wanted = gather(prog.outputs, self.wanted)
            others = gather(prog.outputs, tuple(not is_wanted for is_wanted in self.wanted))
        own = {v for e in equations for v in e.outvars}.union(active, dict(prog.consts))
        read = dict.fromkeys(v for e in equations for v in e.invars if isinstance(v, Var))
        read.update(dict.fromkeys(v for v in (*wanted, *others) if isinstance(v, Var)))
        inactive = tuple(v for v in read if v not in own)
        program = Program((*active, *inactive), prog.consts, equations, (*wanted, *others))
        return Segment(program, tuple(active), inactive, tuple(wanted), tuple(others))


def cut_into_segments(
    prog: Program, active: Mask, wanted: Mask, holomorphic: bool = False
) -> CutProgram:
    """Cut a program into segments. Cost: linear in the number of equations.

    Neighbouring cuts of the same size may have nothing but cheap elementwise operations between
    them, which XLA fuses. Then only one of these cuts is kept. In a function that is not
    holomorphic, complex values are not cuts, because they have two derivatives.

    Args:
      prog: the program.
      active: a mask of the inputs that are differentiated.
      wanted: a mask of the outputs that are differentiated.
      holomorphic: whether the program is complex-differentiable.
    """
    candidates = _candidates(prog, active, wanted, holomorphic)
    positions = [0, *(position for position, _ in candidates), len(prog.equations)]
    steps = path(prog, active, wanted).steps
    cheap = [all(fusible(prog.equations[i]) for i in range(a, b) if i in steps)
             for a, b in itertools.pairwise(positions)]  # fmt: skip
    cuts: list[tuple[int, Var]] = []
    for i, cut in enumerate(candidates):
        neighbour_sizes = {size(v) for _, v in (cuts[-1:] + candidates[i + 1 : i + 2])}
        if not (cheap[i] and cheap[i + 1] and size(cut[1]) in neighbour_sizes):
            cuts.append(cut)
    if len(cuts) >= _MAX_SEGMENTS:
        narrowest = sorted(range(len(cuts)), key=lambda i: size(cuts[i][1]))[: _MAX_SEGMENTS - 1]
        cuts = [cuts[i] for i in sorted(narrowest)]
    return CutProgram(prog, active, wanted, tuple(cuts))


def _candidates(prog: Program, active: Mask, wanted: Mask, holomorphic: bool
                ) -> list[tuple[int, Var]]:  # fmt: skip
    """Return every value that all paths go through, with the position of the next equation."""
    paths = path(prog, active, wanted)  # the equations between active inputs and wanted outputs
    last_read: dict[Any, int] = {}
    for i, (active_operands, _) in sorted(paths.steps.items()):
        last_read.update((v, i) for v in gather(prog.equations[i].invars, active_operands))
    for v in gather(prog.outputs, wanted):
        if isinstance(v, Var):
            last_read[v] = len(prog.equations)
    last_read_at: dict[int, list[Var]] = {}
    for v, i in last_read.items():
        last_read_at.setdefault(i, []).append(v)
    still_read = set(gather(prog.inputs, paths.inputs))
    candidates: list[tuple[int, Var]] = []
    *steps, _ = sorted(paths.steps) or [0]  # no cut after the last equation
    for i in steps:
        eqn = prog.equations[i]
        still_read.update(gather(eqn.outvars, paths.steps[i][1]))
        still_read.difference_update(last_read_at.get(i, ()))
        if len(still_read) == 1:
            (v,) = still_read
            if v in eqn.outvars and _has_one_derivative(v.aval, holomorphic):
                candidates.append((i + 1, v))
    return candidates


def crosses_devices(prog: Program, active: Mask, wanted: Mask) -> JaxprEqn | None:
    """Return an equation through which a derivative goes to other devices of a `shard_map`.

    It communicates, or its input is the same on all devices and its output varies. Without one, the
    result is None. Past such an equation, a tangent that is pushed and a cotangent that is pulled
    belong to different functions: of the values on one device, or of those on all devices.
    So the product of their Jacobians is no Jacobian.
    """
    for i, (ins, outs) in path(prog, active, wanted).steps.items():
        eqn = prog.equations[i]
        variables = (*gather(eqn.invars, ins), *gather(eqn.outvars, outs))
        if uses_named_axis(eqn) or len({varying(v.aval) for v in variables}) > 1:
            return eqn
    return None


def _has_one_derivative(aval: Any, holomorphic: bool) -> bool:
    """Return whether the derivative of a value is a plain matrix of the value's dtype.

    It is not if the value is complex, unless the function is holomorphic, or if the value has an
    explicit sharding.
    """
    kind = np.complexfloating if holomorphic else np.floating
    plain = isinstance(aval.dtype, np.dtype) and jnp.issubdtype(aval.dtype, kind)
    return plain and not has_explicit_axis(aval)
