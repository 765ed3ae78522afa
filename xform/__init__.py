"""Composable function transforms for JAX, with control of what the backward pass keeps."""

import importlib
from typing import TYPE_CHECKING, Any

from xform import errors, extend, installed, passes, policies, rules
from xform.memory.analysis import memory_analysis
from xform.memory.questions import fits, max_batch, why_oom
from xform.planner.decided import Plan
from xform.transforms.checkpoint import checkpoint
from xform.transforms.checkpoint import checkpoint as remat
from xform.transforms.compare import compare
from xform.transforms.forward import jvp, linearize
from xform.transforms.inspect import residuals
from xform.transforms.jacobian import hessian, hvp, jacfwd, jacobian, jacrev
from xform.transforms.pareto import pareto
from xform.transforms.plan import plan
from xform.transforms.reverse import fwd_and_bwd, grad, linear_transpose, value_and_grad, vjp
from xform.transforms.while_loop import while_checkpoints

__all__ = [
    "Plan",
    "checkpoint",
    "compare",
    "errors",
    "extend",
    "fits",
    "fwd_and_bwd",
    "grad",
    "hessian",
    "hvp",
    "jacfwd",
    "jacobian",
    "jacrev",
    "jvp",
    "linear_transpose",
    "linearize",
    "max_batch",
    "memory_analysis",
    "pareto",
    "passes",
    "plan",
    "policies",
    "remat",
    "residuals",
    "rules",
    "value_and_grad",
    "vjp",
    "while_checkpoints",
    "why_oom",
]

__version__ = installed.own_version()

if TYPE_CHECKING:
    from xform import equinox as equinox
    from xform import flax as flax
else:

    def __getattr__(name: str) -> Any:
        """What needs a library that is not required, and `testing`: imported when first used."""
        if name in ("equinox", "flax", "testing"):
            return importlib.import_module(f"xform.{name}")
        raise AttributeError(f"module 'xform' has no attribute {name!r}")
