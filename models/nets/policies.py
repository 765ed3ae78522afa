"""The rematerialization policies that a model or `--remat` may name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import xform

# Names that the blocks give to values with `checkpoint_name`. `save_names` saves the two values
# that are most expensive to recompute for their size: the attention's mean of values, and the
# input of the perceptron's last matrix.
NAMES = ("attention_out", "mlp_hidden")

POLICIES: dict[str, Callable[..., Any]] = {
    "save_everything": xform.policies.save_everything,
    "save_dots": xform.policies.save_dots,
    "save_dots_with_no_batch_dims": xform.policies.save_dots_with_no_batch_dims,
    "save_names": xform.policies.save_only_these_names(*NAMES),
    "save_nothing": xform.policies.save_nothing,
}


def with_policy(block: Callable[..., Any], name: str | None) -> Callable[..., Any]:
    """Wrap `block` in a remat region with the policy `name`; return it unchanged for None."""
    return block if name is None else xform.remat(block, policy=POLICIES[name])
