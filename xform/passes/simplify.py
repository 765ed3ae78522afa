"""Algebraic simplifications that are exact for every value, including NaN, infinities and -0.0.

For example, `x + -0.0` is replaced by `x`, but `x + 0.0` is not, because -0.0 + 0.0 is 0.0. A sum
over no axes and a complex product by one are kept for similar reasons. A value is only replaced by
a value of the same type, including weak types. Subnormal numbers are the one exception: some
backends flush them to zero in arithmetic, but not in copies.

`_RULES` has a rule for each primitive that can be simplified. A rule gets an equation and the
producers, a dict from each value to the equation that makes it. It returns an *atom* (a variable or
literal) that equals the result, a `Replacement`, or None if it finds nothing simpler.
"""

from __future__ import annotations

import dataclasses
import functools
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
from xform.passes.views import VIEWS, simplest_view
from xform.program.ir import Atom, Program, context, trace
from xform.program.source import name_stack, source

Producers = Mapping[Any, JaxprEqn]


@dataclasses.dataclass(frozen=True)
class Replacement:
    """A simpler computation of a value: the function `f` of the values `inputs`."""

    f: Callable[..., Any]
    inputs: tuple[Atom, ...]


Rule = Callable[[JaxprEqn, Producers], Atom | Replacement | None]


@dataclasses.dataclass(frozen=True)
class Simplify(Pass):
    """Algebraic simplification: replace values by simpler ones that are exactly equal.

    It removes operations with a neutral element (`x * 1`), operations that change nothing (a
    reshape to the same shape), and pairs of operations that undo each other (negations,
    conversions). It also replaces chains of views, such as transpositions, reshapes and slices of
    whole axes, by fewer operations.

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
                body = _trace(eqn, simpler)
                if body.out_avals == [eqn.outvars[0].aval]:
                    build.alias(eqn.outvars, build.splice(body, simpler.inputs))
                    continue
            elif simpler is not None and simpler.aval == eqn.outvars[0].aval:
                build.alias(eqn.outvars, [simpler])
                continue
            build.add(eqn)
        return build.program()


def _trace(eqn: JaxprEqn, simpler: Replacement) -> Program:
    """Trace the replacement of an equation, as a program from its inputs."""

    def run(*xs: Any) -> list[Any]:
        with source(eqn, name_stack()), context(eqn):
            return [simpler.f(*xs)]

    return trace(run, *[v.aval for v in simpler.inputs])


def _type(atom: Atom) -> Any:
    return atom.aval


def _producer(atom: Atom, producers: Producers, *primitives: Primitive) -> JaxprEqn | None:
    """Return the equation that makes a value, if it has one of these primitives; else None."""
    eqn = None if isinstance(atom, Literal) else producers.get(atom)
    return eqn if eqn is not None and eqn.primitive in primitives else None


def _equals(atom: Atom, producers: Producers, value: float) -> bool:
    """Return whether all elements of a value are known to be this number. 0.0 and -0.0 differ."""
    x = known_number(atom, producers)
    return x is not None and x == value and math.copysign(1, x) == math.copysign(1, value)


def _neutral(value: float | None, right: bool = False) -> Rule:
    """Return a rule that simplifies an operation with its neutral element to the other operand.

    Args:
      value: the neutral element; None: zero, with the sign that makes it neutral.
      right: whether only the right operand may be the neutral element.
    """

    def rule(eqn: JaxprEqn, producers: Producers) -> Atom | None:
        x, y = eqn.invars
        neutral = value
        if neutral is None:
            # In floating point the neutral element of a sum is -0.0, and of a difference 0.0.
            integral = np.issubdtype(_type(eqn.outvars[0]).dtype, np.integer)
            neutral = 0.0 if integral or right else -0.0
        if _equals(y, producers, neutral):
            return x
        return y if not right and _equals(x, producers, neutral) else None

    return rule


def _involution(eqn: JaxprEqn, producers: Producers) -> Atom | None:
    """Simplify an operation that is applied twice and undoes itself, such as -(-x), to x."""
    inner = _producer(eqn.invars[0], producers, eqn.primitive)
    same = inner is not None and _params(inner) == _params(eqn)
    return inner.invars[0] if inner is not None and same else None


def _idempotent(eqn: JaxprEqn, producers: Producers) -> Atom | None:
    """Simplify an operation that is applied twice and changes nothing the second time."""
    inner = _producer(eqn.invars[0], producers, eqn.primitive)
    return eqn.invars[0] if inner is not None and _params(inner) == _params(eqn) else None


def _params(eqn: JaxprEqn) -> Any:
    return {k: v for k, v in eqn.params.items() if k != "sharding"}


def _abs(eqn: JaxprEqn, producers: Producers) -> Atom | Replacement | None:
    """Simplify abs(-x) to abs(x), and abs(abs(x)) to abs(x)."""
    inner = _producer(eqn.invars[0], producers, lax.neg_p)
    return (
        _idempotent(eqn, producers) if inner is None else Replacement(lax.abs, (inner.invars[0],))
    )


def _extreme_or_logical(eqn: JaxprEqn, producers: Producers) -> Atom | None:
    """Simplify `max`, `min`, `and` and `or` of two equal operands to that operand.

    Also simplify a boolean `and` with True, or a boolean `or` with False, to the other operand.
    """
    x, y = eqn.invars
    if x is y:
        return x
    if _type(eqn.outvars[0]).dtype != np.dtype(bool) or eqn.primitive not in (lax.and_p, lax.or_p):
        return None
    neutral = float(eqn.primitive is lax.and_p)
    return x if _equals(y, producers, neutral) else y if _equals(x, producers, neutral) else None


def _select(eqn: JaxprEqn, producers: Producers) -> Atom | None:
    """Simplify a selection if all cases are equal, or if the selector is a known number."""
    selector, *cases = eqn.invars
    if all(c is cases[0] for c in cases):
        return cases[0]
    for i, case in enumerate(cases):
        if _equals(selector, producers, float(i)):
            return case
    return None


def _operand_unless(changes: Callable[[JaxprEqn], bool]) -> Rule:
    """Return a rule that simplifies an equation to its operand, unless `changes(eqn)` is True."""
    return lambda eqn, producers: None if changes(eqn) else eqn.invars[0]


def _power(eqn: JaxprEqn, producers: Producers) -> Atom | None:
    """Simplify x ** 1 to x."""
    return eqn.invars[0] if eqn.params["y"] == 1 else None


def _convert(eqn: JaxprEqn, producers: Producers) -> Atom | Replacement | None:
    """Simplify a conversion to the same dtype, and two conversions in a row.

    Two conversions are simplified only if the first one is exact. They become no conversion if the
    dtype is the original one again. They become one conversion if all three dtypes are of one kind,
    floating-point or signed integer.
    """
    (x,), new = eqn.invars, _type(eqn.outvars[0]).dtype
    if eqn.params.get("sharding") is not None or isinstance(x, Literal):
        return None
    if _type(x).dtype == new:
        return x
    inner = _producer(x, producers, lax.convert_element_type_p)
    if inner is None or inner.params.get("sharding") is not None:
        return None
    (first,) = inner.invars
    if isinstance(first, Literal) or not _represents(_type(x).dtype, _type(first).dtype):
        return None
    if _type(first).dtype == new:
        return first
    kind = _kind(_type(first).dtype)
    one_kind = {_kind(_type(x).dtype), _kind(new)} == {kind} and kind in ("f", "i")
    return Replacement(lambda x: lax.convert_element_type(x, new), (first,)) if one_kind else None


def _kind(dtype: Any) -> str:
    """Return the letter that NumPy gives to the kind of a dtype; empty for a dtype of JAX alone."""
    return dtype.kind if isinstance(dtype, np.dtype) else ""


# For each floating-point type: the bits of the fraction, and the largest exponent.
_FLOATS = {"bfloat16": (7, 127), "float16": (10, 15), "float32": (23, 127), "float64": (52, 1023)}


def _represents(large: Any, small: Any) -> bool:
    """Return whether dtype `large` represents every value of dtype `small` exactly."""
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


def _view(eqn: JaxprEqn, producers: Producers) -> Atom | Replacement | None:
    """Simplify a chain of views, such as transpositions and reshapes, to fewer operations."""
    simplest = simplest_view(eqn, producers)
    if simplest is None:
        return None
    x, movements = simplest
    apply = lambda x: functools.reduce(lambda y, move: move(y), movements, x)
    return Replacement(apply, (x,)) if movements else x


def _bitcast(eqn: JaxprEqn, producers: Producers) -> Atom | None:
    """Simplify two bitcasts in a row that return to the original type."""
    inner = _producer(eqn.invars[0], producers, lax.bitcast_convert_type_p)
    return None if inner is None else inner.invars[0]  # `rewrite` checks that the types agree


def _concatenate(eqn: JaxprEqn, producers: Producers) -> Atom | None:
    """Simplify a concatenation of one operand, or of all parts of a split."""
    parts = list(eqn.invars)
    if len(parts) == 1:
        return parts[0]
    split = _producer(parts[0], producers, lax.split_p)
    same_axis = split is not None and split.params["axis"] == eqn.params["dimension"]
    if split is None or not same_axis or len(parts) != len(split.outvars):
        return None
    return split.invars[0] if all(map(operator.is_, parts, split.outvars)) else None


def _complex_part(which: int) -> Rule:
    """Return a rule that simplifies the real (0) or imaginary (1) part of `complex(a, b)`."""

    def rule(eqn: JaxprEqn, producers: Producers) -> Atom | None:
        inner = _producer(eqn.invars[0], producers, lax.complex_p)
        return None if inner is None else inner.invars[which]

    return rule


_RULES: dict[Primitive, Rule] = {
    lax.mul_p: _neutral(1.0),
    lax.div_p: _neutral(1.0, right=True),
    lax.add_p: _neutral(None),
    lax.sub_p: _neutral(None, right=True),
    lax.neg_p: _involution,
    lax.not_p: _involution,
    lax.abs_p: _abs,
    **dict.fromkeys((lax.floor_p, lax.ceil_p, lax.round_p), _idempotent),
    **dict.fromkeys((lax.max_p, lax.min_p, lax.and_p, lax.or_p), _extreme_or_logical),
    lax.select_n_p: _select,
    lax.integer_pow_p: _power,
    lax.real_p: _complex_part(0),
    lax.imag_p: _complex_part(1),
    lax.convert_element_type_p: _convert,
    **dict.fromkeys(VIEWS, _view),
    lax.pad_p: _operand_unless(lambda eqn: any(map(any, eqn.params["padding_config"]))),
    lax.concatenate_p: _concatenate,
    lax.bitcast_convert_type_p: _bitcast,
    **dict.fromkeys(
        (lax.reduce_max_p, lax.reduce_min_p, lax.reduce_and_p, lax.reduce_or_p),
        _operand_unless(lambda eqn: bool(eqn.params["axes"])),
    ),
}
