"""`laplacian`: the sum of second derivatives, in one pass forward.

Each value goes with its Jacobian, one slice for each input element, and its Laplacian. An operation
that is linear does to each of the two what it does to the value. Of any other, the second
derivative comes in: along each slice of the Jacobian of what it was applied to, summed.
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
from xform.arithmetic import (
    Value,
    add,
    constant_like,
    differentiable,
    instantiate,
    like,
    scale,
)
from xform.callables import check_callable, function_name
from xform.cost import shape
from xform.errors import WrongDtype
from xform.interpret.jvp import jvp, push
from xform.ir import (
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
from xform.passes.inline import opened
from xform.source import name_stack, source
from xform.sparse.walk import opens
from xform.table import Rule, lookup
from xform.transforms.function import as_array, numbers, partial, positions
from xform.words import Bilinear, Linear, Pointwise


@dataclasses.dataclass(frozen=True)
class Moving:
    """What goes with a value of shape `[...]`.

    Attributes:
      jacobian: its derivative in each input element, `[n, ...]`.
      laplacian: the sum of its second derivatives, `[...]`; None: zero.
    """

    jacobian: Value
    laplacian: Value | None


def laplacian(
    f: Callable[..., Any], argnums: int | Sequence[int] = 0, jacobian: bool = False
) -> Callable[..., Any]:
    """The Laplacian of `f`: the sum over all input elements of the second derivative in each.

    Args:
      f: pure function of pytrees of real arrays, to a pytree of such.
      argnums: position or positions of the arguments whose elements are summed over.
      jacobian: whether the value and the Jacobian are returned too, which are there anyhow.

    Returns:
      A function of the arguments of `f`. Its value is the Laplacian of each element of the output,
      in the tree, shapes and dtypes of the output; with `jacobian` it is a tuple of the value, the
      Jacobian, where each leaf has shape `[n, *output]` for `n` input elements, leaf by leaf, and
      the Laplacian.

    Raises:
      WrongDtype: an input or output is not real.
      MissingRule: a primitive in `f` has no rule.
      NotDifferentiable: something in `f` has no forward mode.

    Cost: each operation once for the value, once for the Laplacian, and once for each input element
    for the Jacobian, in one batch; no reverse pass. Memory for `n` times the largest values that
    live together. A trace of `xform.hessian` takes more than twice the time.
    Source: Li et al., "A computational framework for neural network-based variational Monte Carlo
    with Forward Laplacian", Nature Machine Intelligence 6 (2024).

    >>> float(xform.laplacian(lambda x: jnp.sum(x**3))(jnp.array([1.0, 2.0])))
    18.0
    >>> y, dy, lap = xform.laplacian(lambda x: x @ x, jacobian=True)(jnp.array([1.0, 2.0]))
    >>> float(y), dy.tolist(), float(lap)
    (5.0, [2.0, 4.0], 4.0)
    """
    check_callable(f, "laplacian")
    numbers(argnums, "laplacian", "argnums")
    asked = f"laplacian of {function_name(f)}"

    @functools.wraps(f, updated=())
    def laplacian_of(*args: Any, **kwargs: Any) -> Any:
        held, primals = partial(f, positions(argnums, len(args), "laplacian"), args, kwargs)
        leaves, tree = jax.tree.flatten(primals)
        xs = [as_array(x, "laplacian") for x in leaves]
        _check(xs, asked, "an input")
        trees: list[Any] = []

        def flat(*xs: Value) -> list[Value]:
            ys, out = jax.tree.flatten(held(*jax.tree.unflatten(tree, xs)))
            trees.append(out)
            return ys

        prog = trace(flat, *xs)
        _check(prog.out_avals, asked, "an output")
        n = sum(x.size for x in xs)
        eye = jnp.split(jnp.eye(n), np.cumsum([x.size for x in xs])[:-1], axis=1)
        moving: list[Moving | None] = [
            Moving(e.reshape(n, *x.shape).astype(x.dtype), None)
            for e, x in zip(eye, xs, strict=True)
        ]
        ys, moved = forward(prog, xs, moving)
        laplacians = [zeros(a) if m is None or m.laplacian is None else m.laplacian
                      for m, a in zip(moved, prog.out_avals, strict=True)]  # fmt: skip
        unflat = functools.partial(jax.tree.unflatten, trees[0])
        if not jacobian:
            return unflat(laplacians)
        slices = [jnp.zeros((n, *a.shape), a.dtype) if m is None else m.jacobian
                  for m, a in zip(moved, prog.out_avals, strict=True)]  # fmt: skip
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


def forward(prog: Program, args: Sequence[Value], moving: Sequence[Moving | None]
            ) -> tuple[list[Value], list[Moving | None]]:  # fmt: skip
    """Outputs of a program, and what goes with them; None for those that do not move."""
    prog = opened(prog, opens)
    env = environment(prog, args)
    moves = {v: m for v, m in zip(prog.inputs, moving, strict=True) if m is not None}
    drop, outer = last_uses(prog.equations, prog.outputs), name_stack()
    for eqn in prog.equations:
        xs = [read(env, v) for v in eqn.invars]
        ms = [moves.get(v) if isinstance(v, Var) else None for v in eqn.invars]
        rule = None if all(m is None for m in ms) else lookup(eqn)
        on = tuple(m is not None for m in ms)
        if rule is None or not any(rule.active(eqn, on)):
            write(env, eqn.outvars, bind(eqn, xs, outer))
        else:
            with source(eqn, outer), eqn.ctx.manager:
                ys, found = _equation(rule, eqn, xs, ms, on)
            write(env, eqn.outvars, ys)
            pairs = zip(eqn.outvars, found, strict=True)
            moves.update((v, m) for v, m in pairs if m is not None and differentiable(v.aval))
        for v in drop.get(id(eqn), ()):
            env.pop(v, None)
            moves.pop(v, None)
    ends = [moves.get(v) if isinstance(v, Var) else None for v in prog.outputs]
    return [read(env, v) for v in prog.outputs], ends


def _equation(rule: Rule, eqn: JaxprEqn, xs: Sequence[Value], ms: Sequence[Moving | None], on: Mask
              ) -> tuple[Sequence[Value], list[Moving | None]]:  # fmt: skip
    """The outputs of an equation, and what goes with them."""
    jacobians = [m.jacobian for m in ms if m is not None]
    laps = [None if m is None else m.laplacian for m in ms]
    wanted = (True,) * len(eqn.outvars)
    ys: Sequence[Value] = apply(eqn, xs)
    straight: Sequence[Value | None] = [None] * len(ys)
    if any(lap is not None for lap in laps):
        straight = push(rule, eqn, xs, laps, wanted, False)[1]
    if isinstance(rule, Linear | Bilinear) or (isinstance(rule, Pointwise) and _alike(eqn)):
        slices = jax.vmap(lambda *dxs: rule.push(eqn, xs, ys, spread(dxs, on)))(*jacobians)
        bent: Sequence[Value | None] = [None] * len(ys)
        if isinstance(rule, Bilinear) and on[0] and on[1]:
            bent = [_product(eqn, xs, jacobians)]
        elif isinstance(rule, Pointwise):
            bent = [_curvature(rule, eqn, xs, ms)]
    else:
        slices, bent = _second(rule, eqn, xs, jacobians, on)
    parts = zip(slices, straight, bent, strict=True)
    return ys, [None if j is None else Moving(j, _sum(a, b)) for j, a, b in parts]


def _alike(eqn: JaxprEqn) -> bool:
    """Whether all operands have the shape of the result: a scalar may meet an array."""
    return all(shape(v) == shape(eqn.outvars[0]) for v in eqn.invars)


def _product(eqn: JaxprEqn, xs: Sequence[Value], jacobians: Sequence[Value]) -> Value:
    """Twice the sum of products of the two operands' slices."""
    a, b = jacobians
    terms = jax.vmap(lambda a, b: apply(eqn, [a, b, *xs[2:]])[0])(a, b)
    return _doubled(lax.reduce_sum(terms, (0,)))


def _doubled(x: Value) -> Value:
    return lax.mul(x, constant_like(x, 2))


def _curvature(rule: Pointwise, eqn: JaxprEqn, xs: Sequence[Value], ms: Sequence[Moving | None]
               ) -> Value | None:  # fmt: skip
    """Second partial derivatives, each times the sum of products of two operands' slices."""
    (out,) = eqn.outvars
    total: Value | None = None
    for partial_derivative, m in zip(rule.formulas, ms, strict=True):
        if m is None:
            continue

        def slope(*xs: Value, d: Any = partial_derivative) -> list[Value]:
            (y,) = apply(eqn, xs)
            return [scale(lax.full_like(y, 1), rule.call(d, eqn, y, *xs))]

        prog = trace(slope, *[v.aval for v in eqn.invars])
        sums = [None if other is None else _inner(m.jacobian, other.jacobian) for other in ms]
        total = _sum(total, jvp(prog, xs, sums)[1][0])
    return None if total is None else like(total, zeros(out.aval))


def _inner(a: Value, b: Value) -> Value:
    """The sum over slices of products, element by element."""
    return lax.reduce_sum(lax.mul(a, b), (0,))


def _second(rule: Rule, eqn: JaxprEqn, xs: Sequence[Value], jacobians: Sequence[Value], on: Mask
            ) -> tuple[list[Value | None], list[Value | None]]:  # fmt: skip
    """Of any operation, by the derivative of its push along each slice itself."""
    moves: list[bool] = []

    def pushed(*args: Value) -> list[Value]:
        dxs = spread(args[len(on) :], on)
        dys = push(rule, eqn, args[: len(on)], dxs, (True,) * len(eqn.outvars), False)[1]
        moves[:] = [dy is not None for dy in dys]
        return gather(dys, tuple(moves))

    avals = [v.aval for v in eqn.invars]
    prog = trace(pushed, *avals, *map(tangent_aval, gather(avals, on)))

    def along(*dxs: Value) -> tuple[list[Value], list[Value]]:
        none = [None] * len(dxs)
        dys, ddys = jvp(prog, [*xs, *dxs], [*spread(dxs, on), *none])
        return dys, instantiate(ddys, prog.outputs)

    dys, ddys = jax.vmap(along)(*jacobians)
    bent = [lax.reduce_sum(dd, (0,)) for dd in ddys]
    return spread(dys, moves), spread(bent, moves)


def _sum(a: Value | None, b: Value | None) -> Value | None:
    terms = [x for x in (a, b) if x is not None]
    return add(terms) if terms else None
