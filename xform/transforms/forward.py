"""`jvp` and `linearize`: forward-mode derivatives at a point.

Under `jit`, `linearize` traces the function and its pushforward into one program, a Joint
(`interpret/joint.py`), whose Schedule says which values the pushforward reads from memory. Outside
`jit`, and for `jvp`, each operation is differentiated as it happens (`transforms/eager.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from xform._jax import has_effects, staging, tangent_aval
from xform.errors import MissingRule, UnsupportedParam
from xform.interpret import emit
from xform.interpret.joint import analyze
from xform.interpret.jvp import jvp as interpret
from xform.planner.decide import schedule
from xform.program.arithmetic import Value, as_jax_values
from xform.program.ir import seldom_collected
from xform.transforms import eager
from xform.transforms.function import FunctionCall, Tree, as_tuple, function_call, trace_function
from xform.transforms.linear_map import PlannedRunner, Pushforward, dense
from xform.transforms.seeds import check_tangents


def jvp(
    f: Callable[..., Any], primals: Sequence[Tree], tangents: Sequence[Tree], has_aux: bool = False
) -> Any:
    """Evaluate `f` and push tangents forward through it, in one pass.

    For `f : R^n -> R^m` at `x` this returns `f(x)` and `J(x) dx`.

    Args:
      f: pure function of pytrees of arrays.
      primals: the point, a tuple or list of arguments.
      tangents: one for each primal, of its tree, shape and dtype; of dtype float0 for integers.
      has_aux: whether `f` returns a pair `(output, auxiliary)`; the second is not differentiated.

    Returns:
      The output and its tangent (and the auxiliary output, with `has_aux`).

    Raises:
      WrongArgument: `primals` or `tangents` is neither a tuple nor a list.
      WrongTangent: `tangents` do not match `primals`.
      MissingRule: a primitive in `f` has no rule.
      NotDifferentiable: `f` calls a `custom_vjp` function, which has no forward mode.

    Cost: two to three times the FLOPs of `f`; memory about twice that of `f`.
    Source: Griewank and Walther, "Evaluating Derivatives", 2nd edition, section 3.1.

    >>> y, dy = xform.jvp(lambda x: x * x, (3.0,), (1.0,))
    >>> float(dy)
    6.0
    """
    primals, tangents = as_tuple(primals, "primals", "jvp"), as_tuple(tangents, "tangents", "jvp")
    at = function_call(f, primals, "jvp", has_aux)
    avals = list(map(jax.typeof, at.args))
    dxs = check_tangents(at.name, at.in_tree, avals, "jvp", tangents)
    trace = eager.push_trace()
    try:
        with seldom_collected(staging()):
            y, dy, aux = eager.jvp(at, dxs, trace)
    except _REFUSALS:
        # No retry if `f` asked which values have tangents: a trace would give another answer.
        if not staging() or trace.tag_was_read or (result := _pruned(at, dxs)) is None:
            raise
        y, dy, aux = result
    return (y, dy, aux) if has_aux else (y, dy)


# `NotDifferentiable` is a TypeError. JAX raises other TypeErrors for a view of a reference.
_REFUSALS = (MissingRule, UnsupportedParam, TypeError)


def _pruned(at: FunctionCall, dxs: Sequence[Value]) -> tuple[Tree, Tree, Tree] | None:
    """Trace the call, and push tangents only through the operations that an output needs.

    The other operations may lack a forward mode. Return the output, its tangent and the auxiliary
    output; None if an output needs such an operation, or if the program has side effects, because
    the first attempt has run those.
    """
    fun, args = trace_function(at)
    if any(map(has_effects, fun.program.equations)):
        return None
    try:
        ys, dys = interpret(fun.program, args, [*[None] * fun.n_consts, *as_jax_values(dxs)])
    except _REFUSALS:
        return None
    y, aux = fun.outputs(ys)
    dy = map(dense, dys, map(tangent_aval, fun.signature.out_avals))
    return y, fun.signature.out_tree.unflatten(dy), aux


def linearize(
    f: Callable[..., Any], *primals: Tree, has_aux: bool = False, in_nzs: Any = None
) -> Any:
    """Evaluate `f` and return its derivative at that point as a linear map.

    For `f : R^n -> R^m` at `x` this returns `y = f(x)` and `push`, with `push(dx) = J(x) dx`.

    Args:
      f: pure function of pytrees of arrays.
      *primals: the point; float leaves of any shape, other leaves are held constant.
      has_aux: whether `f` returns a pair `(output, auxiliary)`; the second is not differentiated.
      in_nzs: a bool, or a tree of bools that is a prefix of `primals`: which primals may have a
        tangent; None for all. The tangents of the others are ignored.

    Returns:
      `y` and `push` (and the auxiliary output, with `has_aux`). `push` is a pytree of residuals. It
      takes tangents like `primals` and returns one like `y`. `push.out_nzs` says which outputs
      depend on the tangents.

    Raises:
      WrongArgument: `in_nzs` is not a tree of bools that is a prefix of `primals`.
      MissingRule: a primitive in `f` has no rule.
      WrongTangent: the tangents given to `push` do not match `primals`.

    Cost: one evaluation of `f`, and about one more for each call of `push`, which holds every
    residual; see `remat` to trade time for memory.
    Source: Radul et al., "You Only Linearize Once", arXiv:2204.10923, section 4.

    >>> y, push = xform.linearize(jnp.sin, 0.0)
    >>> float(push(2.0))
    2.0
    """
    at = function_call(f, primals, "linearize", has_aux, in_nzs)
    if not staging():
        y, push, aux = eager.linearize(at)
    else:
        fun, args = trace_function(at)
        chosen = schedule(analyze(fun.program, fun.active(), push=True))
        outs, saved = emit.forward(chosen, args)
        y, aux = fun.outputs(outs)
        runner = PlannedRunner(fun, chosen, push=True)
        push = Pushforward(fun.signature, runner, runner.arrays(saved, args))
    return (y, push, aux) if has_aux else (y, push)
