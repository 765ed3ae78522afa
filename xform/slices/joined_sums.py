"""Let a region join several of its sums into one, such as a loss that is a sum of two losses.

A region with one sum as its only output is a loss: its value and gradient need one loop. A region
with two sums is not, although the program may only add them. A linear function of sums over the
slices is again a sum over the slices, so it may run in each slice.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from xform._jax import JaxprEqn, Var, has_effects
from xform.program.dimensions import shape
from xform.program.ir import Program
from xform.registry.table import traits
from xform.slices.resize import sum_dtype
from xform.slices.slicing import Slicing
from xform.slices.sums import is_linear


def joined_sums(prog: Program, members: Mapping[int, Slicing]) -> dict[int, Slicing]:
    """Return the equations that join sums with one element, and how each runs in slices.

    They are linear, and read nothing else that depends on the region. The result is empty if as
    many sums would leave the region with these equations as without them.

    Args:
      prog: a program whose calls are opened.
      members: the equations of the region, by position, and how each runs.
    """
    sums = {y for i, slicing in members.items() for y in _sums(prog.equations[i], slicing)}
    # For each linear function of sums with one element, the equations that compute it.
    terms: dict[Var, frozenset[int]] = {y: frozenset() for y in sums if _is_wide_number(y)}
    if len(terms) < 2:
        return {}
    late = {y for i in members for y in prog.equations[i].outvars}
    found: frozenset[int] = frozenset()
    for i, eqn in enumerate(prog.equations):
        if i in members:
            continue
        reads = {v for v in eqn.invars if isinstance(v, Var)}
        known = terms.keys() & reads
        if known and _is_term(eqn, terms.keys(), late):
            computed = frozenset({i}).union(*(terms[v] for v in known))
            terms[eqn.outvars[0]] = computed
            if len(known) > 1:
                found |= computed
        if has_effects(eqn) or not late.isdisjoint(reads):
            late.update(eqn.outvars)
    joins = {i: _in_each_slice(prog.equations[i]) for i in sorted(found)}
    count = lambda inside: len(_leaving(prog, {*members, *inside}, terms.keys()))
    return joins if count(joins) < count(()) else {}


def _sums(eqn: JaxprEqn, slicing: Slicing) -> tuple[Var, ...]:
    """Return the results of an equation of a region that are sums over the slices."""
    if not slicing.summed or traits(eqn.primitive).adds:
        return ()
    return tuple(y for y, axis in zip(eqn.outvars, slicing.results, strict=True) if axis is None)


def _is_wide_number(v: Var) -> bool:
    """Return whether a value is one number, and not narrower than its sums over slices."""
    aval: Any = v.aval
    return math.prod(shape(v)) == 1 and sum_dtype(aval.dtype) == aval.dtype


def _is_term(eqn: JaxprEqn, terms: Collection[Var], late: Collection[Var]) -> bool:
    """Return whether an equation makes one number that is linear in its operands among `terms`.

    The other operands must exist before the loop starts, so they are not among `late`.
    """
    if has_effects(eqn) or not all(map(_is_wide_number, eqn.outvars)) or len(eqn.outvars) > 1:
        return False
    are_terms = [isinstance(v, Var) and v in terms for v in eqn.invars]
    others = [v for v, term in zip(eqn.invars, are_terms, strict=True) if not term]
    return is_linear(eqn, are_terms) and not any(isinstance(v, Var) and v in late for v in others)


def _leaving(prog: Program, inside: Collection[int], values: Collection[Var]) -> set[Var]:
    """Return which of some values the equations `inside` make, and others or the caller read."""
    made = {y for i in inside for y in prog.equations[i].outvars if y in values}
    read = {v for v in prog.outputs if isinstance(v, Var)}
    for i, eqn in enumerate(prog.equations):
        if i not in inside:
            read.update(v for v in eqn.invars if isinstance(v, Var))
    return made & read


def _in_each_slice(eqn: JaxprEqn) -> Slicing:
    """Return how a linear function of sums runs: on the sums of each slice."""
    return Slicing((None,) * len(eqn.invars), (None,) * len(eqn.outvars), summed=True)
