"""`xform.flax.vjp` and `jvp`: pull cotangents and push tangents through functions of NNX modules.

The cotangent or tangent of a module is a module of the same structure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from xform.flax.calls import accepts_nnx_calls
from xform.modules.boundary import Function, Mode, ModuleBoundary
from xform.transforms import forward, reverse
from xform.transforms.function import Tree, as_tuple


@accepts_nnx_calls(n_required=2)
def vjp(f: Function, *primals: Tree, has_aux: bool = False, policy: Any = None,
        graph: Mode = None, graph_updates: Mode = None) -> Any:  # fmt: skip
    """Evaluate a function of modules and return the map that pulls cotangents back through it.

    Args:
      f: function of modules, Variables and pytrees of arrays. It may change values of Variables,
        but not the structure of a module.
      *primals: the point, the arguments of `f`.
      has_aux: whether `f` returns a pair `(output, auxiliary)`.
      policy: which values are saved for the backward pass: a policy of `xform.policies` or
        `jax.checkpoint_policies`, or its text, such as "save_dots". None is the default of
        `xform.vjp`.
      graph: whether modules may share Variables; None for NNX's setting (`nnx.set_graph_mode`).
      graph_updates: must be None or False, because changes of structure cannot be written back.

    Returns:
      `(output, pull)`, or `(output, pull, auxiliary)` with `has_aux`. `pull` maps a cotangent of
      the output to a tuple with the cotangent of each primal. The cotangent of a module is a module
      with the cotangents of all its Variables; cotangents of integers have dtype float0.

    Raises:
      WrongArgument: `graph_updates` is True, or `f` is a bound method of a module.
      MissingRule: a primitive in `f` has no rule.
      WrongCotangent: the cotangent given to `pull` does not match the output.

    Cost: one evaluation of `f`, and for each call of `pull` two to three times the FLOPs of `f`,
    plus what the policy recomputes.

    >>> from flax import nnx
    >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    >>> y, pull = xform.flax.vjp(nnx.Linear.__call__, model, jnp.ones((3, 2)))
    >>> d_model, d_x = pull(jnp.ones_like(y))
    >>> d_model.bias[...].tolist()
    [3.0]
    """
    boundary = ModuleBoundary.without_updates("vjp", graph, graph_updates)
    with nnx.update_context(boundary.name):
        array_primals = boundary.enter(primals)
        pure = boundary.pure(f, has_aux)
        result: Any = reverse.vjp(pure, *array_primals, has_aux=True, policy=policy)
        y, pull, (aux, changes) = result
        y, aux = boundary.leave((y, aux), changes)
    # As a Partial the pullback is a pytree of residuals, which a jitted function may return.
    pull = jax.tree_util.Partial(_pull_modules, pull)
    return (y, pull, aux) if has_aux else (y, pull)


def _pull_modules(pull: Any, ct: Tree) -> Any:
    """Pull back a cotangent that may hold modules. `pull` is the pullback for arrays."""
    return nnx.from_tree(pull(nnx.to_tree(ct)))


@accepts_nnx_calls(n_required=3)
def jvp(f: Function, primals: Sequence[Tree], tangents: Sequence[Tree], *, has_aux: bool = False,
        graph: Mode = None, graph_updates: Mode = None) -> Any:  # fmt: skip
    """Evaluate a function of modules and push tangents forward through it.

    Args:
      f: function of modules, Variables and pytrees of arrays. It may change values of Variables,
        but not the structure of a module.
      primals: the point, a tuple or list of arguments of `f`.
      tangents: a tangent for each primal. The tangent of a module is a module with the tangents of
        all its Variables; tangents of integers have dtype float0.
      has_aux: whether `f` returns a pair `(output, auxiliary)`.
      graph: whether modules may share Variables; None for NNX's setting (`nnx.set_graph_mode`).
      graph_updates: must be None or False, because changes of structure cannot be written back.

    Returns:
      `(output, tangent)`, or `(output, tangent, auxiliary)` with `has_aux`.

    Raises:
      WrongArgument: `graph_updates` is True, `f` is a bound method of a module, or `primals` or
        `tangents` is not a tuple or list.
      WrongTangent: `tangents` do not match `primals`.
      MissingRule: a primitive in `f` has no rule.
      NotDifferentiable: `f` calls a `custom_vjp` function, which has no forward mode.

    Cost: two to three times the FLOPs of `f`; memory about twice that of `f`.

    >>> from flax import nnx
    >>> scale, tangent = nnx.Param(jnp.float32(3.0)), nnx.Param(jnp.float32(1.0))
    >>> y, dy = xform.flax.jvp(lambda scale: scale[...] ** 2, (scale,), (tangent,))
    >>> float(dy)
    6.0
    """
    boundary = ModuleBoundary.without_updates("jvp", graph, graph_updates)
    primals, tangents = as_tuple(primals, "primals", "jvp"), as_tuple(tangents, "tangents", "jvp")
    with nnx.update_context(boundary.name):
        array_primals, array_tangents = boundary.enter(primals), nnx.to_tree(tangents)
        pure = boundary.pure(f, has_aux)
        y, dy, (aux, changes) = forward.jvp(pure, array_primals, array_tangents, has_aux=True)
        y, aux = boundary.leave((y, aux), changes)
    return (y, nnx.from_tree(dy), aux) if has_aux else (y, nnx.from_tree(dy))
