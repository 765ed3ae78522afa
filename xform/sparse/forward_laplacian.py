"""`xform.sparse.laplacian`: the sum of second derivatives, computed in one forward pass.

Each value is propagated with its Jacobian (one slice for each input element) and its Laplacian. A
linear operation is applied to all three. For any other operation, the Laplacian of the result is a
sum of two terms. The first-order term is the operation's derivative in the direction of its
operands' Laplacians. The second-order term is its second derivative along each slice of its
operands' Jacobians, summed over the slices.
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

from xform._jax import JaxprEqn, Var, tangent_aval
from xform.errors import WrongDtype
from xform.interpret.jvp import jvp, push
from xform.introspection.argnums import numbers, positions
from xform.introspection.callables import check_callable, function_name
from xform.passes.inline import inlined, underived_body
from xform.program.arithmetic import (
    Value,
    add,
    constant_like,
    differentiable,
    instantiate,
    scale,
    shaped_like,
)
from xform.program.arrays import basis, stacked, zeros
from xform.program.dimensions import shape
from xform.program.ir import (
    Mask,
    Program,
    apply,
    bind,
    context,
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
from xform.transforms.function import as_array, bind_others


@dataclasses.dataclass(frozen=True)
class Derivatives:
    """The derivatives of a value of shape `[...]`.

    Attributes:
      jacobian: the first derivative in each input element, `[n, ...]`.
      laplacian: the sum over input elements of the second derivatives, `[...]`; None: zero.
    """

    jacobian: Value
    laplacian: Value | None


def laplacian(
    f: Callable[..., Any], argnums: int | Sequence[int] = 0, *, return_jacobian: bool = False
) -> Callable[..., Any]:
    """Return a function that computes the Laplacian of `f`.

    The Laplacian is the sum, over all input elements, of the second derivative in that element.

    Args:
      f: pure function of pytrees of real arrays to a pytree of real arrays.
      argnums: position or positions of the arguments whose elements are summed over.
      return_jacobian: whether to return the value and the Jacobian too, which are computed anyway.

    Returns:
      A function of the arguments of `f`. It returns the Laplacian of each element of the output, in
      the tree, shapes and dtypes of the output. With `return_jacobian` it returns a tuple of the
      value, the Jacobian and the Laplacian. Each leaf of the Jacobian has shape `[n, *output]`. `n`
      is the number of input elements, which are counted leaf by leaf.

    Raises:
      WrongDtype: an input or output is not real.
      MissingRule: a primitive in `f` has no rule.
      NotDifferentiable: an operation in `f` has no forward mode.
      WrongArgument: an argument is invalid.

    Cost: each operation runs once for the value, once for the Laplacian, and once for each of the
    `n` input elements, as one batch. There is no reverse pass. Memory is `n` times the peak of
    evaluating `f`. Computing the full Hessian and its trace takes more than twice as long.
    Source: Li et al., "A computational framework for neural network-based variational Monte Carlo
    with Forward Laplacian", Nature Machine Intelligence 6 (2024).

    >>> float(xform.sparse.laplacian(lambda x: jnp.sum(x**3))(jnp.array([1.0, 2.0])))
    18.0
    >>> both = xform.sparse.laplacian(lambda x: x @ x, return_jacobian=True)
    >>> y, dy, lap = both(jnp.array([1.0, 2.0]))
    >>> float(y), dy.tolist(), float(lap)
    (5.0, [2.0, 4.0], 4.0)
    """
    check_callable(f, "laplacian")
    numbers(argnums, "laplacian", "argnums")
    request = f"laplacian of {function_name(f)}"

    @functools.wraps(f, updated=())
    def laplacian_of(*args: Any, **kwargs: Any) -> Any:
        g, primals = bind_others(f, positions(argnums, len(args), "laplacian"), args, kwargs)
        leaves, tree = jax.tree.flatten(primals)
        xs = [as_array(x, "laplacian") for x in leaves]
        _check_real(xs, request, "an input")
        out_trees: list[Any] = []

        def of_leaves(*xs: Value) -> list[Value]:
            ys, out_tree = jax.tree.flatten(g(*jax.tree.unflatten(tree, xs)))
            out_trees.append(out_tree)
            return ys

        prog = trace(of_leaves, *xs)
        _check_real(prog.out_avals, request, "an output")
        n = sum(x.size for x in xs)
        units = basis([tangent_aval(jax.typeof(x)) for x in xs])
        derivatives: list[Derivatives | None] = [Derivatives(columns, None) for columns in units]
        ys, dys = evaluate_with_derivatives(prog, xs, derivatives)
        laplacians = [zeros(a) if dy is None or dy.laplacian is None else dy.laplacian
                      for dy, a in zip(dys, prog.out_avals, strict=True)]  # fmt: skip
        unflatten = functools.partial(jax.tree.unflatten, out_trees[0])
        if not return_jacobian:
            return unflatten(laplacians)
        jacobians = [zeros(stacked(n, a)) if dy is None else dy.jacobian
                     for dy, a in zip(dys, prog.out_avals, strict=True)]  # fmt: skip
        return unflatten(ys), unflatten(jacobians), unflatten(laplacians)

    return laplacian_of


def _check_real(values: Sequence[Any], request: str, noun: str) -> None:
    """Raise an error if one of the values, each of which is a `noun`, is not real."""
    for x in values:
        if not jnp.issubdtype(x.dtype, np.floating):
            raise WrongDtype(
                request,
                f"{noun} has dtype {x.dtype}",
                "",
                "take the Laplacian of real functions of real arguments",
            )


def evaluate_with_derivatives(
    prog: Program, args: Sequence[Value], derivatives: Sequence[Derivatives | None]
) -> tuple[list[Value], list[Derivatives | None]]:
    """Run a program at `args` with these derivatives (None: constant), equation by equation.

    Returns the outputs and their derivatives; None for outputs that are constant.
    """
    prog = inlined(prog, underived_body)
    env = environment(prog, args)
    derivatives_of = {v: d for v, d in zip(prog.inputs, derivatives, strict=True) if d is not None}
    drop, outer = last_uses(prog.equations, prog.outputs), name_stack()
    for eqn in prog.equations:
        xs = [read(env, v) for v in eqn.invars]
        ds = [derivatives_of.get(v) if isinstance(v, Var) else None for v in eqn.invars]
        rule = None if all(d is None for d in ds) else lookup(eqn)
        active = tuple(d is not None for d in ds)
        if rule is None or not any(rule.active(eqn, active)):
            write(env, eqn.outvars, bind(eqn, xs, outer))
        else:
            with source(eqn, outer), context(eqn):
                ys, dys = _equation(rule, eqn, xs, ds, active)
            write(env, eqn.outvars, ys)
            pairs = zip(eqn.outvars, dys, strict=True)
            derivatives_of.update(
                (v, d) for v, d in pairs if d is not None and differentiable(v.aval)
            )
        for v in drop.get(id(eqn), ()):
            env.pop(v, None)
            derivatives_of.pop(v, None)
    out_ds = [derivatives_of.get(v) if isinstance(v, Var) else None for v in prog.outputs]
    return [read(env, v) for v in prog.outputs], out_ds


def _equation(rule: Rule, eqn: JaxprEqn, xs: Sequence[Value],
              ds: Sequence[Derivatives | None], active: Mask
              ) -> tuple[Sequence[Value], list[Derivatives | None]]:  # fmt: skip
    """Return the outputs of an equation and their derivatives.

    `ds` are the derivatives of the operands `xs`. `active` is a mask, True where `ds` is not None.
    """
    jacobians = [d.jacobian for d in ds if d is not None]
    operand_laplacians = [None if d is None else d.laplacian for d in ds]
    wanted = (True,) * len(eqn.outvars)
    ys: Sequence[Value] = apply(eqn, xs)
    first_order: Sequence[Value | None] = [None] * len(ys)
    if any(laplacian is not None for laplacian in operand_laplacians):
        first_order = push(rule, eqn, xs, operand_laplacians, wanted, False)[1]
    if isinstance(rule, Linear | Bilinear) or (isinstance(rule, Pointwise) and _same_shapes(eqn)):
        out_jacobians = jax.vmap(lambda *dxs: rule.push(eqn, xs, ys, spread(dxs, active)))(
            *jacobians
        )
        second_order: Sequence[Value | None] = [None] * len(ys)
        if isinstance(rule, Bilinear) and active[0] and active[1]:
            second_order = [_second_order_of_product(eqn, xs, jacobians)]
        elif isinstance(rule, Pointwise):
            second_order = [_second_order_of_pointwise(rule, eqn, xs, ds)]
    else:
        out_jacobians, second_order = _push_twice(rule, eqn, xs, jacobians, active)
    parts = zip(out_jacobians, first_order, second_order, strict=True)
    return ys, [None if j is None else Derivatives(j, _sum(a, b)) for j, a, b in parts]


def _same_shapes(eqn: JaxprEqn) -> bool:
    """Return whether all operands have the shape of the result: no operand is broadcast."""
    return all(shape(v) == shape(eqn.outvars[0]) for v in eqn.invars)


def _second_order_of_product(
    eqn: JaxprEqn, xs: Sequence[Value], jacobians: Sequence[Value]
) -> Value:
    """Return the second-order term of a product.

    It is twice the sum, over all slices, of the product of the two operands' slices.
    """
    a, b = jacobians
    products = jax.vmap(lambda a, b: apply(eqn, [a, b, *xs[2:]])[0])(a, b)
    total = lax.reduce_sum(products, (0,))
    return lax.mul(total, constant_like(total, 2))


def _second_order_of_pointwise(
    rule: Pointwise, eqn: JaxprEqn, xs: Sequence[Value], ds: Sequence[Derivatives | None]
) -> Value | None:
    """Return the second-order term of a pointwise operation.

    Each pair of operands contributes a product of two factors: the second partial derivative in
    both operands, and the product of their slices, summed over the slices. The sum over the second
    operand is one jvp of the first operand's slope, with those products as tangents.
    """
    (out,) = eqn.outvars
    total: Value | None = None
    for partial_derivative, operand in zip(rule.formulas, ds, strict=True):
        if operand is None:
            continue

        def slope(*xs: Value, d: Any = partial_derivative) -> list[Value]:
            (y,) = apply(eqn, xs)
            return [scale(lax.full_like(y, 1), rule.call(d, eqn, y, *xs))]

        prog = trace(slope, *[v.aval for v in eqn.invars])
        products = [None if other is None else _inner_product(operand.jacobian, other.jacobian)
                    for other in ds]  # fmt: skip
        total = _sum(total, jvp(prog, xs, products)[1][0])
    return None if total is None else shaped_like(total, zeros(out.aval))


def _inner_product(a: Value, b: Value) -> Value:
    """Return the elementwise product of two Jacobians, summed over slices."""
    return lax.reduce_sum(lax.mul(a, b), (0,))


def _push_twice(
    rule: Rule, eqn: JaxprEqn, xs: Sequence[Value], jacobians: Sequence[Value], active: Mask
) -> tuple[list[Value | None], list[Value | None]]:
    """Return the Jacobians and the second-order terms of any operation.

    The operation's push maps tangents of operands to tangents of results. Here the push and the
    derivative of the push are evaluated in the direction of each slice.
    """
    is_nonzero: list[bool] = []

    def out_tangents(*args: Value) -> list[Value]:
        xs, dxs = args[: len(active)], spread(args[len(active) :], active)
        dys = push(rule, eqn, xs, dxs, (True,) * len(eqn.outvars), False)[1]
        is_nonzero[:] = [dy is not None for dy in dys]
        return gather(dys, tuple(is_nonzero))

    avals = [v.aval for v in eqn.invars]
    prog = trace(out_tangents, *avals, *map(tangent_aval, gather(avals, active)))

    def along_slice(*dxs: Value) -> tuple[list[Value], list[Value]]:
        no_tangents = [None] * len(dxs)
        dys, ddys = jvp(prog, [*xs, *dxs], [*spread(dxs, active), *no_tangents])
        return dys, instantiate(ddys, prog.outputs)

    dys, ddys = jax.vmap(along_slice)(*jacobians)
    second_order = [lax.reduce_sum(ddy, (0,)) for ddy in ddys]
    return spread(dys, is_nonzero), spread(second_order, is_nonzero)


def _sum(a: Value | None, b: Value | None) -> Value | None:
    """Return the sum; None stands for zero."""
    terms = [x for x in (a, b) if x is not None]
    return add(terms) if terms else None
