"""Functions that declare rules. Each stands for one form of derivative of a primitive `p`.

A rule *pushes* tangents from inputs to outputs (forward mode) and *pulls* cotangents from outputs
to inputs (reverse mode). It does both with the formulas of its declaration:

| declaration | formula | push and pull |
| --- | --- | --- |
| `pointwise(p, d1, d2, ...)` | `di(y, *x)`: elementwise partial derivative | both multiply by it |
| `linear(p, transpose)` | `transpose(ct, *x)`: cotangents of linear inputs | push applies `p` |
| `bilinear(p, lhs, rhs)` | `lhs(ct, a, b)`, `rhs(ct, a, b)`: two transposes | push: product rule |
| `constant(p, ...)` | none: the derivative is zero wherever it exists | both give zero |
| `composite(p, jvp)` | `jvp(primals, tangents)` in JAX operations | pull transposes the jvp |

In formulas, `y` is the output, `x` or `a, b` the inputs, `ct` a cotangent, `d...` a tangent, and
`None` a symbolic zero. A formula takes parameters of the equation as keyword-only arguments. Any
other parameter must be neutral (None, False or empty), else `UnsupportedParam` is raised. So a
parameter that a new version of JAX adds is never ignored silently. The derivative of a primitive
with nested programs, such as `scan`, is a class instead: `xform.interpret.node.Structured`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from xform._jax import JaxprEqn, Primitive, cotangent_aval, is_reference
from xform.program.arithmetic import (
    Value,
    add,
    differentiable,
    instantiate,
    reduce_like,
    scale,
    shaped_like,
)
from xform.program.arrays import zeros
from xform.program.equation import apply
from xform.program.ir import Mask, gather, spread
from xform.registry.table import Formula, Rule, declare
from xform.registry.traits import ELEMENTWISE, PLAIN, Traits


@dataclasses.dataclass(frozen=True, eq=False)
class Pointwise(Rule):
    """An elementwise primitive. The formulas are partial derivatives `di(y, *x)`.

    A formula returns an array, a plain 1 or -1, or a tuple of factors. A plain 1 or -1 costs no
    multiplication. The factors of a tuple are applied one by one. So the backward pass saves the
    factors, which may be inputs or saved anyway, and not their product.
    """

    def push(self, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value], dxs: Sequence[Value]):
        (y,) = ys
        terms = [
            scale(dx, self.call(d, eqn, y, *xs))
            for d, dx in zip(self.formulas, dxs, strict=True)
            if dx is not None
        ]
        return [shaped_like(add(terms), y)]

    def pull(self, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value], cts: Sequence[Value],
             active: Mask):  # fmt: skip
        (y,), (ct,) = ys, cts
        return [
            reduce_like(scale(ct, self.call(d, eqn, y, *xs)), x) if on else None
            for d, x, on in zip(self.formulas, xs, active, strict=True)
        ]


@dataclasses.dataclass(frozen=True, eq=False)
class Linear(Rule):
    """A primitive that is linear in some of its inputs. The formula is the transpose.

    `argnums` has the positions of these inputs. None: the primitive is linear in every
    differentiable input.
    """

    argnums: tuple[int, ...] | None = None

    def linear_groups(self, eqn: JaxprEqn) -> Sequence[Sequence[int]]:
        return (range(len(eqn.invars)) if self.argnums is None else self.argnums,)

    def push(self, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value], dxs: Sequence[Value]):
        if self.argnums is None and all([dx is not None for dx in dxs]):
            return apply(eqn, dxs)

        def tangent_argument(i: int, x: Value, dx: Value) -> Value:
            if self.argnums is not None and i not in self.argnums:
                return x
            if dx is not None:
                return dx
            constant = self.argnums is None and not differentiable(jax.typeof(x))
            return x if constant else zeros(jax.typeof(x))

        pairs = enumerate(zip(xs, dxs, strict=True))
        return apply(eqn, [tangent_argument(i, x, dx) for i, (x, dx) in pairs])

    def pull(self, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value], cts: Sequence[Value],
             active: Mask):  # fmt: skip
        # Zeros for integer outputs are integers: data movement operations do not accept float0.
        zeros_type = lambda aval: cotangent_aval(aval) if differentiable(aval) else aval
        full = instantiate(cts, eqn.outvars, kind=zeros_type)
        ct = full if eqn.primitive.multiple_results else full[0]
        out = self.call(self.formulas[0], eqn, ct, *xs)
        if not isinstance(out, list | tuple):
            first = self.argnums[0] if self.argnums else 0
            out = [out if i == first else None for i in range(len(xs))]
        return [o if on else None for o, on in zip(out, active, strict=True)]


@dataclasses.dataclass(frozen=True, eq=False)
class Passthrough(Linear):
    """A primitive that returns its operands unchanged, such as `optimization_barrier`.

    Its transpose is the same primitive. Tangents and cotangents that are symbolic zeros stay
    symbolic zeros: the primitive is bound to the other values alone. Subclasses define which
    operands are returned, and how the parameters change if there are fewer operands.
    """

    def returned_operands(self, eqn: JaxprEqn) -> Mask:
        """Return which operands are returned. The outputs are these operands in the same order."""
        return tuple([not is_reference(v.aval) for v in eqn.invars])

    def narrow_params(self, params: dict[str, Any], on: Mask) -> dict[str, Any]:
        """Return the parameters of an equation that has only the returned operands in `on`."""
        return params

    def transpose_params(self, params: dict[str, Any]) -> dict[str, Any]:
        """Return the parameters of the transposed equation."""
        return params

    def narrow_equation(self, eqn: JaxprEqn, on: Mask) -> JaxprEqn:
        """Return the equation with only the returned operands in `on`, and their outputs."""
        pairs = zip(eqn.invars, spread(on, self.returned_operands(eqn)), strict=True)
        inputs = [v for v, kept in pairs if kept is not False]
        params = self.narrow_params(eqn.params, on)
        return eqn.replace(invars=inputs, outvars=gather(eqn.outvars, on), params=params)

    def active(self, eqn: JaxprEqn, active: Mask) -> Mask:
        pairs = zip(gather(active, self.returned_operands(eqn)), eqn.outvars, strict=True)
        return tuple([on and differentiable(v.aval) for on, v in pairs])

    def useful(self, eqn: JaxprEqn, active: Mask, wanted: Mask) -> Mask:
        pairs = zip(active, spread(wanted, self.returned_operands(eqn)), strict=True)
        return tuple([on and want is True for on, want in pairs])

    def push(self, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value], dxs: Sequence[Value]):
        return self._bind(eqn, eqn.params, gather(dxs, self.returned_operands(eqn)))

    def pull(self, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value], cts: Sequence[Value],
             active: Mask):  # fmt: skip
        return spread(
            self._bind(eqn, self.transpose_params(eqn.params), cts), self.returned_operands(eqn)
        )

    def _bind(self, eqn: JaxprEqn, params: dict[str, Any], values: Sequence[Value]) -> list[Value]:
        """Bind the primitive to the values that are not None; return None for the others."""
        on = tuple([v is not None for v in values])
        out = eqn.primitive.bind(*gather(values, on), **self.narrow_params(params, on))
        return spread(out, on)


@dataclasses.dataclass(frozen=True, eq=False)
class Bilinear(Rule):
    """A product: the formula `lhs(ct, a, b)` is the transpose in `a`, `rhs(ct, a, b)` in `b`."""

    def linear_groups(self, eqn: JaxprEqn) -> Sequence[Sequence[int]]:
        return ((0,), (1,))

    def push(self, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value], dxs: Sequence[Value]):
        (a, b), (da, db) = xs, dxs
        terms = [] if da is None else apply(eqn, [da, b])
        return [add([*terms, *([] if db is None else apply(eqn, [a, db]))])]

    def pull(self, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value], cts: Sequence[Value],
             active: Mask):  # fmt: skip
        return [
            reduce_like(self.call(f, eqn, cts[0], *xs), x) if on else None
            for f, x, on in zip(self.formulas, xs, active, strict=True)
        ]


@dataclasses.dataclass(frozen=True, eq=False)
class Composite(Rule):
    """A primitive whose formula is a jvp. To pull, `xform.interpret` transposes the jvp."""

    def jvp(self, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value]):
        """Return outputs and their tangents. Bind the primitive if the formula has no outputs."""
        ys, dys = self.call(self.formulas[0], eqn, xs, dxs)
        return apply(eqn, xs) if ys is None else ys, dys


def pointwise(primitive: Primitive | str, *partials: Formula, traits: Traits = ELEMENTWISE) -> Rule:
    """Declare an elementwise primitive by a partial derivative `di(y, *x)` for each input.

    Args:
      primitive: the Primitive, or the name of one of JAX's own primitives. It returns one array, of
        the shape that its inputs broadcast to.
      *partials: for each input a function of the output and the inputs. It returns the partial
        derivative as an array, 1, -1, or a tuple of factors. A parameter of the primitive is a
        keyword-only argument of the same name.
      traits: properties besides the derivative, see `Traits`; by default those of an elementwise
        operation.

    Raises:
      WrongRule: the primitive has one of xform's own rules.

    >>> from jax.extend.core import Primitive
    >>> half_p = Primitive("half")
    >>> _, _ = half_p.def_impl(lambda x: x / 2), half_p.def_abstract_eval(lambda x: x)
    >>> _ = xform.extend.pointwise(half_p, lambda y, x: jnp.full_like(x, 0.5))
    >>> float(xform.grad(half_p.bind)(3.0))
    0.5
    """
    return declare(Pointwise, primitive, "pointwise", partials, traits)


def linear(
    primitive: Primitive | str,
    transpose: Formula,
    *,
    argnums: tuple[int, ...] | None = None,
    traits: Traits = PLAIN,
) -> Rule:
    """Declare a primitive that is linear in its array inputs.

    Args:
      primitive: the Primitive, or the name of one of JAX's own primitives.
      transpose: `transpose(ct, *x)` returns one cotangent, of the first linear input, or a list
        with a cotangent or None for each input. If the primitive has `multiple_results`, `ct` is a
        list.
      argnums: tuple of the positions of the inputs that the primitive is linear in. The other
        inputs are constants. None: every input of a float or complex dtype.
      traits: properties besides the derivative, see `Traits`. By default XLA runs the primitive on
        its own, and it has no side effects.

    Raises:
      WrongRule: the primitive has one of xform's own rules.

    >>> from jax.extend.core import Primitive
    >>> flip_p = Primitive("flip")
    >>> _, _ = flip_p.def_impl(lambda x: x[::-1]), flip_p.def_abstract_eval(lambda x: x)
    >>> _ = xform.extend.linear(flip_p, lambda ct, x: flip_p.bind(ct))
    >>> xform.vjp(flip_p.bind, jnp.arange(2.0))[1](jnp.array([3.0, 4.0]))[0].tolist()
    [4.0, 3.0]
    """
    return declare(Linear, primitive, "linear", [transpose], traits, argnums=argnums)


def bilinear(
    primitive: Primitive | str, lhs: Formula, rhs: Formula, *, traits: Traits = PLAIN
) -> Rule:
    """Declare a primitive that is linear in each of its two inputs, with the other one fixed.

    Args:
      primitive: the Primitive, or the name of one of JAX's own primitives.
      lhs: `lhs(ct, a, b)` returns the cotangent of `a`.
      rhs: `rhs(ct, a, b)` returns the cotangent of `b`.
      traits: properties besides the derivative, see `Traits`. By default XLA runs the primitive on
        its own, and it has no side effects.

    Raises:
      WrongRule: the primitive has one of xform's own rules.

    >>> from jax.extend.core import Primitive
    >>> times_p = Primitive("times")
    >>> _, _ = times_p.def_impl(lambda a, b: a * b), times_p.def_abstract_eval(lambda a, b: a)
    >>> times = lambda ct, a, b: times_p.bind(ct, b)
    >>> _ = xform.extend.bilinear(times_p, times, lambda ct, a, b: times_p.bind(a, ct))
    >>> tuple(map(float, xform.grad(times_p.bind, argnums=(0, 1))(jnp.float32(2), jnp.float32(5))))
    (5.0, 2.0)
    """
    return declare(Bilinear, primitive, "bilinear", [lhs, rhs], traits)


def constant(
    *primitives: Primitive | str,
    supported_params: Iterable[str] | None = None,
    traits: Traits = PLAIN,
) -> None:
    """Declare primitives whose derivative is zero wherever it exists.

    Examples are rounding, comparisons and integer operations.

    Args:
      *primitives: any number of Primitives, or names of JAX's own primitives.
      supported_params: names of the parameters that the primitives may have; None: any.
      traits: properties besides the derivative, see `Traits`, the same for all of the primitives.

    Raises:
      WrongRule: a primitive has one of xform's own rules.

    >>> from jax.extend.core import Primitive
    >>> rank_p = Primitive("rank")
    >>> _ = rank_p.def_impl(lambda x: jnp.float32(x.ndim))
    >>> _ = rank_p.def_abstract_eval(lambda x: x.update(shape=()))
    >>> xform.extend.constant(rank_p)
    >>> xform.grad(lambda x: rank_p.bind(x) * x.sum())(jnp.ones(2)).tolist()
    [1.0, 1.0]
    """
    for p in primitives:
        declare(Rule, p, "constant", [], traits, supported_params)


def composite(primitive: Primitive | str, jvp: Formula, *, traits: Traits = PLAIN) -> Rule:
    """Declare a primitive by a jvp that is written in JAX operations.

    Args:
      primitive: the Primitive, or the name of one of JAX's own primitives.
      jvp: `jvp(primals, tangents, **params)` returns a list of outputs and a list of their
        tangents, None for zero. Its linear part is transposed for the pullback. The outputs must
        equal the outputs of the primitive bit for bit. So bind the primitive to compute them; or
        return None in place of the list of outputs, then xform binds it.
      traits: properties besides the derivative, see `Traits`. By default XLA runs the primitive on
        its own, and it has no side effects.

    Raises:
      WrongRule: the primitive has one of xform's own rules.

    >>> from jax.extend.core import Primitive
    >>> norm_p = Primitive("norm")
    >>> _ = norm_p.def_impl(lambda x: jnp.sqrt(jnp.vdot(x, x)))
    >>> _ = norm_p.def_abstract_eval(lambda x: x.update(shape=()))
    >>> def norm_jvp(primals, tangents):
    ...     (x,), (dx,) = primals, tangents
    ...     y = norm_p.bind(x)
    ...     return [y], [jnp.vdot(x, dx) / y]
    >>> _ = xform.extend.composite(norm_p, norm_jvp)
    >>> [round(float(g), 3) for g in xform.grad(norm_p.bind)(jnp.array([3.0, 4.0]))]
    [0.6, 0.8]
    """
    return declare(Composite, primitive, "composite", [jvp], traits)
