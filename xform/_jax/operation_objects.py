"""Classes and functions of `jax.experimental.hijax`, under the names of JAX 0.12.

Operations that are Python objects have rules. A backward rule adds cotangents to accumulators.
"""

from __future__ import annotations

from typing import Any

from jax.experimental import hijax

# The base class of operation objects, which has another name in JAX 0.10.
HiPrim: Any = getattr(hijax, "HiPrim", None) or getattr(hijax, "VJPHiPrimitive")  # noqa: B009

# The classes of accumulators, which JAX 0.10 does not export.
_accumulators: Any = hijax if hasattr(hijax, "ValAccum") else HiPrim.vjp_bwd.__globals__["ad"]
ValAccum: Any = _accumulators.ValAccum
NullAccum: Any = _accumulators.NullAccum

# Rules that JAX derives from another rule of the same object. They call JAX's own autodiff. Since
# JAX 0.12, each of the first three names is a tuple of two rules.
_DERIVED_NAMES = (
    "linearize_from_jvp", "vjp_from_jvp", "vjp_from_lin", "apply_derived_linearization",
    "vjp_fwd_from_jvp", "transpose_jvp", "vjp_fwd_from_lin", "transpose_linearized",
)  # fmt: skip
_in_hijax = [getattr(hijax, name) for name in _DERIVED_NAMES if hasattr(hijax, name)]
DERIVED_RULES = [rule for x in _in_hijax for rule in (x if isinstance(x, tuple) else (x,))]
