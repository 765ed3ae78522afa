"""Remat policies: which values a backward pass saves.

A policy says, for one equation, whether its outputs are saved. This module has JAX's policies under
xform's names, and xform's own. Each is a callable of JAX's protocol (`policy(primitive, *avals,
**params)`). So `jax.checkpoint` accepts them, and xform accepts any policy of `jax.checkpoint`.

Wherever xform takes a policy, it also takes its text, see `parse`: `"save_dots"`, `"budget:6GiB"`,
`"auto"`, `"open:min_cut"`.

>>> import xform
>>> xform.policies.parse("save_dots") == xform.policies.save_dots
True
>>> xform.policies.save_only_these_names("hidden") == xform.policies.save_only_these_names("hidden")
True
"""

from xform.policies.budgets import Budget as Budget
from xform.policies.budgets import Fit as Fit
from xform.policies.budgets import budget, fit
from xform.policies.combined import open_regions, save_from_both_policies
from xform.policies.min_cut import MinCut as MinCut
from xform.policies.min_cut import min_cut
from xform.policies.per_value import TAG as TAG
from xform.policies.per_value import Policy as Policy
from xform.policies.per_value import TaggedPolicy as TaggedPolicy
from xform.policies.per_value import answer_for as answer_for
from xform.policies.per_value import (
    offload_dots_with_no_batch_dims,
    save_and_offload_only_these_names,
    save_any_names_but_these,
    save_dots,
    save_dots_with_no_batch_dims,
    save_everything,
    save_nothing,
    save_only_these_names,
)
from xform.policies.vocabulary import NAMED as NAMED
from xform.policies.vocabulary import TEXTS as TEXTS
from xform.policies.vocabulary import as_code as as_code
from xform.policies.vocabulary import parse
from xform.policies.vocabulary import policy_name as policy_name
from xform.policies.while_loop import checkpoints_per_while_loop

__all__ = [
    "budget",
    "checkpoints_per_while_loop",
    "fit",
    "min_cut",
    "offload_dots_with_no_batch_dims",
    "open_regions",
    "parse",
    "save_and_offload_only_these_names",
    "save_any_names_but_these",
    "save_dots",
    "save_dots_with_no_batch_dims",
    "save_everything",
    "save_from_both_policies",
    "save_nothing",
    "save_only_these_names",
]
