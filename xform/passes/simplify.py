"""Algebraic simplifications that are exact for every value, including NaN, infinities and -0.0.

For example, `x + -0.0` is replaced by `x`, but `x + 0.0` is not, because -0.0 + 0.0 is 0.0. A sum
over no axes and a complex product by one are kept for similar reasons. A value is only replaced by
a value of the same type, including weak types. The exception is subnormal numbers: some backends
flush them to zero in arithmetic, but not in copies.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
from jax import lax

from xform._jax import JaxprEqn, Literal, Primitive
from xform.passes.base import Pass
from xform.passes.builder import Builder
from xform.passes.erased import known_number
from xform.program.ir import Atom, Program, trace
from xform.program.source import name_stack, source

Producers = Mapping[Any, JaxprEqn]


@dataclasses.dataclass(frozen=True)
class Replacement:
    """A simpler computation of a value: the function `f` of the values `of`."""

    f: Callable[..., Any]
    of: tuple[Atom, ...]


Rule = Callable[[JaxprEqn, Producers], Atom | Replacement | None]


@dataclasses.dataclass(frozen=True)
class Simplify(Pass):
    """Algebraic simplification: replace values by simpler ones that are exactly equal.

    It removes operations with a neutral element, operations without an effect, and pairs of
    operations that undo each other (negations, conversions, transpositions, reshapes). It also
    combines two operations in a row into one.

    >>> from xform import passes
    >>> f = passes.Simplify()(lambda x: -(-x) * 1.0 + x.T.T)
    >>> [e.primitive.name for e in jax.make_jaxpr(f)(jnp.ones((2, 3))).eqns]
    ['neg', 'transpose', 'add']
    >>> g = passes.Pipeline([passes.Simplify(), passes.Dce()])(f)
    >>> [e.primitive.name for e in jax.make_jaxpr(g)(jnp.ones((2, 3))).eqns]
    ['add']
    """

    name: ClassVar[str] = "simplify"

    def rewrite(self, prog: Program) -> Program:
        build = Builder(prog)
        for eqn in map(build.renamed, prog.equations):
            rule = _RULES.get(eqn.primitive)
            simpler = rule(eqn, build.producer) if rule is not None else None
            if isinstance(simpler, Replacement):
                body = _traced(eqn, simpler)
                if body.out_avals == [eqn.outvars[0].aval]:
                    build.alias(eqn.outvars, build.splice(body, simpler.of))
                    continue
            elif simpler is not None and simpler.aval == eqn.outvars[0].aval:
                build.alias(eqn.outvars, [simpler])
                continue
            build.add(eqn)
        return build.program()


def _traced(eqn: JaxprEqn, simpler: Replacement) -> Program:
    """Return the replacement of an equation as a program from the values that it reads."""

    def run(*xs: Any) -> list[Any]:
        with source(eqn, name_stack()), eqn.ctx.manager:
            return [simpler.f(*xs)]

    return trace(run, *[v.aval for v in simpler.of])


def _type(atom: Atom) -> Any:
    return atom.aval


def _before(atom: Atom, by: Producers, *of: Primitive) -> JaxprEqn | None:
    """The equation that makes a value, if it has one of these primitives; else None."""
    eqn = None if isinstance(atom, Literal) else by.get(atom)
    return eqn if eqn is not None and eqn.primitive in of else None


def _is(atom: Atom, by: Producers, value: float) -> bool:
    """Whether all elements of a value are known to be this real number. 0.0 and -0.0 differ."""
    x = known_number(atom, by)
    return x is not None and x == value and math.copysign(1, x) == math.copysign(1, value)


def _neutral(value: float | None, right: bool = False) -> Rule:
    """Simplify an operation with its neutral element.

    Args:
      value: the neutral element; None: the neutral zero for sums and differences.
      right: only the right operand may be the neutral element.
    """

    def rule(eqn: JaxprEqn, by: Producers) -> Atom | None:
        x, y = eqn.invars
        neutral = value
        if neutral is None:
            # In floating point the neutral element of a sum is -0.0, and of a difference 0.0.
            integral = np.issubdtype(_type(eqn.outvars[0]).dtype, np.integer)
            neutral = 0.0 if integral or right else -0.0
        if _is(y, by, neutral):
            return x
        return y if not right and _is(x, by, neutral) else None

    return rule


def _twice(eqn: JaxprEqn, by: Producers) -> Atom | None:
    """Simplify an operation that undoes itself when it is applied twice."""
    before = _before(eqn.invars[0], by, eqn.primitive)
    same = before is not None and _params(before) == _params(eqn)
    return before.invars[0] if before is not None and same else None


def _once(eqn: JaxprEqn, by: Producers) -> Atom | None:
    """Simplify an operation that changes nothing when it is applied again."""
    before = _before(eqn.invars[0], by, eqn.primitive)
    return eqn.invars[0] if before is not None and _params(before) == _params(eqn) else None


def _params(eqn: JaxprEqn) -> Any:
    return {k: v for k, v in eqn.params.items() if k != "sharding"}


def _abs(eqn: JaxprEqn, by: Producers) -> Atom | Replacement | None:
    before = _before(eqn.invars[0], by, lax.neg_p)
    return _once(eqn, by) if before is None else Replacement(lax.abs, (before.invars[0],))


def _same(eqn: JaxprEqn, by: Producers) -> Atom | None:
    """Simplify max, min, and, or: with equal operands, or a neutral boolean operand."""
    x, y = eqn.invars
    if x is y:
        return x
    if _type(eqn.outvars[0]).dtype != np.dtype(bool) or eqn.primitive not in (lax.and_p, lax.or_p):
        return None
    neutral = float(eqn.primitive is lax.and_p)
    return x if _is(y, by, neutral) else y if _is(x, by, neutral) else None


def _select(eqn: JaxprEqn, by: Producers) -> Atom | None:
    """Simplify a selection if all cases are equal, or if the selector is a known number."""
    which, *cases = eqn.invars
    if all(c is cases[0] for c in cases):
        return cases[0]
    for i, case in enumerate(cases):
        if _is(which, by, float(i)):
            return case
    return None


def _unless(changes: Callable[[JaxprEqn], bool]) -> Rule:
    """Simplify an operation to its operand, unless `changes` says that it changes something."""
    return lambda eqn, by: None if changes(eqn) else eqn.invars[0]


def _power(eqn: JaxprEqn, by: Producers) -> Atom | None:
    """Simplify x ** 1 to x."""
    return eqn.invars[0] if eqn.params["y"] == 1 else None


def _convert(eqn: JaxprEqn, by: Producers) -> Atom | Replacement | None:
    (x,), new = eqn.invars, _type(eqn.outvars[0]).dtype
    if eqn.params.get("sharding") is not None or isinstance(x, Literal):
        return None
    if _type(x).dtype == new:
        return x
    before = _before(x, by, lax.convert_element_type_p)
    if before is None or before.params.get("sharding") is not None:
        return None
    (first,) = before.invars
    if isinstance(first, Literal) or not _holds(_type(first).dtype, _type(x).dtype):
        return None
    if _type(first).dtype == new:
        return first
    kinds = {d.kind if isinstance(d, np.dtype) else "" for d in (_type(x).dtype, new)}
    alike = kinds == {_kind(_type(first).dtype)} and _kind(_type(first).dtype) in ("f", "i")
    return Replacement(lambda x: lax.convert_element_type(x, new), (first,)) if alike else None


def _kind(dtype: Any) -> str:
    return dtype.kind if isinstance(dtype, np.dtype) else ""


# For each floating-point type: the bits of the fraction, and the largest exponent.
_FLOATS = {"bfloat16": (7, 127), "float16": (10, 15), "float32": (23, 127), "float64": (52, 1023)}


def _holds(small: Any, large: Any) -> bool:
    """Whether every value of dtype `small` is a value of dtype `large`."""
    if not (isinstance(small, np.dtype) and isinstance(large, np.dtype)):
        return False
    if small.name in _FLOATS:
        low, high = _FLOATS[small.name], _FLOATS.get(large.name, (0, 0))
        return all(a <= b for a, b in zip(low, high, strict=True))
    if small.kind == "b":
        return large.kind in "iu" or large.name in _FLOATS
    if small.kind not in "iu":
        return False
    bits = 8 * small.itemsize - (small.kind == "i")
    if large.name in _FLOATS:
        return bits <= _FLOATS[large.name][0] + 1 and bits <= _FLOATS[large.name][1]
    if large.kind not in "iu" or (small.kind == "i" and large.kind == "u"):
        return False
    return bits <= 8 * large.itemsize - (large.kind == "i")


def _transpose(eqn: JaxprEqn, by: Producers) -> Atom | Replacement | None:
    order, x = eqn.params["permutation"], eqn.invars[0]
    if tuple(order) == tuple(range(len(order))):
        return x
    before = _before(x, by, lax.transpose_p)
    if before is None:
        return None
    both = [before.params["permutation"][i] for i in order]
    if both == sorted(both):
        return before.invars[0]
    return Replacement(lambda x: lax.transpose(x, both), (before.invars[0],))


def _bitcast(eqn: JaxprEqn, by: Producers) -> Atom | None:
    """Simplify two bitcasts in a row that return to the original type."""
    before = _before(eqn.invars[0], by, lax.bitcast_convert_type_p)
    return None if before is None else before.invars[0]


def _concatenate(eqn: JaxprEqn, by: Producers) -> Atom | None:
    """Simplify a concatenation of one operand, or of all parts of a split."""
    parts = list(eqn.invars)
    if len(parts) == 1:
        return parts[0]
    split = _before(parts[0], by, lax.split_p)
    same_axis = split is not None and split.params["axis"] == eqn.params["dimension"]
    if split is None or not same_axis or len(parts) != len(split.outvars):
        return None
    return split.invars[0] if all(map(operator.is_, parts, split.outvars)) else None


_SHAPES = (lax.reshape_p, lax.squeeze_p, lax.broadcast_in_dim_p)


def _reshape(eqn: JaxprEqn, by: Producers) -> Atom | Replacement | None:
    """Simplify a reshape to the same shape, or two reshapes in a row."""
    if not _reshapes(eqn):
        return None
    x, shape = eqn.invars[0], _type(eqn.outvars[0]).shape
    if _type(x).shape == shape:
        return x
    before = _before(x, by, *_SHAPES)
    if before is None or not _reshapes(before):
        return None
    (first,) = before.invars
    if _type(first).shape == shape:
        return first
    if eqn.primitive is before.primitive is lax.reshape_p:
        return Replacement(lambda x: lax.reshape(x, shape), (first,))
    return None


def _reshapes(eqn: JaxprEqn) -> bool:
    """Whether an equation has one input and only changes its shape, not the order of elements."""
    params, primitive = eqn.params, eqn.primitive
    if len(eqn.invars) != 1 or params.get("sharding") is not None:
        return False
    if primitive is lax.reshape_p:
        return params["dimensions"] is None
    if primitive is not lax.broadcast_in_dim_p:
        return True
    (x,), dims = eqn.invars, params["broadcast_dimensions"]
    return list(dims) == sorted(dims) and _size(x) == _size(eqn.outvars[0]) > 0


def _size(atom: Atom) -> int:
    return math.prod(_type(atom).shape)


def _broadcast(eqn: JaxprEqn, by: Producers) -> Atom | Replacement | None:
    simpler = _reshape(eqn, by)
    before = _before(eqn.invars[0], by, lax.broadcast_in_dim_p)
    if simpler is not None or before is None or len(eqn.invars) + len(before.invars) > 2:
        return simpler
    if any(e.params.get("sharding") is not None for e in (eqn, before)):
        return None
    first, dims = before.params["broadcast_dimensions"], eqn.params["broadcast_dimensions"]
    shape, both = eqn.params["shape"], [dims[i] for i in first]
    return Replacement(lambda x: lax.broadcast_in_dim(x, shape, both), (before.invars[0],))


def _slices(eqn: JaxprEqn) -> bool:
    return _type(eqn.invars[0]).shape != _type(eqn.outvars[0]).shape


def _part(which: int) -> Rule:
    """Simplify the real (0) or imaginary (1) part of `complex(a, b)` to `a` or `b`."""

    def rule(eqn: JaxprEqn, by: Producers) -> Atom | None:
        before = _before(eqn.invars[0], by, lax.complex_p)
        return None if before is None else before.invars[which]

    return rule


_RULES: dict[Primitive, Rule] = {
    lax.mul_p: _neutral(1.0),
    lax.div_p: _neutral(1.0, right=True),
    lax.add_p: _neutral(None),
    lax.sub_p: _neutral(None, right=True),
    lax.neg_p: _twice,
    lax.not_p: _twice,
    lax.rev_p: _twice,
    lax.abs_p: _abs,
    **dict.fromkeys((lax.floor_p, lax.ceil_p, lax.round_p), _once),
    **dict.fromkeys((lax.max_p, lax.min_p, lax.and_p, lax.or_p), _same),
    lax.select_n_p: _select,
    lax.integer_pow_p: _power,
    lax.real_p: _part(0),
    lax.imag_p: _part(1),
    lax.convert_element_type_p: _convert,
    lax.transpose_p: _transpose,
    lax.reshape_p: _reshape,
    lax.squeeze_p: _reshape,
    lax.broadcast_in_dim_p: _broadcast,
    **dict.fromkeys((lax.slice_p, lax.dynamic_slice_p), _unless(_slices)),
    lax.pad_p: _unless(lambda eqn: any(map(any, eqn.params["padding_config"]))),
    lax.concatenate_p: _concatenate,
    lax.bitcast_convert_type_p: _bitcast,
    **dict.fromkeys(
        (lax.reduce_max_p, lax.reduce_min_p, lax.reduce_and_p, lax.reduce_or_p),
        _unless(lambda eqn: bool(eqn.params["axes"])),
    ),
}
