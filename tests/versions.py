"""Names of JAX that tests use, and that are private or not the same in every version."""

import warnings

from jax._src.ad_checkpoint import saved_residuals
from jax._src.api import fwd_and_bwd

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # since 0.12, at its import
    from jax.experimental.pallas.ops.gpu import attention

__all__ = ["attention", "fwd_and_bwd", "saved_residuals"]
