"""Which policies open remat regions, and which policies a single region can have.

A remat region is a part of a function that its author marked with `jax.checkpoint`, `nn.remat` or
`xform.remat`. To open it means to plan its operations like all others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from xform.errors import WrongArgument
from xform.policies.budgets import Budget, Fit, Regions, bounds_peak
from xform.policies.min_cut import MinCut


def regions_of(policy: Any) -> Regions:
    """Return whether a policy or a plan dissolves remat regions: "open" if so, else "marked"."""
    return getattr(policy, "regions", "marked")


def open_regions_of(policy: Any, request: str) -> MinCut | Budget | Fit:
    """Return the same policy with open regions. `request` is the first line of an error.

    Raises:
      WrongArgument: the policy decides about one value at a time.
    """
    if isinstance(policy, MinCut | Budget | Fit):
        return dataclasses.replace(policy, regions="open")
    raise WrongArgument(
        request,
        f"{policy!r} decides about one value at a time, not about a whole program",
        "",
        "use min_cut, a budget or fit(); or write the function without jax.checkpoint",
    )


def slices_of(policy: Any, request: str) -> Budget:
    """Return the same budget with slices. `request` is the first line of an error.

    Raises:
      WrongArgument: the policy is no budget of the peak.
    """
    if isinstance(policy, Budget) and policy.of == "peak":
        return dataclasses.replace(policy, slices=True)
    raise WrongArgument(
        request,
        f"{policy!r} is no budget of the peak memory, so nothing says how few bytes are wanted",
        "",
        "use a budget, such as slices:budget:6GiB",
    )


def region_policy(policy: Callable[..., Any], where: str = "") -> Callable[..., Any]:
    """Return the policy of a remat region, or raise if a region cannot have it.

    `where` is the region's source line, for the error.

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
    if not bounds_peak(policy):
        return policy
    is_budget = isinstance(policy, Budget)
    alternative = dataclasses.replace(policy, of="saved") if is_budget else "another policy"
    raise WrongArgument(
        f"remat with policy={policy!r}",
        "a region has no peak of its own: its saved values are live together with all others",
        where,
        f"use {alternative} to bound what each call of the region saves, or pass this policy to "
        f"the transform of the whole function: xform.grad(f, policy={policy!r})",
    )
