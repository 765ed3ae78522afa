"""The policy of a remat region around each layer, from `--remat`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import xform
from xform.errors import WrongArgument


def with_policy(block: Callable[..., Any], policy: str | None) -> Callable[..., Any]:
    """Wrap `block` in a remat region with the policy; return it unchanged for None."""
    return block if policy is None else xform.remat(block, policy=policy)


def check_remat(policy: str | None) -> None:
    """Raise ValueError unless a remat region can have this policy."""
    try:
        with_policy(lambda x: x, policy)
    except WrongArgument as error:
        raise ValueError(f"remat is {policy!r}: {error.problem}; {error.remedy}") from None
