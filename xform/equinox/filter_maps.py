"""`xform.equinox.filter_vjp` and `filter_jvp`: derivatives of functions of any pytrees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax

from xform._jax import current_trace
from xform.equinox.filter_calls import Function
from xform.errors import WrongTangent
from xform.interpret.concrete import TangentTracer
from xform.transforms import forward, reverse
from xform.transforms.function import Tree, as_tuple


def filter_vjp(fun: Function, *primals: Tree, has_aux: bool = False, policy: Any = None) -> Any:
    """Evaluate a function and return the map that pulls cotangents back through it.

    Args:
      fun: function of any pytrees.
      *primals: the point, the arguments of `fun`.
      has_aux: whether `fun` returns a pair `(output, auxiliary)`.
      policy: which values are saved for the backward pass: a policy of `xform.policies` or
        `jax.checkpoint_policies`, or its text, such as "save_dots". None is the default of
        `xform.vjp`.

    Returns:
      `(output, pull)`, or `(output, pull, auxiliary)` with `has_aux`. `pull` maps a cotangent of
      the output to a tuple with the cotangent of each primal. Cotangents have the structure of
      their values, with None for everything but arrays of floats and complex numbers.

    Raises:
      MissingRule: a primitive in `fun` has no derivative rule.
      WrongCotangent: the cotangent given to `pull` does not match the output.

    Cost: one evaluation of `fun`, and for each call of `pull` two to three times its FLOPs, plus
    what the policy recomputes.

    >>> y, pull = xform.equinox.filter_vjp(lambda tree: (tree[0] * 2, tree[1]), (jnp.ones(2), "a"))
    >>> pull((jnp.ones(2), None))[0][0].tolist(), y[1]
    ([2.0, 2.0], 'a')
    """
    wrt, held = eqx.partition(primals, eqx.is_inexact_array)

    def pure(*wrt: Tree) -> Any:
        out = fun(*eqx.combine(wrt, held))
        out, aux = out if has_aux else (out, None)
        outputs, rest = eqx.partition(out, eqx.is_inexact_array)
        return outputs, (rest, aux)

    outputs, pull, (rest, aux) = reverse.vjp(pure, *wrt, has_aux=True, policy=policy)
    out = eqx.combine(outputs, rest)
    return (out, pull, aux) if has_aux else (out, pull)


def filter_jvp(
    fn: Function, primals: Sequence[Tree], tangents: Sequence[Tree], **kwargs: Any
) -> tuple[Tree, Tree]:
    """Evaluate a function and push tangents forward through it.

    Args:
      fn: function of any pytrees.
      primals: the point, a sequence of arguments.
      tangents: a tangent for each leaf of `primals`, or None to hold the leaf constant.
      **kwargs: keyword arguments of `fn`, held constant.

    Returns:
      The output and its tangent. The tangent has None for leaves that are not arrays or do not
      depend on the tangents.

    Raises:
      WrongArgument: `primals` or `tangents` is not a tuple or list.
      WrongTangent: `tangents` does not have the structure of `primals`.
      MissingRule: a primitive in `fn` has no derivative rule.
      NotDifferentiable: `fn` calls a `custom_vjp` function, which has no forward mode.

    Cost: two to three times the FLOPs of `fn`; memory about twice that of `fn`.

    >>> y, dy = xform.equinox.filter_jvp(lambda x, y: (x * y, y, "a"), (2.0, 3.0), (1.0, None))
    >>> float(dy[0]), dy[1], dy[2]
    (3.0, None, None)
    """
    primals = as_tuple(primals, "primals", "filter_jvp")
    tangents = as_tuple(tangents, "tangents", "filter_jvp")
    is_none = lambda x: x is None
    primals_tree, tangents_tree = (
        jax.tree.structure(t, is_leaf=is_none) for t in (primals, tangents)
    )
    if primals_tree != tangents_tree:
        raise WrongTangent(
            "filter_jvp",
            f"the tangents have the structure {tangents_tree}, the primals {primals_tree}",
            "",
            "pass a tangent, or None, for each leaf of the primals",
        )
    is_held = jax.tree.map(is_none, tangents, is_leaf=is_none)
    held, wrt = eqx.partition(primals, is_held)
    leaves, tree = jax.tree.flatten(wrt)

    def pure(*leaves: Any) -> Any:
        """Return the outputs that have a tangent, and the other outputs."""
        trace: Any = current_trace()
        tag = trace.tag
        out = fn(*eqx.combine(jax.tree.unflatten(tree, leaves), held), **kwargs)
        has_tangent = lambda x: isinstance(x, TangentTracer) and x._trace.tag is tag
        return eqx.partition(out, has_tangent)

    y, tangent, constant = forward.jvp(pure, leaves, jax.tree.leaves(tangents), has_aux=True)
    return eqx.combine(y, constant), tangent
