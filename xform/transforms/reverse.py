"""`vjp`, `grad`, `value_and_grad`, `fwd_and_bwd`, `linear_transpose`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from xform.errors import NotScalar, WrongCotangent, WrongDtype
from xform.interpret import emit
from xform.interpret.joint import Plan, analyze
from xform.interpret.linear import check_linear
from xform.interpret.node import gather, spread
from xform.ir import Mask
from xform.planner.saved import plan
from xform.table import Value, zeros
from xform.transforms.function import (
    Function,
    Tree,
    as_array,
    dense,
    function,
    partial,
    positions,
)

Policy = Any


@jax.tree_util.register_pytree_node_class
class Pullback:
    """The function that `vjp` returns: a pytree of residuals, so it may leave a jitted function."""

    def __init__(self, static: _Static, kept: list[Any], reads: list[Value]):
        self._static, self._kept, self._reads = static, kept, reads

    def __call__(self, ct: Tree, *more: Any) -> tuple[Tree, ...]:
        static = self._static
        if more:
            raise WrongCotangent(
                f"pullback of {static.name}",
                f"it was called with {1 + len(more)} arguments",
                "",
                "pass one cotangent with the tree of the function's output, such as a tuple",
            )
        cts, tree = jax.tree.flatten(ct)
        if tree != static.out_tree:
            raise WrongCotangent(
                f"pullback of {static.name}",
                f"the cotangent's tree is {tree}, the output's is {static.out_tree}",
                "",
                "pass a cotangent with the tree of the function's output",
            )
        seconds = [
            _cotangent(ct, aval, static.name)
            for ct, aval in zip(cts, static.out_avals, strict=True)
        ]
        seconds = gather(seconds, static.plan.joint.seconds[: len(seconds)])
        args = spread(self._reads, static.plan.reads)
        results = emit.second(static.plan, self._kept, args, seconds, True, whole=True)
        full = spread(results, static.plan.joint.results)[static.n_consts :]
        return jax.tree.unflatten(
            static.in_tree, [dense(x, a) for x, a in zip(full, static.in_avals, strict=True)]
        )

    def tree_flatten(self):
        return (self._kept, self._reads), self._static

    @classmethod
    def tree_unflatten(cls, static: _Static, children: Any):
        return cls(static, *children)


class _Static:
    """What a Pullback knows besides its residuals."""

    def __init__(self, fun: Function, how: Plan):
        self.name, self.plan, self.n_consts = fun.name, how, fun.n_consts
        self.in_tree, self.out_tree = fun.in_tree, fun.out_tree
        self.in_avals, self.out_avals = fun.primal_avals, fun.out_avals


def _cotangent(ct: Value, aval: Any, name: str) -> Value:
    """A cotangent, checked against the output that it belongs to."""
    given = jax.typeof(ct)
    integer = not jax.numpy.issubdtype(aval.dtype, np.inexact)
    if given.shape != aval.shape or not (given.dtype == aval.dtype or integer):
        raise WrongCotangent(
            f"pullback of {name}",
            f"a cotangent is {given.str_short()}, the output it belongs to {aval.str_short()}",
            "",
            "pass a cotangent of the output's shape and dtype",
        )
    return ct if integer else as_array(ct, f"pullback of {name}")


def vjp(f: Callable[..., Any], *primals: Tree, has_aux: bool = False, policy: Policy = None):
    """Evaluate `f` and return the map that pulls cotangents back through it.

    For `f : R^n -> R^m` at `x` this returns `y = f(x)` and `pull`, with `pull(ct) = J(x)^T ct`
    (plain transpose for complex numbers, as in JAX).

    Args:
      f: pure function of pytrees of arrays.
      *primals: the point; float or complex leaves of any shape are differentiated, integer leaves
        receive cotangents of dtype float0.
      has_aux: whether `f` returns a pair, of which the second is passed through.
      policy: what is kept for `pull`, of `xform.policies` or `jax.checkpoint_policies`; None keeps
        what it reads.

    Returns:
      `y` and `pull` (and the auxiliary output). `pull` is a pytree of residuals; it takes a
      cotangent like `y` and returns a tuple of cotangents like `primals`.

    Raises:
      MissingRule: a primitive in `f` has no rule.
      WrongCotangent: `pull` was given something unlike `y`.

    Cost: one evaluation of `f`, and for each call of `pull` two to three times its FLOPs, plus what
    the policy recomputes.
    Source: Griewank and Walther, "Evaluating Derivatives", 2nd edition, chapter 3.

    >>> y, pull = xform.vjp(lambda x: x * x, 3.0)
    >>> float(pull(1.0)[0])
    6.0
    """
    fun = function(f, primals, "vjp", has_aux)
    wanted = _differentiable_outputs(fun)
    how = plan(analyze(fun.program, fun.active(), wanted), policy, top=True)
    outs, kept = emit.forward(how, fun.args)
    y, aux = fun.outputs(outs)
    pull = Pullback(_Static(fun, how), kept, gather(fun.args, how.reads))
    return (y, pull, aux) if has_aux else (y, pull)


def _differentiable_outputs(fun: Function) -> Mask:
    """The outputs that bring a cotangent: inexact ones, the auxiliary ones excepted."""
    on = (jax.numpy.issubdtype(a.dtype, np.inexact) for a in fun.out_avals)
    return (*on, *(False,) * (len(fun.program.outputs) - fun.n_out))


def value_and_grad(
    f: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    *,
    policy: Policy = None,
) -> Callable[..., Any]:
    """A function that returns the value of a scalar function and its gradient.

    Args:
      f: pure function of pytrees of arrays that returns a scalar.
      argnums: position or positions of the arguments to differentiate; all others, and keyword
        arguments, are held constant and may be any Python object.
      has_aux: whether `f` returns a pair, of which the second is passed through.
      holomorphic: whether `f` is complex-differentiable; inputs and output must be complex.
      allow_int: whether integer inputs are taken; their gradients have dtype float0.
      policy: what is kept for the backward pass, of `xform.policies` or `jax.checkpoint_policies`.

    Returns:
      A function with the arguments of `f`, that returns `(value, gradient)`, or
      `((value, auxiliary), gradient)`. The gradient has the tree, shapes and dtypes of the argument
      (a tuple of them if `argnums` is a sequence).

    Raises:
      NotScalar: `f` returned something other than a scalar.
      WrongDtype: an integer input without `allow_int`, or an output that is not real.
      MissingRule: a primitive in `f` has no rule.

    Cost: three to four times the FLOPs of `f`, plus what the policy recomputes.
    Source: Griewank and Walther, "Evaluating Derivatives", 2nd edition, chapter 3.

    >>> value, g = xform.value_and_grad(lambda x: x * x)(3.0)
    >>> float(value), float(g)
    (9.0, 6.0)
    """
    return _value_and_grad("value_and_grad", f, argnums, has_aux, holomorphic, allow_int, policy)


def grad(
    f: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    *,
    policy: Policy = None,
) -> Callable[..., Any]:
    """A function that returns the gradient of a scalar function.

    Arguments, errors and cost are those of `value_and_grad`; with `has_aux` the result is a pair
    `(gradient, auxiliary)`.

    >>> float(xform.grad(jnp.sin)(0.0))
    1.0
    """
    both = _value_and_grad("grad", f, argnums, has_aux, holomorphic, allow_int, policy)

    @functools.wraps(f, updated=())
    def gradient(*args: Any, **kwargs: Any) -> Any:
        value, g = both(*args, **kwargs)
        return (g, value[1]) if has_aux else g

    return gradient


def _value_and_grad(asked: str, f: Any, argnums: Any, has_aux: bool, holomorphic: bool,
                    allow_int: bool, policy: Policy) -> Callable[..., Any]:  # fmt: skip
    @functools.wraps(f, updated=())
    def both(*args: Any, **kwargs: Any) -> Any:
        held, given = partial(f, positions(argnums, len(args), asked), args, kwargs)
        for leaf in jax.tree.leaves(given):
            check_input(asked, leaf, holomorphic, allow_int)
        y, pull, *aux = vjp(held, *given, has_aux=has_aux, policy=policy)
        _check_scalar(asked, held.__name__, y)
        check_output(asked, y, holomorphic)
        g = pull(lax.full_like(y, 1))
        g = g[0] if isinstance(argnums, int | np.integer) else g
        return ((y, *aux) if has_aux else y), g

    return both


def _check_scalar(asked: str, name: str, y: Any) -> None:
    leaves, _ = jax.tree.flatten(y)
    if len(leaves) != 1 or leaves[0] is not y or np.shape(y) != ():
        kind = f"an array of shape {np.shape(y)}" if leaves and leaves[0] is y else f"{y!r}"
        raise NotScalar(
            f"{asked} of {name}: gradient only defined for scalar-output functions",
            f"it returned {kind}",
            "",
            "reduce the output to a scalar, or use vjp or jacrev",
        )


def check_input(asked: str, x: Any, holomorphic: bool, allow_int: bool) -> None:
    """Refuse an input that cannot be differentiated as asked."""
    dtype = jax.typeof(as_array(x, asked)).dtype
    inexact = jax.numpy.issubdtype(dtype, np.inexact)
    if holomorphic and not jax.numpy.issubdtype(dtype, np.complexfloating):
        raise WrongDtype(
            f"{asked} with holomorphic=True requires inputs with complex dtype",
            f"an input has dtype {dtype}",
            "",
            "pass complex inputs, or drop holomorphic",
        )
    if not inexact and not allow_int:
        raise WrongDtype(
            f"{asked} requires real- or complex-valued inputs (a sub-dtype of np.inexact)",
            f"an input has dtype {dtype}",
            "",
            "pass a float, name other arguments in argnums, or set allow_int=True",
        )


def check_output(asked: str, y: Tree, holomorphic: bool) -> None:
    """Refuse an output that cannot be differentiated as asked."""
    for leaf in jax.tree.leaves(y):
        dtype = jax.typeof(leaf).dtype
        kind = np.complexfloating if holomorphic else np.floating
        if not jax.numpy.issubdtype(dtype, kind):
            sort = "outputs with complex dtype" if holomorphic else "real-valued outputs"
            raise WrongDtype(
                f"{asked}{' with holomorphic=True' * holomorphic} requires {sort}",
                f"an output has dtype {dtype}",
                "",
                "use vjp, or set holomorphic=True if the function is complex-differentiable",
            )


def fwd_and_bwd(
    f: Callable[..., Any],
    argnums: int | Sequence[int],
    has_aux: bool = False,
    jitted: bool = True,
    *,
    policy: Policy = None,
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Two functions for the two passes, each compiled once and used many times.

    Args:
      f: pure function of pytrees of arrays.
      argnums: position or positions of the arguments to differentiate.
      has_aux: whether `f` returns a pair, of which the second is passed through.
      jitted: whether both are `jax.jit`-ed.
      policy: what is kept in between.

    Returns:
      `fwd(*args) -> (y, residuals)` (and the auxiliary output), `bwd(residuals, ct) -> cotangents`.

    >>> fwd, bwd = xform.fwd_and_bwd(jnp.sin, argnums=0)
    >>> y, residuals = fwd(0.0)
    >>> float(bwd(residuals, 2.0))
    2.0
    """

    def fwd(*args: Any, **kwargs: Any) -> Any:
        held, given = partial(f, positions(argnums, len(args), "fwd_and_bwd"), args, kwargs)
        return vjp(held, *given, has_aux=has_aux, policy=policy)

    def bwd(residuals: Pullback, ct: Tree) -> Any:
        cts = residuals(ct)
        return cts[0] if isinstance(argnums, int | np.integer) else cts

    return (jax.jit(fwd), jax.jit(bwd)) if jitted else (fwd, bwd)


def linear_transpose(f: Callable[..., Any], *primals: Tree) -> Callable[..., Any]:
    """The transpose of a linear function.

    Args:
      f: a function that is linear in all its arguments together.
      *primals: anything with the shapes and dtypes of its arguments; values are not used.

    Returns:
      A function from a cotangent like `f`'s output to a tuple of cotangents like `primals`.

    Raises:
      NotLinear: `f` is not linear; the message names the operation.

    >>> transpose = xform.linear_transpose(lambda x: 3.0 * x, jnp.float32(0))
    >>> float(transpose(2.0)[0])
    6.0
    """
    types = jax.tree.map(_type, primals)
    for leaf in jax.tree.leaves(types):
        check_input("linear_transpose", zeros_of(leaf), False, False)
    fun = function(f, jax.tree.map(zeros_of, types), "linear_transpose")
    joint = analyze(fun.program, fun.active(), _differentiable_outputs(fun))
    how = plan(joint, top=True)
    check_linear(how, fun.active())
    _, kept = emit.forward(how, fun.args, (False,) * len(fun.program.outputs))
    return Pullback(_Static(fun, how), kept, gather(fun.args, how.reads))


def _type(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(np.shape(x), x.dtype if hasattr(x, "dtype") else jax.typeof(x).dtype)


def zeros_of(t: jax.ShapeDtypeStruct) -> Value:
    return zeros(jax.typeof(jax.numpy.zeros(t.shape, t.dtype)))
