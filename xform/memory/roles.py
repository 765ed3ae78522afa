"""What an argument is for, by its name."""

from __future__ import annotations

import re

_OPTIMIZER = {"opt", "optimizer", "optim", "opt_state", "mu", "nu", "momentum", "trace", "ema"}
_PARAMETER = {"param", "params", "parameter", "parameters", "weight", "weights", "kernel", "bias",
              "embedding", "model", "variables"}  # fmt: skip


def role(name: str) -> str:
    """`optimizer state`, `parameter` or `argument`, of an argument by its path.

    The words of the path decide: those of optimizers before those of models, as an optimizer's
    state has a tree of parameters inside.

    >>> from xform.memory.roles import role
    >>> role("state.opt_state[0].mu['dense']['kernel']"), role("params['w']"), role("tokens")
    ('optimizer state', 'parameter', 'argument')
    """
    words = set(re.findall(r"[a-z_]+", name.lower()))
    if words & _OPTIMIZER:
        return "optimizer state"
    return "parameter" if words & _PARAMETER else "argument"
