"""The rematerialization policies that a model or a command line may name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import xform

# Set by `checkpoint_name` in the blocks. The names policy keeps the two that are dearest to
# compute again for their size: what attention returns, and what enters the last matrix.
NAMES = ("attention_out", "mlp_hidden")

POLICIES: dict[str, Callable[..., Any]] = {
    "save_everything": xform.policies.save_everything,
    "save_dots": xform.policies.save_dots,
    "save_dots_with_no_batch_dims": xform.policies.save_dots_with_no_batch_dims,
    "save_names": xform.policies.save_only_these_names(*NAMES),
    "save_nothing": xform.policies.save_nothing,
}


def with_policy(block: Callable[..., Any], name: str | None) -> Callable[..., Any]:
    """Wrap `block` in a rematerialized region with the policy `name`; `None` leaves it alone."""
    return block if name is None else xform.remat(block, policy=POLICIES[name])
