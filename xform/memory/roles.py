"""Guess whether an argument is a parameter or optimizer state, from its name."""

from __future__ import annotations

import re

# Words in the path of an argument that tell its role.
_OPTIMIZER = {"opt", "optimizer", "optim", "opt_state", "mu", "nu", "momentum", "ema"}
_PARAMETER = {"param", "params", "parameter", "parameters", "weight", "weights", "kernel", "bias",
              "embedding", "model", "variables"}  # fmt: skip
# Optax's momentum has a field `trace`; an argument named `trace` may be anything.
_TRACE = re.compile(r"\.trace\b")


def role(name: str) -> str:
    """Return the role of an argument, from its path: `optimizer state`, `parameter` or `argument`.

    The words in the path decide. The words for optimizers are tested first, because an optimizer's
    state often contains the names of the parameters.

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
