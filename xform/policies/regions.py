"""Policies and remat regions: policies that open regions, and the policy of a single region."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from xform.errors import WrongArgument
from xform.policies.budgets import Budget, Fit, Regions, budget
from xform.policies.min_cut import MinCut, min_cut


def regions_of(policy: Any) -> Regions:
    """Whether a policy or a plan dissolves remat regions: "open" if so, else "marked"."""
    return getattr(policy, "regions", "marked")


def open_regions(policy: Callable[..., Any] | str = min_cut) -> MinCut | Budget | Fit:
    """Return a policy that ignores the remat regions of a program and decides across them.

    By default a region that its author marked, with `jax.checkpoint`, `nn.remat` or `xform.remat`,
    saves what the author chose, under every policy. This policy dissolves the regions and their
    policies first, also in loops, branches and calls. Regions inside custom rules stay. As text:
    `open:min_cut`, `open:budget:8GiB`.

    Args:
      policy: `min_cut`, a budget, or `fit()`, also as "auto".

    Raises:
      WrongArgument: `policy` is another policy. Those decide about one value at a time, so they
        apply inside a region too.

    >>> import xform
    >>> layer = lambda w, x: jax.checkpoint(lambda x: jnp.sin(jnp.sin(x @ w) @ w))(x).sum()
    >>> args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 8), (4, 8))]
    >>> opened = xform.policies.open_regions()
    >>> xform.residuals(layer, *args).total_bytes
    0
    >>> xform.residuals(layer, *args, policy=opened).total_bytes
    384
    """
    if policy == "auto":
        policy = Fit()
    if isinstance(policy, MinCut | Budget | Fit):
        return dataclasses.replace(policy, regions="open")
    raise WrongArgument(
        f"open_regions({policy!r})",
        "this policy decides about one value at a time, not about a whole program",
        "",
        "use min_cut, a budget or fit(); or write the function without jax.checkpoint",
    )


def region_policy(policy: Callable[..., Any], where: str = "") -> Callable[..., Any]:
    """Return the policy of a remat region; `where` is the region's source line, for errors.

    Raises:
      WrongArgument: the policy is only for whole functions: a budget of the peak, "auto", or a
        policy that opens regions.
    """
    if regions_of(policy) == "open":
        raise WrongArgument(
            f"remat with policy={policy!r}",
            "a policy that opens regions is for a whole function, not for one region",
            where,
            "pass this policy to the transform of the whole function, such as xform.grad",
        )
    peak = isinstance(policy, Fit) or (isinstance(policy, Budget) and policy.of == "peak")
    if not peak:
        return policy
    saved = budget(policy.bytes, of="saved") if isinstance(policy, Budget) else "another policy"
    raise WrongArgument(
        f"remat with policy={policy!r}",
        "a region has no peak of its own: its saved values are live together with all others",
        where,
        f"use {saved} to bound what each call of the region saves, or pass this policy to the "
        f"transform of the whole function: xform.grad(f, policy={policy!r})",
    )
