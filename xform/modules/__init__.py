"""Functions of Flax NNX modules as pure functions of arrays, for the transforms of the core.

A function of the core that takes a loss calls `with_arrays`. Flax is imported only if an argument
holds a module, and so Flax is loaded already.
"""

from __future__ import annotations

import importlib
from typing import Any

from xform.introspection.modules import nnx_object
from xform.modules.loss_call import LossCall


def with_arrays(call: LossCall, caller: str) -> LossCall:
    """Return a call of a pure function of arrays in place of the call of a loss of NNX modules.

    As in `xform.flax.value_and_grad`, a module is differentiated with respect to its `nnx.Param`s,
    and the changes of modules are auxiliary outputs. Without modules, `call` is returned unchanged.
    `caller` is the function that the user called.
    """
    if nnx_object(call.args) is None:
        return call
    return importlib.import_module("xform.modules.array_loss").array_loss(call, caller)


def module_boundary(caller: str, tree: Any) -> Any:
    """Return the `ModuleBoundary` for a transform whose arguments hold NNX modules; else None."""
    if nnx_object(tree) is None:
        return None
    return importlib.import_module("xform.modules.boundary").ModuleBoundary.of(caller, None, None)
