"""Composable function transforms for JAX, with control of what the backward pass keeps."""

import xform.rules as _rules  # noqa: F401 - fills the table of rules
from xform import errors, policies
from xform.transforms.checkpoint import checkpoint
from xform.transforms.checkpoint import checkpoint as remat
from xform.transforms.forward import jvp, linearize
from xform.transforms.jacobian import hessian, hvp, jacfwd, jacobian, jacrev
from xform.transforms.reverse import fwd_and_bwd, grad, linear_transpose, value_and_grad, vjp

__all__ = [
    "checkpoint",
    "errors",
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
    "policies",
    "remat",
    "value_and_grad",
    "vjp",
]
