"""`laplacian`: the sum of second derivatives, computed in one forward pass.

Each value is propagated with its Jacobian (one slice for each input element) and its Laplacian. A
linear operation is applied to all three. For any other operation, the Laplacian of the result has a
second term: the second derivative of the operation along each slice of its operands' Jacobians,
summed over the slices.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xform._jax import JaxprEqn, Var, tangent_aval, zeros
from xform.errors import WrongDtype
from xform.interpret.cost import shape
from xform.interpret.jvp import jvp, push
from xform.introspection.callables import check_callable, function_name
from xform.passes.inline import inline_bodies
from xform.program.arithmetic import (
    Value,
    add,
    constant_like,
    differentiable,
    instantiate,
    scale,
    shaped_like,
)
from xform.program.ir import (
    Mask,
    Program,
    apply,
    bind,
    environment,
    gather,
    last_uses,
    read,
    spread,
    trace,
    write,
)
from xform.program.source import name_stack, source
from xform.registry.table import Rule, lookup
from xform.registry.words import Bilinear, Linear, Pointwise
from xform.sparse.walk import opens
from xform.transforms.function import as_array, numbers, partial, positions


@dataclasses.dataclass(frozen=True)
class Derivatives:
    """The derivatives of a value of shape `[...]`.

    Attributes:
      jacobian: the first derivative in each input element, `[n, ...]`.
      laplacian: the sum of the second derivatives, `[...]`; None: zero.
    """

    jacobian: Value
    laplacian: Value | None


def laplacian(
    f: Callable[..., Any], argnums: int | Sequence[int] = 0, jacobian: bool = False
) -> Callable[..., Any]:
    """The Laplacian of `f`: the sum over all input elements of the second derivative in each.

    Args:
      f: pure function of pytrees of real arrays to a pytree of real arrays.
      argnums: position or positions of the arguments whose elements are summed over.
      jacobian: whether to return the value and the Jacobian too, which are computed anyway.

    Returns:
      A function of the arguments of `f`. It returns the Laplacian of each element of the output, in
      the tree, shapes and dtypes of the output. With `jacobian` it returns a tuple of the value,
      the Jacobian and the Laplacian; each leaf of the Jacobian has shape `[n, *output]` for `n`
      input elements, which are counted leaf by leaf.

    Raises:
      WrongDtype: an input or output is not real.
      MissingRule: a primitive in `f` has no rule.
      NotDifferentiable: an operation in `f` has no forward mode.

    Cost: each operation runs once for the value, once for the Laplacian, and once for each of the
    `n` input elements, as one batch. There is no reverse pass. Memory is `n` times the peak of
    evaluating `f`. The trace of the matrix that `xform.hessian` returns takes more than twice the
    time.
    Source: Li et al., "A computational framework for neural network-based variational Monte Carlo
    with Forward Laplacian", Nature Machine Intelligence 6 (2024).

    >>> float(xform.sparse.laplacian(lambda x: jnp.sum(x**3))(jnp.array([1.0, 2.0])))
    18.0
    >>> y, dy, lap = xform.sparse.laplacian(lambda x: x @ x, jacobian=True)(jnp.array([1.0, 2.0]))
    >>> float(y), dy.tolist(), float(lap)
    (5.0, [2.0, 4.0], 4.0)
    """
    check_callable(f, "laplacian")
    numbers(argnums, "laplacian", "argnums")
    asked = f"laplacian of {function_name(f)}"

    @functools.wraps(f, updated=())
    def laplacian_of(*args: Any, **kwargs: Any) -> Any:
        g, primals = partial(f, positions(argnums, len(args), "laplacian"), args, kwargs)
        leaves, tree = jax.tree.flatten(primals)
        xs = [as_array(x, "laplacian") for x in leaves]
        _check(xs, asked, "an input")
        trees: list[Any] = []

        def flat(*xs: Value) -> list[Value]:
            ys, out = jax.tree.flatten(g(*jax.tree.unflatten(tree, xs)))
            trees.append(out)
            return ys

        prog = trace(flat, *xs)
        _check(prog.out_avals, asked, "an output")
        n = sum(x.size for x in xs)
        eye = jnp.split(jnp.eye(n), np.cumsum([x.size for x in xs])[:-1], axis=1)
        derivatives: list[Derivatives | None] = [
            Derivatives(e.reshape(n, *x.shape).astype(x.dtype), None)
            for e, x in zip(eye, xs, strict=True)
        ]
        ys, dys = forward(prog, xs, derivatives)
        laplacians = [zeros(a) if m is None or m.laplacian is None else m.laplacian
                      for m, a in zip(dys, prog.out_avals, strict=True)]  # fmt: skip
        unflat = functools.partial(jax.tree.unflatten, trees[0])
        if not jacobian:
            return unflat(laplacians)
        slices = [jnp.zeros((n, *a.shape), a.dtype) if m is None else m.jacobian
                  for m, a in zip(dys, prog.out_avals, strict=True)]  # fmt: skip
        return unflat(ys), unflat(slices), unflat(laplacians)

    return laplacian_of


def _check(values: Sequence[Any], asked: str, what: str) -> None:
    for x in values:
        if not jnp.issubdtype(x.dtype, np.floating):
            raise WrongDtype(
                asked,
                f"{what} has dtype {x.dtype}",
                "",
                "take the Laplacian of real functions of real arguments",
            )


def forward(prog: Program, args: Sequence[Value], derivatives: Sequence[Derivatives | None]
            ) -> tuple[list[Value], list[Derivatives | None]]:  # fmt: skip
    """The outputs of a program and their derivatives; None for constant outputs."""
    prog = inline_bodies(prog, opens)
    env = environment(prog, args)
    derivatives_of = {v: m for v, m in zip(prog.inputs, derivatives, strict=True) if m is not None}
    drop, outer = last_uses(prog.equations, prog.outputs), name_stack()
    for eqn in prog.equations:
        xs = [read(env, v) for v in eqn.invars]
        ds = [derivatives_of.get(v) if isinstance(v, Var) else None for v in eqn.invars]
        rule = None if all(m is None for m in ds) else lookup(eqn)
        on = tuple(m is not None for m in ds)
        if rule is None or not any(rule.active(eqn, on)):
            write(env, eqn.outvars, bind(eqn, xs, outer))
        else:
            with source(eqn, outer), eqn.ctx.manager:
                ys, found = _equation(rule, eqn, xs, ds, on)
            write(env, eqn.outvars, ys)
            pairs = zip(eqn.outvars, found, strict=True)
            derivatives_of.update(
                (v, m) for v, m in pairs if m is not None and differentiable(v.aval)
            )
        for v in drop.get(id(eqn), ()):
            env.pop(v, None)
            derivatives_of.pop(v, None)
    ends = [derivatives_of.get(v) if isinstance(v, Var) else None for v in prog.outputs]
    return [read(env, v) for v in prog.outputs], ends


def _equation(rule: Rule, eqn: JaxprEqn, xs: Sequence[Value],
              ds: Sequence[Derivatives | None], on: Mask
              ) -> tuple[Sequence[Value], list[Derivatives | None]]:  # fmt: skip
    """The outputs of an equation and their derivatives."""
    jacobians = [m.jacobian for m in ds if m is not None]
    laps = [None if m is None else m.laplacian for m in ds]
    wanted = (True,) * len(eqn.outvars)
    ys: Sequence[Value] = apply(eqn, xs)
    # The Laplacian of a result is the operation's derivative in the direction of the operands'
    # Laplacians (`first`), plus its second derivative along the slices (`second`).
    first: Sequence[Value | None] = [None] * len(ys)
    if any(lap is not None for lap in laps):
        first = push(rule, eqn, xs, laps, wanted, False)[1]
    if isinstance(rule, Linear | Bilinear) or (isinstance(rule, Pointwise) and _same_shapes(eqn)):
        slices = jax.vmap(lambda *dxs: rule.push(eqn, xs, ys, spread(dxs, on)))(*jacobians)
        second: Sequence[Value | None] = [None] * len(ys)
        if isinstance(rule, Bilinear) and on[0] and on[1]:
            second = [_product(eqn, xs, jacobians)]
        elif isinstance(rule, Pointwise):
            second = [_pointwise(rule, eqn, xs, ds)]
    else:
        slices, second = _general(rule, eqn, xs, jacobians, on)
    parts = zip(slices, first, second, strict=True)
    return ys, [None if j is None else Derivatives(j, _sum(a, b)) for j, a, b in parts]


def _same_shapes(eqn: JaxprEqn) -> bool:
    """Whether all operands have the shape of the result: none is a scalar that is broadcast."""
    return all(shape(v) == shape(eqn.outvars[0]) for v in eqn.invars)


def _product(eqn: JaxprEqn, xs: Sequence[Value], jacobians: Sequence[Value]) -> Value:
    """The second-order term of a product: twice the sum of products of the operands' slices."""
    a, b = jacobians
    terms = jax.vmap(lambda a, b: apply(eqn, [a, b, *xs[2:]])[0])(a, b)
    return _doubled(lax.reduce_sum(terms, (0,)))


def _doubled(x: Value) -> Value:
    return lax.mul(x, constant_like(x, 2))


def _pointwise(rule: Pointwise, eqn: JaxprEqn, xs: Sequence[Value], ds: Sequence[Derivatives | None]
               ) -> Value | None:  # fmt: skip
    """The second-order term of a pointwise operation.

    It is the sum of second partial derivatives, each times the sum of products of the slices of its
    two operands.
    """
    (out,) = eqn.outvars
    total: Value | None = None
    for partial_derivative, m in zip(rule.formulas, ds, strict=True):
        if m is None:
            continue

        def slope(*xs: Value, d: Any = partial_derivative) -> list[Value]:
            (y,) = apply(eqn, xs)
            return [scale(lax.full_like(y, 1), rule.call(d, eqn, y, *xs))]

        prog = trace(slope, *[v.aval for v in eqn.invars])
        sums = [None if other is None else _inner(m.jacobian, other.jacobian) for other in ds]
        total = _sum(total, jvp(prog, xs, sums)[1][0])
    return None if total is None else shaped_like(total, zeros(out.aval))


def _inner(a: Value, b: Value) -> Value:
    """The elementwise product of two Jacobians, summed over slices."""
    return lax.reduce_sum(lax.mul(a, b), (0,))


def _general(rule: Rule, eqn: JaxprEqn, xs: Sequence[Value], jacobians: Sequence[Value], on: Mask
             ) -> tuple[list[Value | None], list[Value | None]]:  # fmt: skip
    """The slices and the second-order term of any operation, by a jvp of its push.

    For each slice, the push and its derivative are taken in the direction of the slice.
    """
    is_nonzero: list[bool] = []

    def pushed(*args: Value) -> list[Value]:
        dxs = spread(args[len(on) :], on)
        dys = push(rule, eqn, args[: len(on)], dxs, (True,) * len(eqn.outvars), False)[1]
        is_nonzero[:] = [dy is not None for dy in dys]
        return gather(dys, tuple(is_nonzero))

    avals = [v.aval for v in eqn.invars]
    prog = trace(pushed, *avals, *map(tangent_aval, gather(avals, on)))

    def along(*dxs: Value) -> tuple[list[Value], list[Value]]:
        none = [None] * len(dxs)
        dys, ddys = jvp(prog, [*xs, *dxs], [*spread(dxs, on), *none])
        return dys, instantiate(ddys, prog.outputs)

    dys, ddys = jax.vmap(along)(*jacobians)
    second = [lax.reduce_sum(dd, (0,)) for dd in ddys]
    return spread(dys, is_nonzero), spread(second, is_nonzero)


def _sum(a: Value | None, b: Value | None) -> Value | None:
    terms = [x for x in (a, b) if x is not None]
    return add(terms) if terms else None
