"""Cases of calls: of `xform.rules.custom_vmap`, `linear_call` and `marked`."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import linear_call
from jax.experimental.scheduling_groups import scheduling_group
from jax.experimental.xla_metadata import set_xla_metadata

from xform._jax import compute_on as on
from xform.testing import Case

RNG = np.random.default_rng(29)
X, Y = RNG.normal(size=(2, 3))


@custom_vmap
def product(x, y):
    return jnp.sin(x) * y, jnp.sum(y)


@product.def_vmap
def _(size, batched, x, y):
    x, y = (a if b else jnp.broadcast_to(a, (size, *a.shape))
            for a, b in zip((x, y), batched, strict=True))  # fmt: skip
    return (jnp.sin(x) * y, jnp.sum(y, -1)), (True, True)


def divided(x, r):
    """The transpose is right here. A wrong one would be used as well."""
    return x + linear_call(lambda r, x: x / r, lambda r, ct: ct / r, r, x)


def pair(x, r):
    """The first result does not depend on the fixed input `r`, and the second does."""
    of_x = linear_call(
        lambda r, x: (2.0 * x, x * r), lambda r, cts: 2.0 * cts[0] + cts[1] * r, r, x
    )
    return jnp.sin(of_x[0]), of_x[1]


def body(x, y):
    return jnp.sin(x) * y


elsewhere = on(body, compute_type="device_host", out_memory_spaces=jax.memory.Space.Device)
grouped = scheduling_group("a")(body)
tagged = lambda x: set_xla_metadata(jnp.sin(x), key="value")

CASES = [
    # JAX has no reverse mode for this.
    Case("custom_vmap_call", product, (X, Y), complex=True, jax=False),
    Case("linear_call", lambda x: divided(x, 2.0), (X,), vmap=False),
    Case("linear_call", divided, (X, Y), label="held", jax=False, vmap=False),
    Case("linear_call", pair, (X, Y), label="pair", jax=False, vmap=False),
    Case("compute_on", elsewhere, (X, Y)),
    Case("xla_metadata_call", grouped, (X, Y)),
    Case("xla_metadata_value", tagged, (X,)),
]
