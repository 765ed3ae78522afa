"""`xform.flax.remat`: a function of NNX modules whose intermediate values are recomputed."""

from __future__ import annotations

import functools
from typing import Any

from xform.flax.calls import accepts_nnx_calls, positional
from xform.modules.boundary import Function, Mode, ModuleBoundary
from xform.transforms.checkpoint import checkpoint


@accepts_nnx_calls(n_required=1)
def remat(f: Function, *, prevent_cse: bool = True, static_argnums: int | tuple[int, ...] = (),
          policy: Any = None, graph: Mode = None, graph_updates: Mode = None
          ) -> Function:  # fmt: skip
    """Return a function like `f` whose intermediate values are recomputed in the backward pass.

    Args:
      f: function of modules, Variables and pytrees of arrays. It may change their state. Pass a
        method as a function, such as `nnx.Linear.__call__`. Without `f`, a decorator is returned.
      prevent_cse: whether to keep the compiler from merging the recomputed operations with the
        operations of the forward pass.
      static_argnums: positions of arguments that are not arrays.
      policy: which intermediate values are saved and not recomputed: a policy of `xform.policies`
        or `jax.checkpoint_policies`, or its text, such as "save_dots"; None saves none of them.
      graph: whether modules may share Variables; None for NNX's setting (`nnx.set_graph_mode`).
      graph_updates: whether changes of a module's structure are written back; None for NNX's
        setting (`nnx.set_graph_updates`).

    Returns:
      A function with the arguments and results of `f`.

    Raises:
      WrongArgument: `f` is a bound method of a module, or another argument is invalid.

    Cost: in reverse mode, about one more evaluation of `f`, less what the policy saves.

    >>> from flax import nnx
    >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    >>> layer = xform.flax.remat(nnx.Linear.__call__, policy=xform.policies.save_dots)
    >>> xform.flax.grad(lambda m, x: layer(m, x).sum())(model, jnp.ones((3, 2))).bias[...].tolist()
    [3.0]
    """
    boundary = ModuleBoundary.of("remat", graph, graph_updates)
    # Make it once, not at each call: JAX caches a region's trace by the identity of its function.
    region = checkpoint(
        boundary.pure(f), prevent_cse=prevent_cse, policy=policy, static_argnums=static_argnums
    )

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = positional(f, args, kwargs) if boundary.updates else (args, kwargs)
        return boundary.call(region, args, kwargs)

    return call
