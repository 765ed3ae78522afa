"""Composable function transforms for JAX, with control over the residuals of the backward pass.

`xform.grad`, `vjp`, `jvp` and the other transforms have the names and the meaning of JAX's. Their
`policy=` decides which values are saved for the backward pass. `xform.plan` and
`xform.memory_analysis` show the plan and the compiled memory before anything runs.
"""

import importlib as _importlib
import typing as _typing

from xform.terminal import quiet as _quiet  # noqa: F401  # pyright: ignore[reportUnusedImport]

# isort: split
from xform import errors as errors
from xform import extend as extend
from xform import passes as passes
from xform import policies as policies
from xform import rules as rules
from xform.introspection import packages as _packages
from xform.jacobians.jacobian import jacobian
from xform.planner.plan.plan import Plan
from xform.transforms.checkpoint import checkpoint
from xform.transforms.checkpoint import checkpoint as remat
from xform.transforms.forward import jvp, linearize
from xform.transforms.inspect import residuals
from xform.transforms.jacobian import hessian, hvp, jacfwd, jacrev
from xform.transforms.reverse import fwd_and_bwd, grad, linear_transpose, value_and_grad, vjp

__all__ = [
    "Plan",
    "checkpoint",
    "clip_by_previous_global_norm",
    "compare",
    "fits",
    "fused_update",
    "fwd_and_bwd",
    "grad",
    "health",
    "hessian",
    "hvp",
    "install",
    "is_installed",
    "jacfwd",
    "jacobian",
    "jacrev",
    "jit",
    "jvp",
    "linear_transpose",
    "linearize",
    "load",
    "memory_analysis",
    "pareto",
    "plan",
    "plan_names",
    "remat",
    "residuals",
    "sliced",
    "uninstall",
    "value_and_grad",
    "vjp",
]

__version__ = _packages.own_version()

# Functions, and the modules that define them. Such a module is imported on first use: together they
# take a third of the import time.
_LAZY_FUNCTIONS = {
    "clip_by_previous_global_norm": "xform.fused.previous_norm",
    "compare": "xform.steps.compare",
    "fits": "xform.memory.capacity",
    "fused_update": "xform.fused.fused_update",
    "health": "xform.diagnosis.health",
    "install": "xform.everywhere",
    "is_installed": "xform.everywhere",
    "jit": "xform.steps.jit",
    "load": "xform.storage.results",
    "memory_analysis": "xform.memory.analysis",
    "pareto": "xform.steps.pareto",
    "plan": "xform.steps.plan",
    "plan_names": "xform.names.plan_names",
    "sliced": "xform.transforms.sliced",
    "uninstall": "xform.everywhere",
}
# Public modules that are imported on first use.
_LAZY_MODULES = ("adjoints", "curvature", "equinox", "flax", "memory", "sparse", "testing")
_MODULES = ("errors", "extend", "passes", "policies", "rules", *_LAZY_MODULES)

if _typing.TYPE_CHECKING:
    from xform import adjoints as adjoints
    from xform import curvature as curvature
    from xform import equinox as equinox
    from xform import flax as flax
    from xform import memory as memory
    from xform import sparse as sparse
    from xform.diagnosis.health import health
    from xform.everywhere import install, is_installed, uninstall
    from xform.fused.fused_update import fused_update
    from xform.fused.previous_norm import clip_by_previous_global_norm
    from xform.memory.analysis import memory_analysis
    from xform.memory.capacity import fits
    from xform.names.plan_names import plan_names
    from xform.steps.compare import compare
    from xform.steps.jit import jit
    from xform.steps.pareto import pareto
    from xform.steps.plan import plan
    from xform.storage.results import load
    from xform.transforms.sliced import sliced
else:

    def __getattr__(name: str) -> _typing.Any:
        """Import a function or a public module on first use."""
        if name in _LAZY_FUNCTIONS:
            module = _importlib.import_module(_LAZY_FUNCTIONS[name])
            globals()[name] = getattr(module, name)
            return globals()[name]
        if name in _LAZY_MODULES:
            return _importlib.import_module(f"xform.{name}")
        raise AttributeError(f"module 'xform' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*__all__, *_MODULES})
