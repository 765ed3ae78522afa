"""`materialize`: an identity whose result the compiler must write to memory.

A compiler may fuse the computation of a saved value into all of its readers. Then it does not write
the value, but keeps the inputs of the computation. For a dropout mask these are two arrays of
random bits, each four times as large as the mask. `materialize` prevents this fusion:

- on GPU by an optimization barrier, which the compiler keeps until fusion is done;
- on CPU by a loop that never runs, with the value as its state. A loop's state is in memory, and
  the compiler cannot know the loop's condition;
- on TPU it does nothing. There the compiler recomputes random bits from their key for each reader,
  and keeps neither bits nor mask.

`must_materialize.py` and `long_chains.py` choose the values.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from xform._jax import Primitive, ad, batching, mlir
from xform.program.arithmetic import Value
from xform.program.dimensions import has_elements
from xform.registry.dependence import ELEMENTWISE_DEPENDENCE
from xform.registry.traits import Traits
from xform.registry.words import linear
from xform.steering.barrier import Where, is_active, lowered_plainly, opaque_true

materialize_p = Primitive("xform_materialize")
materialize_p.def_impl(lambda x, where: x)
materialize_p.def_abstract_eval(lambda x, where: x)


def materialize(x: Value, where: Where = "everywhere") -> Value:
    """Return `x`, written to memory on the backends `where`.

    This costs a write, and prevents fusion with the readers. A value without elements, or of an
    extended dtype such as PRNG keys, is returned as it is.
    """
    can_be_written = has_elements(x.shape) and jnp.issubdtype(x.dtype, jnp.generic)
    return materialize_p.bind(x, where=where) if can_be_written else x


def _loop(x: Value, where: Where) -> Value:
    """Pass `x` through a loop that never runs: XLA:CPU writes the values that a loop carries."""
    if not is_active(where, "cpu"):
        return x
    never = lax.bitwise_not(opaque_true(x))
    # The body must change the state: XLA removes a value that a loop's body only passes on.
    step = lambda state: (lax.full_like(never, False), lax.full_like(state[1], 0))
    return lax.while_loop(lambda state: state[0], step, (never, x))[1]


def _barrier(x: Value, where: Where) -> Value:
    """Pass `x` through an optimization barrier, which a GPU's compiler does not fuse across."""
    return lax.optimization_barrier(x) if is_active(where, "gpu") else x


mlir.register_lowering(materialize_p, lowered_plainly(_loop, several=False), platform="cpu")
mlir.register_lowering(materialize_p, lowered_plainly(_barrier, several=False))
mlir.register_lowering(materialize_p, lowered_plainly(lambda x, where: x, several=False),
                       platform="tpu")  # fmt: skip
batching.defvectorized(materialize_p)


def _jvp(primals: Any, tangents: Any, *, where: Where) -> Any:
    return materialize_p.bind(*primals, where=where), tangents[0]


ad.primitive_jvps[materialize_p] = _jvp
ad.primitive_transposes[materialize_p] = lambda ct, x, *, where: [ct]
linear(materialize_p, lambda ct, x, *, where: ct, traits=Traits(
    "movement", identity=True, dependence=ELEMENTWISE_DEPENDENCE))  # fmt: skip
