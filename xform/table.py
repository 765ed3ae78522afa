"""The table of derivative rules, and the words in which a rule is declared.

| word | the formula | what follows |
| --- | --- | --- |
| `pointwise(p, d1, d2, ...)` | `di(y, *x)`: elementwise partial derivative | push, pull multiply |
| `linear(p, transpose)` | `transpose(ct, *x)`: cotangents of linear inputs | push is `p` |
| `bilinear(p, lhs, rhs)` | `lhs(ct, a, b)`, `rhs(ct, a, b)`: two transposes | product rule |
| `constant(p, ...)` | none: the derivative is zero wherever it exists | nothing flows |
| `composite(p, jvp)` | `jvp(primals, tangents)` in JAX operations | pull is derived |
| `Structured` | a class; the primitive holds programs | see `interpret.node` |
| `opaque` | none: a kernel, a callback | an error, where one is needed |

In formulas `y` is the output, `x` or `a, b` the inputs, `ct` a cotangent, `d...` a tangent, and
`None` a symbolic zero. A formula takes the parameters that it uses as keyword-only arguments; any
other parameter of the equation must be neutral (None, False or empty), else `UnsupportedParam`: a
parameter that a new JAX adds is never ignored silently.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xform._jax import JaxprEqn, Primitive, frame, is_reference, zeros
from xform.errors import MissingRule, UnsupportedParam, WrongRule
from xform.ir import Mask, Program, bind

Formula = Callable[..., Any]
Value = Any
RULES: dict[str, Rule] = {}


@dataclasses.dataclass(frozen=True, eq=False)
class Rule:
    """What xform knows of one primitive: its name, its word, its formulas."""

    name: str
    word: str
    formulas: tuple[Formula, ...] = ()
    used: dict[Formula, tuple[str, ...]] = dataclasses.field(default_factory=dict, repr=False)
    known: frozenset[str] = frozenset()

    def active(self, eqn: JaxprEqn, active: Mask) -> Mask:
        """Which outputs depend differentiably on the active inputs."""
        if self.word == "constant" or not any(active):
            return (False,) * len(eqn.outvars)
        return tuple(differentiable(v.aval) for v in eqn.outvars)

    def inlined(self, eqn: JaxprEqn, staged: bool) -> Program | None:
        """The program that stands for a call of no weight of its own.

        `staged`: whether the call is part of another computation, rather than run by itself.
        """
        return None

    def push(self, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value], dxs: Sequence[Value]
             ) -> Sequence[Value]:  # fmt: skip
        """Tangents of the outputs, from the inputs, the outputs and the inputs' tangents."""
        raise NotImplementedError

    def pull(self, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value], cts: Sequence[Value],
             active: Mask) -> Sequence[Value]:  # fmt: skip
        """Cotangents of the active inputs, from the inputs, the outputs and their cotangents."""
        raise NotImplementedError

    def check(self, eqn: JaxprEqn) -> None:
        """Refuse a parameter that no formula of this rule mentions."""
        for name, value in eqn.params.items():
            neutral = value is None or value is False or (isinstance(value, tuple) and not value)
            if name not in self.known and not neutral:
                raise UnsupportedParam(
                    f"derivative of {eqn.primitive.name}",
                    f"its rule does not know the parameter {name}={value!r}",
                    frame(eqn),
                    "declare a rule that takes it as a keyword-only argument, with xform.extend",
                )

    def call(self, formula: Formula, eqn: JaxprEqn, *args: Any) -> Any:
        return formula(*args, **{k: eqn.params[k] for k in self.used[formula] if k in eqn.params})


@dataclasses.dataclass(frozen=True, eq=False)
class Pointwise(Rule):
    """Formulas are partial derivatives `di(y, *x)`.

    A plain 1 or -1 costs no multiplication. A tuple of factors is applied one by one, so that the
    factors are what is saved (they may be saved anyhow, or be inputs) and not their product.
    """

    def push(self, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value], dxs: Sequence[Value]):
        (y,) = ys
        terms = [
            scale(like(dx, y), self.call(d, eqn, y, *xs))
            for d, dx in zip(self.formulas, dxs, strict=True)
            if dx is not None
        ]
        return [add(terms)]

    def pull(self, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value], cts: Sequence[Value],
             active: Mask):  # fmt: skip
        (y,), (ct,) = ys, cts
        return [
            reduce_like(scale(ct, self.call(d, eqn, y, *xs)), x) if on else None
            for d, x, on in zip(self.formulas, xs, active, strict=True)
        ]


@dataclasses.dataclass(frozen=True, eq=False)
class Linear(Rule):
    """The formula is the transpose in the inputs at `over` (None: every differentiable one)."""

    over: tuple[int, ...] | None = None

    def push(self, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value], dxs: Sequence[Value]):
        def argument(i: int, x: Value, dx: Value) -> Value:
            if not (i in self.over if self.over is not None else differentiable(jax.typeof(x))):
                return x
            return zeros(jax.typeof(x)) if dx is None else dx

        return bind(
            eqn, [argument(i, x, dx) for i, (x, dx) in enumerate(zip(xs, dxs, strict=True))]
        )

    def pull(self, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value], cts: Sequence[Value],
             active: Mask):  # fmt: skip
        full = [zeros(v.aval) if ct is None else ct for ct, v in zip(cts, eqn.outvars, strict=True)]
        ct = full if eqn.primitive.multiple_results else full[0]
        out = self.call(self.formulas[0], eqn, ct, *xs)
        if not isinstance(out, list | tuple):
            first = self.over[0] if self.over else 0
            out = [out if i == first else None for i in range(len(xs))]
        return [o if on else None for o, on in zip(out, active, strict=True)]


@dataclasses.dataclass(frozen=True, eq=False)
class Bilinear(Rule):
    """Formulas `lhs(ct, a, b)` and `rhs(ct, a, b)` are the transposes in `a` and in `b`."""

    def push(self, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value], dxs: Sequence[Value]):
        (a, b), (da, db) = xs, dxs
        terms = [] if da is None else bind(eqn, [da, b])
        return [add([*terms, *([] if db is None else bind(eqn, [a, db]))])]

    def pull(self, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value], cts: Sequence[Value],
             active: Mask):  # fmt: skip
        return [
            reduce_like(self.call(f, eqn, cts[0], *xs), x) if on else None
            for f, x, on in zip(self.formulas, xs, active, strict=True)
        ]


@dataclasses.dataclass(frozen=True, eq=False)
class Composite(Rule):
    """The formula is a jvp; `interpret` derives the pullback from its linear part."""


def declare(kind: type[Rule], primitive: Primitive | str, word: str, formulas: Sequence[Formula],
            **fields: Any) -> Rule:  # fmt: skip
    """Enter a rule of some kind; its formulas' keyword-only arguments are the known parameters."""
    used = {f: _keywords(f) for f in formulas}
    known = frozenset(k for names in used.values() for k in names)
    name = primitive if isinstance(primitive, str) else primitive.name
    return add_rule(kind(name, word, tuple(formulas), used, known, **fields))


def _keywords(f: Formula) -> tuple[str, ...]:
    params = inspect.signature(f).parameters.values()
    return tuple(p.name for p in params if p.kind is p.KEYWORD_ONLY)


def add_rule(rule: Rule) -> Rule:
    """Enter a rule in the table; two rules for one name are an error."""
    if rule.name in RULES:
        raise WrongRule(
            f"declaration of a rule for {rule.name}",
            "a primitive of that name has a rule already",
            "",
            "give your primitive another name",
        )
    RULES[rule.name] = rule
    return rule


def pointwise(primitive: Primitive | str, *partials: Formula) -> Rule:
    """An elementwise primitive: one partial derivative `di(y, *x)` for each input."""
    return declare(Pointwise, primitive, "pointwise", partials)


def linear(primitive: Primitive | str, transpose: Formula, over: tuple[int, ...] | None = None):
    """A primitive linear in its array inputs; `transpose(ct, *x)` returns their cotangents.

    `transpose` may return one cotangent (that of the first linear input) or a list for all inputs.
    """
    return declare(Linear, primitive, "linear", [transpose], over=over)


def bilinear(primitive: Primitive | str, lhs: Formula, rhs: Formula) -> Rule:
    """A primitive linear in each of its two inputs."""
    return declare(Bilinear, primitive, "bilinear", [lhs, rhs])


def constant(*primitives: Primitive | str) -> None:
    """Primitives whose derivative is zero wherever it exists (rounding, comparison, integers)."""
    for p in primitives:
        declare(Rule, p, "constant", [])


def composite(primitive: Primitive | str, jvp: Formula) -> Rule:
    """A primitive whose derivative is written in JAX operations.

    `jvp(primals, tangents, **params)` returns a list of outputs and a list of their tangents; a
    tangent may be None, coming in and going out. Its linear part is transposed for the pullback.
    """
    return declare(Composite, primitive, "composite", [jvp])


def lookup(eqn: JaxprEqn) -> Rule:
    """The rule of an equation's primitive, checked against its parameters."""
    rule = RULES.get(eqn.primitive.name)
    if rule is None:
        raise MissingRule(
            f"derivative of {eqn.primitive.name}",
            f"xform has no rule for the primitive {eqn.primitive.name!r}",
            frame(eqn),
            "declare one with xform.extend (pointwise, linear, bilinear, composite), wrap the call "
            "in jax.custom_vjp, or cut it off with jax.lax.stop_gradient",
        )
    if rule.formulas:
        rule.check(eqn)
    return rule


# Arithmetic of tangents and cotangents.


def differentiable(aval: Any) -> bool:
    """Whether a value of this type has tangents other than float0."""
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, np.inexact) and not is_reference(aval)


def arrayed(x: Value) -> Value:
    """`x`, or the array of a Python number: user's rules return such, and programs hold them."""
    return x if x is None or hasattr(x, "shape") else jnp.asarray(x)


def constant_like(x: Value, c: float) -> Value:
    """The scalar `c` in the dtype of `x`: a literal, which lax broadcasts for free."""
    return np.asarray(c, x.dtype)


@dataclasses.dataclass(frozen=True)
class Over:
    """The factor 1 / `divisor`, not formed."""

    divisor: Value


def scale(ct: Value, d: Value) -> Value:
    """`ct` times a partial derivative: 1, -1, an array, an `Over`, or several of these in turn."""
    if isinstance(d, tuple):
        return functools.reduce(scale, d, ct)
    if isinstance(d, Over):
        return lax.div(ct, d.divisor)
    if isinstance(d, int):
        return ct if d == 1 else lax.neg(ct)
    return lax.mul(ct, d)


def add(terms: Sequence[Value]) -> Value:
    total = terms[0]
    for term in terms[1:]:
        total = lax.add(total, term)
    return total


def like(dx: Value, y: Value) -> Value:
    """`dx` in the shape of `y`: lax lets a scalar meet an array in elementwise operations."""
    return dx if dx.shape == y.shape else lax.broadcast_in_dim(dx, y.shape, kept(dx, y))


def kept(x: Value, y: Value) -> tuple[int, ...]:
    return tuple(range(y.ndim)) if x.ndim == y.ndim else ()


def reduce_like(ct: Value, x: Value) -> Value:
    """Transpose of the broadcast that an elementwise primitive does to a scalar operand."""
    shape = getattr(x, "shape", ())
    if ct.shape == shape:
        return ct
    if len(shape) != ct.ndim:
        return lax.reduce_sum(ct, tuple(range(ct.ndim)))
    axes = tuple(i for i, (a, b) in enumerate(zip(ct.shape, shape, strict=True)) if a != b)
    return lax.reshape(lax.reduce_sum(ct, axes), shape)
