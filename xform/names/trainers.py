"""A choice of named values in the settings of trainers: MaxText's and Tunix's.

MaxText 0.2.5 has a setting for each name of `MAXTEXT_NAMES` (`configs/base.yml`). Its policy
`custom` is `jax.checkpoint_policies.save_and_offload_only_these_names` of these settings, around
each decoder layer. Tunix has three settings, and no setting for names (`RematConfig` of its
models).
"""

from __future__ import annotations

from collections.abc import Iterable

from xform.errors import WrongArgument
from xform.names.name_set import NameSet

# The names that MaxText's policy `custom` reads. Its setting `engram` is missing here: the policy
# does not read it.
MAXTEXT_NAMES = frozenset({
    "attention_out", "context", "decoder_layer_input", "indexer_cutoff_threshold", "key_proj",
    "kv_proj", "kv_wa_proj", "mla_kv", "mla_q", "mlpwi", "mlpwi_0", "mlpwi_1", "mlpwo",
    "moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo", "moe_routing_maps", "moe_x_sorted", "out_proj",
    "qkv_proj", "query_proj", "query_wa_proj", "value_proj",
})  # fmt: skip
# Settings whose default in MaxText is another than `remat`.
_NOT_RECOMPUTED_BY_DEFAULT = ("decoder_layer_input",)


def maxtext_settings(names: NameSet, all_names: Iterable[str], request: str) -> dict[str, str]:
    """Return MaxText's settings for a choice of named values.

    Args:
      names: the saved and the offloaded names.
      all_names: all names of the program.
      request: the first line of an error.

    Raises:
      WrongArgument: a saved or offloaded name has no setting in MaxText.
    """
    if unknown := sorted((names.saved | names.offloaded) - MAXTEXT_NAMES):
        raise WrongArgument(
            request,
            f"MaxText has no setting for {', '.join(map(repr, unknown))}",
            "",
            f"use a name that it has: {', '.join(sorted(MAXTEXT_NAMES))}; or pass "
            "checkpoint_policy() to jax.checkpoint in the model",
        )
    known = [n for n in all_names if n in MAXTEXT_NAMES]
    settings = dict.fromkeys((*_NOT_RECOMPUTED_BY_DEFAULT, *known), "remat")
    settings |= dict.fromkeys(sorted(names.saved), "device")
    settings |= dict.fromkeys(sorted(names.offloaded), "offload")
    return {"remat_policy": "custom", **settings}


def tunix_settings(names: NameSet, closest: str, request: str) -> dict[str, str]:
    """Return Tunix's setting for a choice of named values: `DECODER`, if it saves none of them.

    Args:
      names: the saved and the offloaded names.
      closest: the closest setting and its cost, for the error.
      request: the first line of an error.

    Raises:
      WrongArgument: a value is saved or offloaded, which no setting of Tunix does.
    """
    if chosen := sorted(names.saved | names.offloaded):
        raise WrongArgument(
            request,
            f"Tunix has no setting that saves or offloads only {', '.join(map(repr, chosen))}: "
            "RematConfig is NONE (save everything), BLOCK (recompute the attention block) or "
            "DECODER (recompute the whole layer)",
            "",
            f"{closest}; or pass checkpoint_policy() to jax.checkpoint in the model",
        )
    return {"remat_config": "DECODER"}
