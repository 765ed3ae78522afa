"""What an argument is for, by its name."""

from __future__ import annotations

import re

_OPTIMIZER = {"opt", "optimizer", "optim", "opt_state", "mu", "nu", "momentum", "ema"}
_PARAMETER = {"param", "params", "parameter", "parameters", "weight", "weights", "kernel", "bias",
              "embedding", "model", "variables"}  # fmt: skip
# A field of optax's momentum; an argument of that name is anything.
_TRACE = re.compile(r"\.trace\b")


def role(name: str) -> str:
    """`optimizer state`, `parameter` or `argument`, of an argument by its path.

    The words of the path decide: those of optimizers before those of models, as an optimizer's
    state has a tree of parameters inside.

    >>> from xform.memory.roles import role
    >>> role("state.opt_state[0].mu['dense']['kernel']"), role("params['w']"), role("tokens")
    ('optimizer state', 'parameter', 'argument')
    >>> role("params_0"), role("state[0].trace['w']"), role("trace")
    ('parameter', 'optimizer state', 'argument')
    """
    words = set(re.findall(r"[a-z]+(?:_[a-z]+)*", name.lower()))
    if words & _OPTIMIZER or _TRACE.search(name):
        return "optimizer state"
    return "parameter" if words & _PARAMETER else "argument"
