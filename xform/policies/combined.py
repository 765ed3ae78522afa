"""Policies made from other policies: `open_regions` and `save_from_both_policies`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from xform.errors import WrongArgument
from xform.policies.budgets import Budget, Fit
from xform.policies.min_cut import MinCut, min_cut
from xform.policies.per_value import EitherPolicy, Policy
from xform.policies.regions import open_regions_of
from xform.policies.vocabulary import FACTORIES, parse


def open_regions(policy: Callable[..., Any] | str = min_cut) -> MinCut | Budget | Fit:
    """Return a policy that ignores the remat regions of a program and decides across them.

    By default a region that its author marked, with `jax.checkpoint`, `nn.remat` or `xform.remat`,
    saves what the author chose, under every policy. This policy dissolves the regions and their
    policies first, also in loops, branches and calls. Regions inside custom rules stay. As text:
    "open:min_cut", "open:budget:8GiB".

    Args:
      policy: `min_cut` (the default), a budget or `fit()`, or its text, such as "auto".

    Raises:
      WrongArgument: `policy` is another policy, one that decides about one value at a time.

    >>> import xform
    >>> layer = lambda w, x: jax.checkpoint(lambda x: jnp.sin(jnp.sin(x @ w) @ w))(x).sum()
    >>> args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 8), (4, 8))]
    >>> opened = xform.policies.open_regions()
    >>> xform.residuals(layer, *args).total_bytes
    0
    >>> xform.residuals(layer, *args, policy=opened).total_bytes
    384
    """
    policy = parse(policy)
    return open_regions_of(policy, f"open_regions({policy!r})")


def save_from_both_policies(policy_1: Policy, policy_2: Policy) -> EitherPolicy:
    """Return a policy that saves the values that one of two policies saves.

    Args:
      policy_1: a policy that decides about one value at a time, such as `save_dots`, or its text.
      policy_2: another such policy.

    Raises:
      WrongArgument: a policy is a budget or "auto", or offloads values.

    >>> import xform
    >>> named = xform.policies.save_only_these_names("hidden")
    >>> policy = xform.policies.save_from_both_policies(xform.policies.save_dots, named)
    """
    both = parse(policy_1), parse(policy_2)
    for policy in both:
        if isinstance(policy, Budget | Fit):
            raise WrongArgument(
                "save_from_both_policies",
                f"{policy!r} decides about a whole program, not about one value at a time",
                "",
                "use the budget alone, or two policies that decide about one value at a time",
            )
    return EitherPolicy(*both)


FACTORIES.update({open_regions: "", save_from_both_policies: "policy_1, policy_2"})
