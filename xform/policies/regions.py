"""What policies of whole programs are to remat regions: those that open them, those of one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from xform.errors import WrongArgument
from xform.policies.budgets import Budget, Fit, Regions, budget
from xform.policies.min_cut import MinCut, min_cut


def opening(policy: Any) -> Regions:
    """Whether a policy, or a plan, opens regions, or leaves them as they are marked."""
    return getattr(policy, "regions", "marked")


def open_regions(policy: Callable[..., Any] | str = min_cut) -> MinCut | Budget | Fit:
    """The policy for a program without its remat regions, across which it then decides.

    A region that its author marked, by `jax.checkpoint`, `nn.remat` or `xform.remat`, saves by
    default what the author said, under each policy. Here marks are dissolved, with their policies,
    in loops, branches and calls too; those in custom rules stay. As text: `open:min_cut`,
    `open:budget:8GiB`.

    Args:
      policy: `min_cut`, a budget, or `fit()`, which is "auto" too.

    Raises:
      WrongArgument: another policy; it answers for one value after the other, in a region too.

    >>> import xform
    >>> layer = lambda w, x: jax.checkpoint(lambda x: jnp.sin(jnp.sin(x @ w) @ w))(x).sum()
    >>> args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 8), (4, 8))]
    >>> opened = xform.policies.open_regions()
    >>> xform.residuals(layer, *args).total_bytes
    0
    >>> xform.residuals(layer, *args, policy=opened).total_bytes
    256
    """
    if policy == "auto":
        policy = Fit()
    if isinstance(policy, MinCut | Budget | Fit):
        return dataclasses.replace(policy, regions="open")
    raise WrongArgument(
        f"open_regions({policy!r})",
        "it answers for one value after the other, and does not decide for a whole program",
        "",
        "give min_cut, a budget or fit(); or write the function without jax.checkpoint",
    )


def of_region(policy: Callable[..., Any], where: str = "") -> Callable[..., Any]:
    """The policy of a remat region itself, or an error if it can only be that of a function.

    Raises:
      WrongArgument: it is a budget of the peak, "auto", or opens regions.
    """
    if opening(policy) == "open":
        raise WrongArgument(
            f"remat with policy={policy!r}",
            "regions are opened in a whole program, not within one of them",
            where,
            "give this policy to what differentiates the whole, such as xform.grad",
        )
    peak = isinstance(policy, Fit) or (isinstance(policy, Budget) and policy.of == "peak")
    if not peak:
        return policy
    saved = budget(policy.bytes, of="saved") if isinstance(policy, Budget) else "another policy"
    raise WrongArgument(
        f"remat with policy={policy!r}",
        "a region has no peak of its own: what it saves waits beside what all others save",
        where,
        f"give {saved} to bound what each call of the region saves, or give this policy to what "
        f"differentiates the whole: xform.grad(f, policy={policy!r})",
    )
