"""Open calls, so that the equations in their bodies can be sliced.

A remat region is a part of a function that `jax.checkpoint` marks. `opened` opens all of them,
because a region in slices may begin or end in any of them. `closed` closes those again that a
chosen region in slices does not touch: there the author's marks stay.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from xform._jax import JaxprEqn, Literal, Var
from xform.passes.dce import live
from xform.passes.inline import inline_bodies, jitted_body, region_body
from xform.passes.structured import is_remat_region
from xform.program.ir import Atom, Program
from xform.slices.batched_indices import with_batched_indices

_KEY, _REGIONS = "opened for slices", "opened remat regions"


class _OpenedRegion(NamedTuple):
    """A remat region that was opened.

    Attributes:
      first, stop: the positions of its equations in the opened program.
      eqn: the equation that runs it, with the values that it reads there.
      outputs: the values of the opened program that are its results.
    """

    first: int
    stop: int
    eqn: JaxprEqn
    outputs: tuple[Atom, ...]


def opened(prog: Program) -> Program:
    """Return a program with its calls of jitted functions and its remat regions inlined.

    Calls with shardings stay, and functions with custom derivative rules. Equations that no output
    depends on are dropped: a region would keep whole values for them. The result is cached on the
    program.
    """
    if _KEY not in prog.cache:
        prog.cache[_KEY] = _opened(with_batched_indices(inline_bodies(prog, jitted_body)))
    return prog.cache[_KEY]


def _opened(prog: Program) -> Program:
    """Inline the remat regions of a program whose calls are inlined, with calls in them."""
    names: dict[Any, Atom] = {}
    consts = dict(prog.consts)
    parts: list[tuple[Sequence[JaxprEqn], JaxprEqn | None, tuple[Atom, ...]]] = []
    for eqn in prog.equations:
        eqn = eqn.replace(invars=_renamed(eqn.invars, names))
        if not is_remat_region(eqn):
            parts.append(([eqn], None, ()))
            continue
        inlined = inline_bodies(Program((), (), (eqn,), tuple(eqn.outvars)), _body)
        inlined = with_batched_indices(inlined)
        consts.update(inlined.consts)
        names.update(zip(eqn.outvars, inlined.outputs, strict=True))
        parts.append((inlined.equations, eqn, inlined.outputs))
    outputs = tuple(_renamed(prog.outputs, names))
    needed = {*map(id, live([e for part, *_ in parts for e in part], outputs))}
    equations: list[JaxprEqn] = []
    regions: list[_OpenedRegion] = []
    for part, region, results in parts:
        first = len(equations)
        equations += [e for e in part if id(e) in needed]
        if region is not None:
            regions.append(_OpenedRegion(first, len(equations), region, results))
    result = Program(prog.inputs, tuple(consts.items()), tuple(equations), outputs)
    result.cache[_REGIONS] = regions
    return result


def closed(prog: Program, touched: Collection[int]) -> tuple[Program, dict[int, int]]:
    """Close the remat regions of an opened program that contain none of some equations.

    Args:
      prog: a result of `opened`.
      touched: the positions of the equations.

    Returns:
      The program, and the new position of each equation that is in no closed region. A region stays
      open if one of its results is computed elsewhere, or is two results.
    """
    regions = [r for r in prog.cache.get(_REGIONS, ()) if _may_be_closed(prog, r, touched)]
    by_first = {r.first: r for r in regions}
    equations: list[JaxprEqn] = []
    positions: dict[int, int] = {}
    i = 0
    while i < len(prog.equations):
        if region := by_first.get(i):
            equations.append(region.eqn.replace(outvars=[*region.outputs]))
            i = region.stop
        else:
            positions[i] = len(equations)
            equations.append(prog.equations[i])
            i += 1
    return Program(prog.inputs, prog.consts, tuple(equations), prog.outputs), positions


def _may_be_closed(prog: Program, region: _OpenedRegion, touched: Collection[int]) -> bool:
    """Return whether a region contains no touched equation, and computes each of its results.

    Results that nothing reads may be computed nowhere. So may operands that the region does not
    need: then it stays open.
    """
    inside = range(region.first, region.stop)
    others = {v for i, eqn in enumerate(prog.equations) if i not in inside for v in eqn.outvars}
    others |= {*prog.inputs, *(v for v, _ in prog.consts)}
    outputs = {v for v in region.outputs if isinstance(v, Var) and v not in others}
    untouched = not any(i in inside for i in touched)
    has_operands = all(v in others for v in region.eqn.invars if isinstance(v, Var))
    return untouched and has_operands and len(outputs) == len(region.outputs) and len(inside) > 0


def _renamed(atoms: Sequence[Atom], names: dict[Any, Atom]) -> list[Atom]:
    """Replace the variables among `atoms` that have a new name."""
    return [v if isinstance(v, Literal) else names.get(v, v) for v in atoms]


def _body(eqn: JaxprEqn) -> Program | None:
    """Return the body of a call that is opened; None for any other equation."""
    return region_body(eqn) or jitted_body(eqn)
