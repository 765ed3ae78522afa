"""The ways to differentiate a loss: by JAX, by xform, and by xform within given bytes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

import xform
from xform import policies

Loss = Callable[..., jax.Array]
Way = Callable[[Loss], Callable[..., Any]]
STOCK = ("dots_saveable", "dots_with_no_batch_dims_saveable", "nothing_saveable")


def stock(name: str) -> Way:
    """Return JAX's gradient, with one of its policies around the whole loss."""
    policy = getattr(jax.checkpoint_policies, name)
    return lambda loss: jax.value_and_grad(jax.checkpoint(loss, policy=policy))


def ours(policy: Any) -> Way:
    """Return xform's gradient under a policy; None is the default."""
    return functools.partial(xform.value_and_grad, policy=policy)


JAX: dict[str, Way] = {"jax.grad": jax.value_and_grad} | {name: stock(name) for name in STOCK}
XFORM: dict[str, Way] = {
    "default": ours(None),
    "save_dots": ours(policies.save_dots),
    "save_nothing": ours(policies.save_nothing),
}
LEAST, HALF = "least of JAX's", "half"


def budget(name: str, sizes: Mapping[str, Mapping[str, Any]]) -> int:
    """Return a budget of the peak: the least total of JAX's ways, or half the temporary bytes."""
    if name == LEAST:
        return min(sizes[way]["total"] for way in JAX if "total" in sizes[way])
    return sizes["jax.grad"]["total"] - sizes["jax.grad"]["temp"] // 2


BUDGETS: Sequence[str] = (LEAST, HALF)
