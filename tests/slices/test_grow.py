"""How a body grows from its sliced inputs and outputs."""

import jax
import jax.numpy as jnp

from xform.program.ir import trace
from xform.slices.grow import body_slices


def test_each_reader_of_a_sliced_value_of_a_body_is_sliced() -> None:
    """Two outputs read a value that repeats the rows of `w`. The search starts at the first one."""

    def body(x: jax.Array, w: jax.Array) -> list[jax.Array]:
        rows = jax.lax.broadcast_in_dim(w, (6, 4), (1,))
        return [rows * x, jnp.cos(rows), jnp.sin(w)]

    types = jax.ShapeDtypeStruct((6, 4), jnp.float32), jax.ShapeDtypeStruct((4,), jnp.float32)
    found = body_slices(trace(body, *types), {}, {0: 0}, n=3)
    assert found is not None
    assert (found.inputs, found.outputs) == ((0, None), (0, 0, None))
    assert body_slices(trace(body, *types), {}, {0: 1}, n=3) is None  # 3 does not divide 4
