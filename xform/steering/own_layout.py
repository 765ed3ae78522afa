"""`own_layout`: an identity whose result may have another memory layout than its operand.

A matrix product of a GPU prefers some order of its dimensions in memory. XLA gives that order to
all values up to the ends of a loop's body, and so to the stacks that the loop reads and writes.
The two loops of a derivative often prefer different orders. Then XLA copies a whole stack between
them. In a scanned attention layer this was a second copy of all attention weights.

With `own_layout` around each slice of a stack, the stacks have the order of their dimensions, and
only the slice of one iteration is transposed. On the GPU the identity is an annotation that the
value is in the device's memory. XLA assigns layouts on both sides of it separately, and then
removes it. It does not change how a value is sharded. On other backends nothing is done: a TPU
has its own layouts, and a CPU keeps the order of the dimensions.

Only XLA:GPU needs this, with JAX 0.10.2 to 0.12.0.1. It costs nothing at run time. The switch is
`own_layouts`: without it, scanned attention took 1.2 times the temporary bytes on an H100
(`experiments/steering`; `experiments/stacks` has more programs).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.ffi import ffi_lowering

from xform._jax import Primitive, ShapedArray, ad, batching, ir, mlir
from xform.program.arithmetic import Value
from xform.registry.dependence import ELEMENTWISE_DEPENDENCE
from xform.registry.traits import Traits
from xform.registry.words import linear
from xform.steering.settings import steering

own_layout_p = Primitive("xform_own_layout")
own_layout_p.def_impl(lambda x: x)
own_layout_p.def_abstract_eval(lambda x: x)


def own_layout(x: Any) -> Any:
    """Return `x`, the slice of a stack, with a layout that does not depend on the stack's.

    `x` is a value or a pytree of values, such as the token of a loop inside the body. Values with
    fewer than two dimensions, on the host, or of an extended dtype such as PRNG keys, are returned
    as they are. So is None.
    """
    return jax.tree.map(_identity, x) if steering().own_layouts else x


def _identity(x: Value) -> Value:
    aval = jax.typeof(x)
    is_array = isinstance(aval, ShapedArray) and jnp.issubdtype(aval.dtype, jnp.generic)
    if not is_array or aval.ndim < 2 or aval.memory_space != jax.memory.Space.Device:
        return x
    return own_layout_p.bind(x)


def _annotated(ctx: Any, x: Any) -> Any:
    """Lower to the annotation that a value is in the device's memory."""
    place = ir.DictAttr.get({"_xla_buffer_placement": ir.StringAttr.get("device")})
    lower = ffi_lowering(
        "annotate_device_placement", skip_ffi_layout_processing=True, api_version=1,
        extra_attributes={"mhlo.frontend_attributes": place},
    )  # fmt: skip
    return lower(ctx, x)


mlir.register_lowering(own_layout_p, lambda ctx, x: [x])
mlir.register_lowering(own_layout_p, _annotated, platform="gpu")
batching.defvectorized(own_layout_p)


def _jvp(primals: Any, tangents: Any) -> Any:
    return own_layout_p.bind(*primals), tangents[0]


ad.primitive_jvps[own_layout_p] = _jvp
ad.primitive_transposes[own_layout_p] = lambda ct, x: [ct]
linear(own_layout_p, lambda ct, x: ct, traits=Traits(
    "movement", identity=True, dependence=ELEMENTWISE_DEPENDENCE))  # fmt: skip
