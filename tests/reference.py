"""The reference for derivatives: JAX's own, in 64 bits."""

from collections.abc import Callable, Sequence
from typing import Any

import chex
import jax
import numpy as np

import xform

TOLERANCE = 1e-10


def close(got: Any, want: Any, tolerance: float = TOLERANCE) -> None:
    """Check equal trees, shapes and dtypes, and values within a tolerance; float0 has no value."""
    chex.assert_trees_all_equal_structs(got, want)
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    for a, b in pairs:
        assert (np.shape(a), jax.typeof(a).dtype) == (np.shape(b), jax.typeof(b).dtype)
        if jax.typeof(a).dtype != jax.dtypes.float0:
            a, b = (np.asarray(x, np.complex128) for x in (a, b))
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def grads_agree(
    f: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    policies: Sequence[Any] = (None,),
    ways: Sequence[str] = ("alone", "jit", "vmap"),
    tolerance: float = TOLERANCE,
) -> None:
    """Check `xform.grad` against `jax.grad`: alone with the first policy, jit and vmap with each.

    Under vmap all floating arguments are batched. All compilations happen at once.
    """
    axes = tuple(0 if _floating(x) else None for x in args)
    wide = [np.stack([x, 1.25 * x]) if a == 0 else x for x, a in zip(args, axes, strict=True)]

    def batched(derivative: Any) -> Any:
        return jax.vmap(derivative, in_axes=axes)

    want = jax.grad(f, argnums)
    ours = {repr(p): xform.grad(f, argnums, policy=p) for p in policies}

    @jax.jit
    def together(args: Any, wide: Any) -> Any:
        one = {p: g(*args) for p, g in ours.items()} if "jit" in ways else {}
        two = {p: batched(g)(*wide) for p, g in ours.items()} if "vmap" in ways else {}
        alone = want(*args) if {"alone", "jit"} & set(ways) else None
        return one, two, (alone, batched(want)(*wide) if two else None)

    one, two, wanted = together(args, wide)
    if "alone" in ways:
        close(next(iter(ours.values()))(*args), wanted[0], tolerance)
    for g in one.values():
        close(g, wanted[0], tolerance)
    for g in two.values():
        close(g, wanted[1], tolerance)


def _floating(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray | float) and np.issubdtype(
        jax.typeof(x).dtype, np.inexact
    )


_COMPILED: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, _, **__: (
        _COMPILED.append(event) if event.endswith("backend_compile_duration") else None
    )
)


def compilations(f: Callable[[], Any]) -> int:
    """Return how many programs JAX compiles while `f` runs."""
    before = len(_COMPILED)
    jax.block_until_ready(f())
    return len(_COMPILED) - before
