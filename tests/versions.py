"""JAX names that tests use, and that are private or differ between versions."""

import warnings

from jax import lax
from jax._src import hijax
from jax._src.ad_checkpoint import saved_residuals
from jax._src.api import fwd_and_bwd

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # since 0.12, when it is imported
    from jax.experimental.pallas.ops.gpu import attention

# A mutable value that asks a trace for its contents; removed in 0.12.
Box = getattr(hijax, "Box", None)

# Primitives with a rule that are new in 0.12.
NEW = {"log2", "one_minus_square", "polynomial"}

# Primitives without a rule that this version lacks.
ABSENT = {"relayout"}
if not NEW.isdisjoint(dir(lax)):
    ABSENT = {"box_get", "box_set", "new_box", "log_extend", "log_read", "new_log",
              "pbroadcast_start", "pbroadcast_done", "psum_start", "unreduced_psum_start",
              "unreduced_reduce_scatter_start"}  # fmt: skip

# Functions whose derivative at a weakly typed number has a strong type in JAX since 0.12.
STRONG = set() if Box else {lax.erf}

__all__ = [
    "ABSENT",
    "NEW",
    "STRONG",
    "Box",
    "attention",
    "fwd_and_bwd",
    "saved_residuals",
]
