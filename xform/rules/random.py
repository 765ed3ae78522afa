"""Rules of random numbers.

Random bits and keys have no derivative. A sample of a gamma distribution has one with respect to
the shape parameter of the distribution, which `lax.random_gamma_grad` computes. Source: Figurnov et
al., "Implicit Reparameterization Gradients", arXiv:1805.08498.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import lax

from xform._jax import JaxprEqn
from xform.interpret.cost import size
from xform.registry.traits import MOVEMENT, Traits, none
from xform.registry.words import constant, pointwise


def _draw_flops(eqn: JaxprEqn) -> float:
    """Return the integer operations of a draw: threefry takes about 50 for each 32-bit number."""
    return 50.0 * sum(map(size, eqn.outvars))


RANDOM = Traits(random=True, flops=_draw_flops)

constant("random_seed", supported_params=("impl",), traits=Traits(random=True, flops=none))
constant("random_wrap", supported_params=("impl",), traits=MOVEMENT)
constant("random_unwrap", "random_clone", supported_params=(), traits=MOVEMENT)
constant("random_bits", supported_params=("bit_width", "shape", "out_sharding"), traits=RANDOM)
constant("random_split", supported_params=("shape",), traits=RANDOM)
constant("random_fold_in", supported_params=(), traits=RANDOM)
constant("threefry2x32", "threefry4x32", "philox2x32", "philox4x32", traits=RANDOM)
constant("rng_bit_generator", traits=RANDOM)
constant("rng_uniform", supported_params=("shape",),
         traits=Traits(random=True, repeatable=False))  # fmt: skip
constant("iota_2x32_shape", supported_params=("shape",), traits=MOVEMENT)


_gamma_grad: Any = lax.random_gamma_grad  # `Any`, because its decorator hides the type


def _gamma_shape_partial(y: Any, key: Any, a: Any, *, log_space: bool):
    """Return the partial derivative of a gamma sample for the shape parameter `a`.

    With `log_space`, `y` is the logarithm of the sample.
    """
    if not log_space:
        return _gamma_grad(a, y)
    # The sample may underflow. Then the smallest positive number takes its place.
    tiny = np.asarray(jax.numpy.finfo(y.dtype).tiny, y.dtype)
    sample = lax.max(lax.exp(y), tiny)
    return lax.div(_gamma_grad(a, sample), sample)


# The first input is a key. It is never differentiated, so its partial derivative is not called.
pointwise("random_gamma", lambda y, key, a: None, _gamma_shape_partial, traits=RANDOM)
