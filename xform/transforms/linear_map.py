"""What `vjp` and `linearize` return: a linear map as a pytree of residuals.

Since they are pytrees, such maps may leave a jitted function, be batched, or be carried in a loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from xform._jax import float0_zeros, tangent_aval, zeros
from xform.errors import WrongCotangent, WrongTangent
from xform.interpret import emit
from xform.interpret.joint import Plan
from xform.interpret.node import gather, spread
from xform.table import Value, differentiable
from xform.transforms.function import Function, Tree, as_array


class LinearMap:
    """The second part of a planned function, with what it kept of the first.

    Everything but the arrays is in the tree's structure; `at` makes a map from a first run.
    """

    def __init__(self, fun: Function, plan: Plan, kept: Any, reads: Any):
        self._fun, self._plan, self._kept, self._reads = fun, plan, kept, reads

    @classmethod
    def at(cls, fun: Function, plan: Plan, kept: list[Any], args: Sequence[Value]) -> Self:
        """The map that a forward run leaves, with the inputs that it still reads."""
        return cls(fun, plan, kept, gather(args, plan.reads))

    def _second(self, seconds: Sequence[Value]) -> list[Value]:
        """Results in the places of the inputs (outputs, for a push); None where zero."""
        joint, args = self._plan.joint, spread(self._reads, self._plan.reads)
        given = gather(seconds, joint.seconds)
        results = emit.second(self._plan, self._kept, args, given, True, whole=True)
        return spread(results, joint.results)

    def tree_flatten(self) -> tuple[tuple[Any, Any], tuple[Function, Plan]]:
        """The kept values and the inputs that are read; all else is static."""
        return (self._kept, self._reads), (self._fun, self._plan)

    @classmethod
    def tree_unflatten(cls, static: tuple[Function, Plan], children: tuple[Any, Any]) -> Self:
        """The map with other arrays in its place."""
        return cls(*static, *children)


@jax.tree_util.register_pytree_node_class
class Pullback(LinearMap):
    """The function that `vjp` returns."""

    def __call__(self, ct: Tree, *more: Any) -> tuple[Tree, ...]:
        """Cotangents like the primals, from one like the output."""
        fun = self._fun
        if more:
            raise WrongCotangent(
                f"pullback of {fun.name}",
                f"it was called with {1 + len(more)} arguments",
                "",
                "pass one cotangent with the tree of the function's output, such as a tuple",
            )
        cts, tree = jax.tree.flatten(ct)
        if tree != fun.out_tree:
            raise WrongCotangent(
                f"pullback of {fun.name}",
                f"the cotangent's tree is {tree}, the output's is {fun.out_tree}",
                "",
                "pass a cotangent with the tree of the function's output",
            )
        checked = [_cotangent(x, a, fun.name) for x, a in zip(cts, fun.out_avals, strict=True)]
        auxiliary = [None] * (len(fun.program.outputs) - fun.n_out)
        results = self._second([*checked, *auxiliary])[fun.n_consts :]
        return fun.in_tree.unflatten(map(dense, results, fun.primal_avals))


@jax.tree_util.register_pytree_node_class
class Pushforward(LinearMap):
    """The function that `linearize` returns."""

    def __call__(self, *tangents: Tree) -> Tree:
        """A tangent like the output, from tangents like the primals."""
        fun = self._fun
        dxs = check_tangents(fun, "linearize", tangents)
        results = self._second([*[None] * fun.n_consts, *dxs])[: fun.n_out]
        return fun.out_tree.unflatten(map(dense, results, fun.out_avals))


def dense(value: Value, aval: Any) -> Value:
    """A tangent or cotangent with its zeros written out; float0 for integers."""
    if value is not None:
        return value
    wanted = tangent_aval(aval)
    return float0_zeros(aval.shape) if wanted.dtype == jax.dtypes.float0 else zeros(wanted)


def _cotangent(ct: Value, aval: Any, name: str) -> Value:
    """A cotangent, checked against the output that it belongs to."""
    given = jax.typeof(ct)
    integer = not jnp.issubdtype(aval.dtype, np.inexact)
    if given.shape != aval.shape or not (given.dtype == aval.dtype or integer):
        raise WrongCotangent(
            f"pullback of {name}",
            f"a cotangent is {given.str_short()}, the output it belongs to {aval.str_short()}",
            "",
            "pass a cotangent of the output's shape and dtype",
        )
    return ct if integer else as_array(ct, f"pullback of {name}")


def check_tangents(fun: Function, asked: str, tangents: tuple[Tree, ...]) -> list[Value]:
    """Flat tangents of a function's primals, checked against them; None for integers."""
    leaves, tree = jax.tree.flatten(tangents)
    if tree != fun.in_tree:
        raise WrongTangent(
            f"{asked} of {fun.name}",
            f"the tangents' tree is {tree}, the primals' is {fun.in_tree}",
            "",
            "pass tangents with the tree of the primals",
        )
    out: list[Value] = []
    for x, aval in zip(leaves, fun.primal_avals, strict=True):
        given, active = jax.typeof(x), differentiable(aval)
        if given.dtype != tangent_aval(aval).dtype or given.shape != aval.shape:
            raise WrongTangent(
                f"{asked} of {fun.name}",
                f"a tangent is {given.str_short()}, but its primal {aval.str_short()} wants "
                f"{tangent_aval(aval).str_short()}",
                "",
                "pass tangents of the primals' shapes and dtypes; for integers, "
                "np.zeros(shape, jax.dtypes.float0)",
            )
        out.append(as_array(x, asked) if active else None)
    return out
