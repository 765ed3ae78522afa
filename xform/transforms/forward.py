"""`jvp` and `linearize`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from xform.errors import WrongTangent
from xform.interpret import emit
from xform.interpret import jvp as push
from xform.interpret.joint import Plan, analyze
from xform.interpret.node import gather, spread
from xform.planner.saved import plan
from xform.table import Value, differentiable
from xform.transforms.function import Function, Tree, as_array, dense, function


def jvp(
    f: Callable[..., Any], primals: Sequence[Tree], tangents: Sequence[Tree], has_aux: bool = False
) -> Any:
    """Evaluate `f` and push tangents forward through it, in one pass.

    For `f : R^n -> R^m` at `x` this returns `f(x)` and `J(x) dx`.

    Args:
      f: pure function of pytrees of arrays.
      primals: the point, a tuple or list of arguments.
      tangents: like `primals`; of dtype float0 where a primal is an integer.
      has_aux: whether `f` returns a pair, of which the second is passed through.

    Returns:
      The output and its tangent (and the auxiliary output).

    Raises:
      WrongTangent: `tangents` do not match `primals`.
      MissingRule: a primitive in `f` has no rule.
      NotDifferentiable: `f` calls a custom_vjp function, which has no forward mode.

    Cost: two to three times the FLOPs of `f`; memory about twice that of `f`.
    Source: Griewank and Walther, "Evaluating Derivatives", 2nd edition, section 3.1.

    >>> y, dy = xform.jvp(lambda x: x * x, (3.0,), (1.0,))
    >>> float(dy)
    6.0
    """
    for name, value in (("primals", primals), ("tangents", tangents)):
        if not isinstance(value, tuple | list):
            raise WrongTangent(
                "jvp", f"{name} is a {type(value).__name__}", "", f"pass {name} as a tuple or list"
            )
    fun = function(f, primals, "jvp", has_aux)
    dxs = _tangents(fun.name, "jvp", tuple(primals), tuple(tangents), fun.primal_avals)
    ys, dys = push.jvp(fun.program, fun.args, [*[None] * fun.n_consts, *dxs])
    dys = [dense(dy, a) for dy, a in zip(dys[: fun.n_out], fun.out_avals, strict=True)]
    y, aux = fun.outputs(ys)
    dy = jax.tree.unflatten(fun.out_tree, dys)
    return (y, dy, aux) if has_aux else (y, dy)


def _tangents(name: str, asked: str, primals: Tree, tangents: Tree, avals: Sequence[Any]):
    """Flat tangents, None where a primal has none, checked against their primals."""
    return check_tangents(name, asked, jax.tree.structure(primals), tangents, avals)


def check_tangents(name: str, asked: str, tree: Any, tangents: Tree, avals: Sequence[Any]):
    """Flat tangents of inputs of given tree and types; None for integers."""
    leaves, given_tree = jax.tree.flatten(tangents)
    if given_tree != tree:
        raise WrongTangent(
            f"{asked} of {name}",
            f"the tangents' tree is {given_tree}, the primals' is {tree}",
            "",
            "pass tangents with the tree of the primals",
        )
    out: list[Value] = []
    for x, aval in zip(leaves, avals, strict=True):
        given = jax.typeof(x)
        active = differentiable(aval)
        fits = given.dtype == (aval.dtype if active else jax.dtypes.float0)
        if not fits or given.shape != aval.shape:
            wanted = aval.str_short() if active else f"float0[{','.join(map(str, aval.shape))}]"
            raise WrongTangent(
                f"{asked} of {name}",
                f"a tangent is {given.str_short()}, its primal {aval.str_short()} wants {wanted}",
                "",
                "pass tangents of the primals' shapes and dtypes; for integers, "
                "np.zeros(shape, jax.dtypes.float0)",
            )
        out.append(as_array(x, asked) if active else None)
    return out


@jax.tree_util.register_pytree_node_class
class Pushforward:
    """The linear map that `linearize` returns: a pytree of residuals."""

    def __init__(self, static: _Static, kept: list[Any], reads: list[Value]):
        self._static, self._kept, self._reads = static, kept, reads

    def __call__(self, *tangents: Tree) -> Tree:
        static = self._static
        dxs = check_tangents(
            static.name, "linearize", static.in_tree, tangents, static.in_avals
        )
        joint = static.plan.joint
        seconds = gather([*[None] * static.n_consts, *dxs], joint.seconds)
        args = spread(self._reads, static.plan.reads)
        results = emit.second(static.plan, self._kept, args, seconds, True, whole=True)
        full = spread(results, joint.results)[: len(static.out_avals)]
        return jax.tree.unflatten(
            static.out_tree, [dense(x, a) for x, a in zip(full, static.out_avals, strict=True)]
        )

    def tree_flatten(self):
        return (self._kept, self._reads), self._static

    @classmethod
    def tree_unflatten(cls, static: _Static, children: Any):
        return cls(static, *children)


class _Static:
    """What a Pushforward knows besides its residuals."""

    def __init__(self, fun: Function, how: Plan):
        self.name, self.plan, self.n_consts = fun.name, how, fun.n_consts
        self.in_tree, self.out_tree = fun.in_tree, fun.out_tree
        self.in_avals, self.out_avals = fun.primal_avals, fun.out_avals


def linearize(f: Callable[..., Any], *primals: Tree, has_aux: bool = False) -> Any:
    """Evaluate `f` and return the linear map that is its derivative there.

    For `f : R^n -> R^m` at `x` this returns `y = f(x)` and `push`, with `push(dx) = J(x) dx`.

    Args:
      f: pure function of pytrees of arrays.
      *primals: the point; float leaves of any shape, other leaves are held constant.
      has_aux: whether `f` returns a pair, of which the second is passed through.

    Returns:
      `y`, and `push` (and the auxiliary output). `push` is a pytree of residuals; it takes tangents
      like `primals` and returns one like `y`.

    Raises:
      MissingRule: a primitive in `f` has no rule.
      WrongTangent: `push` was given something unlike `primals`.

    Cost: one evaluation of `f`, and about one more for each call of `push`, which holds every
    residual; see `remat` to trade memory for time.
    Source: Radul et al., "You Only Linearize Once", arXiv:2204.10923, section 4.

    >>> y, push = xform.linearize(jnp.sin, 0.0)
    >>> float(push(2.0))
    2.0
    """
    fun = function(f, primals, "linearize", has_aux)
    how = plan(analyze(fun.program, fun.active(), push=True), top=True)
    outs, kept = emit.forward(how, fun.args)
    y, aux = fun.outputs(outs)
    push_ = Pushforward(_Static(fun, how), kept, gather(fun.args, how.reads))
    return (y, push_, aux) if has_aux else (y, push_)
