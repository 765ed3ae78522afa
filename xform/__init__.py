"""Composable function transforms for JAX, with control over the residuals of the backward pass."""

import importlib
from typing import TYPE_CHECKING, Any

from xform.terminal import quiet as quiet

# isort: split
from xform import errors, extend, passes, policies, rules
from xform.everywhere import install, installed, uninstall
from xform.introspection import packages
from xform.jacobians.jacobian import jacobian
from xform.planner.plan.plan import Plan
from xform.transforms.checkpoint import checkpoint
from xform.transforms.checkpoint import checkpoint as remat
from xform.transforms.forward import jvp, linearize
from xform.transforms.inspect import residuals
from xform.transforms.jacobian import hessian, hvp, jacfwd, jacrev
from xform.transforms.reverse import fwd_and_bwd, grad, linear_transpose, value_and_grad, vjp
from xform.transforms.while_loop import while_checkpoints

__all__ = [
    "Plan",
    "checkpoint",
    "compare",
    "errors",
    "extend",
    "fisher_vp",
    "fits",
    "fwd_and_bwd",
    "ggnvp",
    "grad",
    "graph",
    "health",
    "hessian",
    "hessian_spectrum",
    "hutchinson",
    "hvp",
    "install",
    "installed",
    "jacfwd",
    "jacobian",
    "jacrev",
    "jvp",
    "laplacian",
    "linear_transpose",
    "linearize",
    "max_batch",
    "memory_analysis",
    "name",
    "natural_gradient_step",
    "newton_step",
    "pareto",
    "partials",
    "passes",
    "plan",
    "policies",
    "remat",
    "residuals",
    "rules",
    "sparse_hessian",
    "sparse_jacobian",
    "sparsity",
    "uninstall",
    "value_and_grad",
    "vjp",
    "while_checkpoints",
    "why_oom",
]

__version__ = packages.own_version()

# These modules are imported on first use: together they take a third of the import time.
_LATER = {
    "compare": "xform.transforms.compare",
    "fisher_vp": "xform.curvature.products",
    "fits": "xform.memory.questions",
    "ggnvp": "xform.curvature.products",
    "graph": "xform.adjoints.graph",
    "laplacian": "xform.sparse.laplacian",
    "health": "xform.diagnosis.health",
    "hessian_spectrum": "xform.curvature.spectrum",
    "hutchinson": "xform.curvature.hutchinson",
    "max_batch": "xform.memory.questions",
    "memory_analysis": "xform.memory.analysis",
    "name": "xform.adjoints.name",
    "natural_gradient_step": "xform.curvature.newton",
    "newton_step": "xform.curvature.newton",
    "pareto": "xform.transforms.pareto",
    "partials": "xform.adjoints.partials",
    "plan": "xform.transforms.plan",
    "sparse_hessian": "xform.sparse.matrix",
    "sparse_jacobian": "xform.sparse.matrix",
    "sparsity": "xform.sparse.sparsity",
    "why_oom": "xform.memory.questions",
}

if TYPE_CHECKING:
    from xform import curvature as curvature
    from xform import equinox as equinox
    from xform import flax as flax
    from xform.adjoints.graph import graph
    from xform.adjoints.name import name
    from xform.adjoints.partials import partials
    from xform.curvature.hutchinson import hutchinson
    from xform.curvature.newton import natural_gradient_step, newton_step
    from xform.curvature.products import fisher_vp, ggnvp
    from xform.curvature.spectrum import hessian_spectrum
    from xform.diagnosis.health import health
    from xform.memory.analysis import memory_analysis
    from xform.memory.questions import fits, max_batch, why_oom
    from xform.sparse.laplacian import laplacian
    from xform.sparse.matrix import sparse_hessian, sparse_jacobian
    from xform.sparse.sparsity import sparsity
    from xform.transforms.compare import compare
    from xform.transforms.pareto import pareto
    from xform.transforms.plan import plan
else:

    def __getattr__(name: str) -> Any:
        """Import a name of `_LATER`, or a module that needs more than JAX, on first use."""
        if name in _LATER:
            globals()[name] = getattr(importlib.import_module(_LATER[name]), name)
            return globals()[name]
        if name in ("curvature", "equinox", "flax", "testing"):
            return importlib.import_module(f"xform.{name}")
        raise AttributeError(f"module 'xform' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
