"""`checkpoint`, also called `remat`: mark a region that is run again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax

from xform import policies


def checkpoint(
    f: Callable[..., Any],
    *,
    prevent_cse: bool = True,
    policy: Any = None,
    static_argnums: int | tuple[int, ...] = (),
    static_argnames: str | Iterable[str] = (),
) -> Callable[..., Any]:
    """A function like `f` whose intermediate values are recomputed when it is differentiated.

    The backward pass keeps only the arguments, and what `policy` saves. The region is marked with
    `jax.checkpoint`, so that `jax.grad` honours it too; under xform's transforms the recompute
    survives the compiler on every backend, also for unrolled code on CPU, where XLA undoes
    `jax.checkpoint`.

    Args:
      f: pure function of pytrees of arrays.
      prevent_cse: whether the compiler must be kept from merging the recompute with the forward
        pass. Inside a scan it cannot merge them, and nothing is emitted either way.
      policy: of `xform.policies` or `jax.checkpoint_policies`; None saves nothing.
      static_argnums: positions of arguments that are not arrays.
      static_argnames: names of keyword arguments that are not arrays.

    Returns:
      A function with the arguments and value of `f`.

    Cost: under reverse mode, about one more evaluation of `f`, less what the policy saves.
    Source: Griewank, "Achieving logarithmic growth of temporal and spatial complexity in reverse
    automatic differentiation", Optimization Methods and Software 1 (1992).

    >>> layer = xform.remat(jnp.sin, policy=xform.policies.save_nothing)
    >>> float(xform.grad(layer)(0.0))
    1.0
    """
    if policy is not None:
        policies.check(policy)
    return jax.checkpoint(
        f,
        prevent_cse=prevent_cse,
        policy=policy,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
    )
